/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What arrives from another node or the world, by an uplink or through the tunnel:
 * whether its source may be there, and whether a pod may get it.
 */
#ifndef EC_LIB_ARRIVE_H
#define EC_LIB_ARRIVE_H

#include "bpf/lib/ct.h"
#include "bpf/lib/icmp.h"
#include "bpf/lib/nf.h"
#include "bpf/lib/open.h"
#include "bpf/lib/path.h"

/* The kind of an address, of which found is the entry; all of this node's podCIDR is LOCAL. */
EC_INLINE enum destination_kind arrive_kind(const struct config *config, __u8 family, const struct addr *address,
					    const struct destination *found)
{
	if (path_is_ours(config, family, address))
		return DESTINATION_LOCAL;
	return found ? found->kind : DESTINATION_WORLD;
}

/*
 * Whether the host has a route to the source through this uplink. An empty mask, as
 * left by an older agent that kept none, refuses nothing.
 */
EC_INLINE bool arrive_has_route(const struct __sk_buff *ctx, const struct destination *source)
{
	struct uplink_key key = {.ifindex = ctx->ifindex};
	struct uplink *uplink;

	if (source->ifindex == ctx->ifindex || !source->uplinks)
		return true;
	uplink = bpf_map_lookup_elem(&uplinks, &key);
	return uplink && (source->uplinks & (1ULL << (uplink->bit & 63)));
}

/* Whether a packet may have this source on this uplink; from and kind describe the source. */
EC_INLINE enum verdict arrive_judge_source(const struct __sk_buff *ctx, const struct pkt *pkt,
					   const struct destination *from, enum destination_kind kind)
{
	/* What this node owns cannot come from outside, nor a Service's answer, which has a backend's address there. */
	if (kind == DESTINATION_LOCAL || kind == DESTINATION_HOST || (cfg.services && kind == DESTINATION_SERVICE) ||
	    ip_martian(pkt->family, &pkt->tuple.src))
		return -DROP_SPOOFED_SOURCE;
	return from && !arrive_has_route(ctx, from) ? -DROP_WRONG_UPLINK : VERDICT_GO_ON;
}

/* Whether packets from there to a pod go to the stack, as the pod's packets in the other direction do. */
EC_INLINE bool arrive_to_stack(const struct config *config, const struct destination *from)
{
	return (config->flags & (CONFIG_POD_CIDR_TO_STACK | CONFIG_ROUTES_TO_STACK)) ||
	       (from && (from->flags & DESTINATION_TO_STACK));
}

/* Whether an IPsec policy of the host gives packets from this source to the stack, older flows included. */
EC_CALL bool arrive_under_policy(const struct addr *src)
{
	struct config *config = config_get();
	struct destination *from;

	if (!config || !(config->flags & CONFIG_POLICIES))
		return false;
	from = path_destination(src);
	return from && (from->flags & DESTINATION_TO_STACK);
}

/* An ICMP error takes the way of the flow that it quotes, whoever sent it: the pod's to inner->dst. */
EC_CALL enum verdict arrive_judge_error(struct __sk_buff *ctx, const struct config *config, const struct scratch *s,
					const struct endpoint *ep)
{
	const struct tuple *inner = &s->inner.tuple;
	struct destination *to = path_destination(&inner->dst);
	enum destination_kind kind = arrive_kind(config, s->pkt.family, &inner->dst, to);

	if (arrive_to_stack(config, to))
		return VERDICT_STACK;
	return nf_judge(ctx, s->pkt.family, kind)
		       ?: kind == DESTINATION_WORLD ? ct_verdict_of(inner, ep->ifindex)
						    : VERDICT_GO_ON;
}

/* Whether the pod, or the node through the tunnel, may receive the packet, if it is ICMP. */
EC_INLINE enum verdict arrive_check_icmp(struct __sk_buff *ctx, const struct pkt *pkt)
{
	return pkt_is_icmp(pkt->family, pkt->tuple.proto) ? icmp_check(ctx, END_DESTINATION) : VERDICT_GO_ON;
}

/* Whether what a client of the cluster opens straight to the pod meets its flow to the pod by a Service. */
EC_CALL bool arrive_beside(struct __sk_buff *ctx, struct scratch *s, __u32 ifindex)
{
	struct device *dev = flow_owner(ifindex);

	return dev && (dev->flags & DEVICE_BACKEND) && s->pkt.fragment == FRAGMENT_NONE && pkt_l4(ctx, &s->pkt) &&
	       s->pkt.l4 == L4_FLOW && open_allowed(&s->pkt) && nat_beside_service(&s->pkt);
}

/*
 * Whether a packet whose source and ICMP message may be there may go straight into the
 * pod; from is what destinations says of its source.
 */
EC_INLINE enum verdict arrive_judge(struct __sk_buff *ctx, const struct config *config, struct scratch *s,
				    const struct endpoint *ep, const struct destination *from)
{
	if (arrive_to_stack(config, from))
		return VERDICT_STACK;
	if (s->pkt.l4 == L4_ICMP_ERROR)
		return arrive_judge_error(ctx, config, s, ep);
	if (cfg.services && arrive_beside(ctx, s, ep->ifindex))
		return -DROP_FLOW_COLLISION;
	return nf_judge(ctx, s->pkt.family, arrive_kind(config, s->pkt.family, &s->pkt.tuple.src, from));
}

#endif
