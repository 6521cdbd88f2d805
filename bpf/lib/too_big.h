/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * A packet that does not fit its path. If nobody may fragment it, its sender is told the
 * path's MTU: fragmentation needed (RFC 1191), or packet too big (RFC 8201).
 */
#ifndef EC_LIB_TOO_BIG_H
#define EC_LIB_TOO_BIG_H

#include "bpf/lib/answer.h"
#include "bpf/lib/nf.h"
#include "bpf/lib/path.h"
#include "bpf/lib/scratch.h"
#include "bpf/lib/service.h"

enum {
	TOO_BIG_CODE_IPV4 = 4, /* fragmentation needed, of ICMP_DEST_UNREACH (RFC 792) */
};

/* Whether the packet may be fragmented on its way: IPv4's without DF. */
EC_INLINE bool too_big_may_fragment(struct __sk_buff *ctx, const struct pkt *pkt)
{
	__be16 flags;

	return pkt->family == FAMILY_IPV4 &&
	       !bpf_skb_load_bytes(ctx, IP_OFF + offsetof(struct iphdr, frag_off), &flags, sizeof(flags)) &&
	       !(flags & bpf_htons(IP_DONT_FRAGMENT));
}

/* Refuses a packet of the pod with this ifindex, which will be told the MTU. */
EC_INLINE enum verdict too_big_refuse(struct scratch *s, __u32 ifindex, __u32 mtu)
{
	s->owner.ifindex = ifindex;
	s->mtu = mtu;
	return -DROP_TOO_BIG;
}

/*
 * The MTU that a pod may be told, in bytes of IP packet; 0: not known. Of a path that the kernel routes it is the
 * link's: what the route has less, anybody may have told the node, and the stack forwards no IPv4 by that (unless
 * ip_forward_use_pmtu says so).
 */
EC_INLINE __u32 too_big_mtu(struct __sk_buff *ctx, const struct path *path)
{
	__u32 mtu = 0;

	if (path->tunnel || path->kind == DESTINATION_POD_CIDR)
		return path->mtu;
	bpf_check_mtu(ctx, path->ifindex, &mtu, 0, 0);
	return mtu;
}

/*
 * Refuses a packet that does not fit its path, or leaves it to the stack: to be fragmented, or where that knows better
 * what fits or, beside netfilter, where the packet goes.
 */
EC_CALL enum verdict too_big_judge(struct __sk_buff *ctx, struct scratch *s, const struct path *path)
{
	const struct config *config = config_get();
	__u32 mtu = too_big_mtu(ctx, path);

	if (!mtu || !offload_exceeds(ctx, &s->pkt, mtu))
		return VERDICT_STACK;
	if (nf_translates() && path->kind != DESTINATION_POD_CIDR)
		return VERDICT_STACK;
	if (!path->learnt && too_big_may_fragment(ctx, &s->pkt))
		return VERDICT_STACK;
	if (!config || addr_is_zero(path_node_address(config, s->pkt.family)))
		return VERDICT_STACK;
	return too_big_refuse(s, ctx->ifindex, mtu);
}

/* Turns the packet into the error about itself, from an address. */
EC_INLINE bool too_big_turn(struct __sk_buff *ctx, struct scratch *s, const struct addr *from)
{
	if (s->pkt.family == FAMILY_IPV6)
		answer_set_error(s, ICMPV6_PACKET_TOO_BIG, 0, s->mtu);
	else
		answer_set_error(s, ICMP_DEST_UNREACH, TOO_BIG_CODE_IPV4, s->mtu);
	return answer_error(ctx, s, from);
}

/*
 * The owner in the scratch record, if it may be told another MTU. All clients outside are one owner, whose answers
 * anybody can use up, and without this one a connection hangs: as the kernel does, nobody counts them. They are
 * smaller than what they are about.
 */
EC_INLINE struct device *too_big_to(const struct scratch *s)
{
	return s->owner.ifindex ? answer_to(s, answer_burst(s)) : flow_world();
}

/*
 * Tells the owner in the scratch record the MTU that is there, from the node's address or,
 * of a packet to a Service, from that. Returns a TC action.
 */
EC_GLOBAL int too_big_answer(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();
	const struct addr *from;
	struct device *dev;

	if (!s)
		return EC_ACT_SHOT;
	from = answer_router(s);
	dev = too_big_to(s);
	if (!from || !dev || service_undo(ctx, s) || !too_big_turn(ctx, s, from))
		return EC_ACT_SHOT;
	return answer_send(ctx, s, dev);
}

/*
 * Tells the stack, of a packet that it sends out of this device: the host's own sockets
 * learn of it, and netfilter translates it back for a pod. The error comes in by the
 * device as if from the packet's destination, since from the node itself it would be a
 * martian.
 */
EC_GLOBAL int too_big_return(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();
	__u8 mac[ETH_ALEN];
	struct addr from;

	if (!s || (s->owner.ifindex && !answer_to(s, answer_burst(s))))
		return EC_ACT_SHOT;
	from = s->pkt.tuple.dst;
	if (!too_big_turn(ctx, s, &from) || bpf_skb_load_bytes(ctx, ETH_ALEN, mac, sizeof(mac)) ||
	    bpf_skb_store_bytes(ctx, 0, mac, sizeof(mac), 0))
		return EC_ACT_SHOT;
	ctx->mark |= cfg.mark;
	return bpf_redirect(ctx->ifindex, BPF_F_INGRESS);
}

#endif
