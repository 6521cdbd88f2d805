//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * tc ingress of an uplink: everything that reaches the node. What is a pod's is
 * delivered, by its address or by the masqueraded flow that it answers; all
 * else is the stack's, malformed packets included.
 */
#include "bpf/lib/ct.h"
#include "bpf/lib/frag.h"
#include "bpf/lib/fwd.h"
#include "bpf/lib/icmp.h"
#include "bpf/lib/nat.h"
#include "bpf/lib/nf.h"

/*
 * Whether what is known of the source allows it on this uplink: there is a route to
 * it. An empty mask says nothing: of an agent that kept none, as before an upgrade.
 */
EC_INLINE bool from_uplink_reached(const struct __sk_buff *ctx, const struct destination *source)
{
	struct uplink_key key = {.ifindex = ctx->ifindex};
	struct uplink *uplink;

	if (source->ifindex == ctx->ifindex || !source->uplinks)
		return true;
	uplink = bpf_map_lookup_elem(&uplinks, &key);
	return uplink && (source->uplinks & (1ULL << (uplink->bit & 63)));
}

/* What an address is: a pod, a node, the world, or what only this node can be. */
EC_INLINE enum destination_kind from_uplink_kind(const struct config *config, const struct addr *address,
						 const struct destination *found)
{
	if (addr_v4_in(addr_v4(address), &config->pod_cidr_ipv4, config->pod_cidr_ipv4_len))
		return DESTINATION_LOCAL;
	return found ? found->kind : DESTINATION_WORLD;
}

/* A flow that the world opens is recorded, so that its replies leave as they are, the same way. */
EC_INLINE int from_uplink_record(struct __sk_buff *ctx, struct pkt *pkt, const struct endpoint *ep, bool to_stack)
{
	if (!cfg.masquerade)
		return cfg.netfilter_nat || to_stack ? TRAFFIC_STACK : 0;
	return pkt_parse_l4(ctx, pkt) ? ct_record(pkt, ep->ifindex, to_stack) : -DROP_INVALID;
}

/* Whether the stack decides on what comes to a pod from there: both ways of a flow, or none. */
EC_INLINE bool from_uplink_to_stack(const struct config *config, const struct destination *from)
{
	return (config->flags & (CONFIG_POD_CIDR_TO_STACK | CONFIG_ROUTES_TO_STACK)) ||
	       (from && (from->flags & DESTINATION_TO_STACK));
}

/* An ICMP error goes the way of the packet inside, whoever wrote it. Its far end is where that was sent. */
EC_CALL int from_uplink_judge_error(struct __sk_buff *ctx, const struct config *config, const struct tuple *inner,
				    const struct endpoint *ep)
{
	struct destination *to = path_destination(&inner->dst);
	struct conntrack_entry *native;

	if (from_uplink_to_stack(config, to))
		return TRAFFIC_STACK;
	if (!cfg.netfilter_nat)
		return 0;
	switch (from_uplink_kind(config, &inner->dst, to)) {
	case DESTINATION_LOCAL:
	case DESTINATION_POD_CIDR:
		return nf_passes(ctx) ? 0 : TRAFFIC_STACK;
	case DESTINATION_WORLD:
		native = ct_peek(inner, ep->ifindex);
		return native ? ct_way(native->flags) : TRAFFIC_STACK;
	default:
		return TRAFFIC_STACK;
	}
}

/* Whether a packet for a pod may come from that source, on this uplink. 0, or a negated drop reason. */
EC_INLINE int from_uplink_judge_source(const struct __sk_buff *ctx, const struct pkt *pkt,
				       const struct destination *from, enum destination_kind kind)
{
	/* What this node owns cannot come from outside. */
	if (kind == DESTINATION_LOCAL || kind == DESTINATION_HOST || addr_v4_martian(addr_v4(&pkt->tuple.src)))
		return -DROP_SPOOFED_SOURCE;
	return from && !from_uplink_reached(ctx, from) ? -DROP_WRONG_UPLINK : 0;
}

/* Whether a packet may go straight into the pod: 0, else a result. */
EC_CALL int from_uplink_judge(struct __sk_buff *ctx, const struct config *config, struct scratch *s,
			      const struct endpoint *ep)
{
	struct pkt *pkt = &s->pkt;
	struct destination *from = path_destination(&pkt->tuple.src);
	enum destination_kind kind = from_uplink_kind(config, &pkt->tuple.src, from);
	bool to_stack = from_uplink_to_stack(config, from);
	int ret;

	ret = from_uplink_judge_source(ctx, pkt, from, kind);
	if (ret)
		return ret;
	if (pkt->tuple.proto == IPPROTO_ICMP) {
		ret = icmp_check(ctx, END_DESTINATION);
		if (ret)
			return ret;
		if (pkt->l4 == L4_ICMP_ERROR && !to_stack)
			return from_uplink_judge_error(ctx, config, &s->inner.tuple, ep);
	}
	switch (kind) {
	case DESTINATION_POD_CIDR:
		return !to_stack && nf_passes(ctx) ? 0 : TRAFFIC_STACK;
	case DESTINATION_NODE:
	case DESTINATION_NATIVE:
		return cfg.netfilter_nat || to_stack ? TRAFFIC_STACK : 0;
	default:
		return from_uplink_record(ctx, pkt, ep, to_stack);
	}
}

EC_INLINE int from_uplink_to_pod(struct __sk_buff *ctx, const struct config *config, struct scratch *s,
				 const struct endpoint *ep)
{
	return from_uplink_judge(ctx, config, s, ep) ?: fwd_to_pod(ctx, &s->pkt, ep);
}

/* The pod that a reverse half leads to; NULL: it is gone, and the entry with it. */
EC_INLINE struct endpoint *from_uplink_owner(const struct snat_entry *reverse)
{
	struct endpoint_key key = {.address = reverse->to_address};
	struct endpoint *ep = bpf_map_lookup_elem(&endpoints, &key);

	return ep && ep->ifindex == reverse->ifindex ? ep : NULL;
}

/* Whether a policy of the host's gives what comes from there to the stack, also of a flow that is older. */
EC_CALL bool from_uplink_under_policy(const struct pkt *pkt)
{
	struct config *config = config_get();
	struct destination *from;

	if (!config || !(config->flags & CONFIG_POLICIES))
		return false;
	from = path_destination(&pkt->tuple.src);
	return from && (from->flags & DESTINATION_TO_STACK);
}

/*
 * The last step of a translated packet: the way of its flow. What goes to the
 * stack is marked, for another build's program behind this one, as there is during
 * an upgrade, must not take it for a packet that the world sends to the pod.
 */
EC_INLINE int from_uplink_deliver(struct __sk_buff *ctx, const struct pkt *pkt, const struct snat_entry *reverse,
				  const struct endpoint *ep)
{
	int ret = TRAFFIC_STACK;

	if (ep && !(reverse->flags & FLOW_VIA_STACK) && !from_uplink_under_policy(pkt))
		ret = fwd_to_pod(ctx, pkt, ep);
	if (ret != TRAFFIC_STACK)
		return ret;
	ctx->mark |= cfg.mark;
	return rewrite_finish(ctx, pkt) ?: TRAFFIC_STACK;
}

EC_CALL int from_uplink_icmp_error(struct __sk_buff *ctx, const struct config *config, struct scratch *s)
{
	struct destination *from;
	struct snat_entry *reverse;
	struct endpoint *ep = NULL;
	int ret;

	if (!icmp_parse_inner(ctx) || !nat_port_in_range(s->inner.tuple.sport))
		return TRAFFIC_STACK;
	reverse = nat_peek_reverse(&s->inner.tuple);
	if (!reverse)
		return TRAFFIC_STACK;
	from = path_destination(&s->pkt.tuple.src);
	ret = from_uplink_judge_source(ctx, &s->pkt, from, from_uplink_kind(config, &s->pkt.tuple.src, from));
	if (!ret)
		ret = icmp_check(ctx, END_DESTINATION);
	if (ret)
		return ret;
	if (!(reverse->flags & FLOW_HOST)) {
		ep = from_uplink_owner(reverse);
		if (!ep)
			return TRAFFIC_STACK;
	}
	ret = icmp_translate_in(ctx, s, reverse);
	return ret ?: from_uplink_deliver(ctx, &s->pkt, reverse, ep);
}

/*
 * The ports of a fragment to the node, the node's own included: of one whose first
 * was not seen nobody can tell whether it is a pod's, and lost. 0, or a negated drop
 * reason, with which the stack gets it.
 */
EC_INLINE int from_uplink_fragment(struct pkt *pkt)
{
	if (!pkt_proto_known(pkt->tuple.proto))
		return 0;
	if (pkt->fragment == FRAGMENT_LATER)
		return frag_recall(pkt, FRAGMENTS_WORLD) ? 0 : -DROP_FRAGMENT_UNKNOWN;
	frag_remember(pkt, FRAGMENTS_WORLD);
	return 0;
}

/* To the node: a reply to a masqueraded flow, or the stack's. */
EC_CALL int from_uplink_reply(struct __sk_buff *ctx, const struct config *config, struct scratch *s)
{
	struct pkt *pkt = &s->pkt;
	struct snat_entry *reverse;
	struct endpoint *ep = NULL;
	struct tuple world;
	int ret;

	if (!pkt_parse_l4(ctx, pkt))
		return TRAFFIC_STACK;
	if (pkt->fragment != FRAGMENT_NONE) {
		ret = from_uplink_fragment(pkt);
		if (ret)
			return ret;
	}
	if (pkt->l4 == L4_ICMP_ERROR)
		return from_uplink_icmp_error(ctx, config, s);
	world = tuple_reversed(&pkt->tuple);
	if (pkt->l4 != L4_FLOW || !nat_port_in_range(world.sport))
		return TRAFFIC_STACK;
	reverse = nat_lookup_reverse(&world);
	if (!reverse)
		return TRAFFIC_STACK;
	if (!(reverse->flags & FLOW_HOST)) {
		ep = from_uplink_owner(reverse);
		if (!ep)
			return TRAFFIC_STACK;
	}
	nat_note_in(reverse, &world, pkt);
	ret = rewrite_begin(ctx, pkt, END_DESTINATION, reverse);
	return ret ?: from_uplink_deliver(ctx, pkt, reverse, ep);
}

EC_INLINE int from_uplink(struct __sk_buff *ctx)
{
	struct config *config = config_get();
	struct endpoint_key key;
	struct endpoint *ep;
	struct scratch *s;

	if ((ctx->mark & cfg.mark) || ctx->pkt_type != EC_PACKET_HOST || ctx->protocol != bpf_htons(ETH_P_IP))
		return TRAFFIC_STACK;
	if (pkt_in_vlan(ctx))
		return TRAFFIC_STACK;
	s = scratch_new();
	if (!config || !s || !pkt_parse_arrived(ctx, &s->pkt))
		return TRAFFIC_STACK;
	key.address = s->pkt.tuple.dst;
	ep = bpf_map_lookup_elem(&endpoints, &key);
	if (ep)
		return from_uplink_to_pod(ctx, config, s, ep);
	if (addr_v4_in(addr_v4(&s->pkt.tuple.dst), &config->pod_cidr_ipv4, config->pod_cidr_ipv4_len))
		return -DROP_NO_ENDPOINT;
	return cfg.masquerade ? from_uplink_reply(ctx, config, s) : TRAFFIC_STACK;
}

SEC("tc")
int ec_from_uplink(struct __sk_buff *ctx)
{
	return finish(ctx, DIRECTION_FROM_UPLINK, from_uplink(ctx));
}
