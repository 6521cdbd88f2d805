//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * tc egress of an uplink: what the host's stack sends. Masquerades what it
 * forwards for a pod, or sends it through the tunnel; keeps the node's own flows off
 * the pods' ports, and everybody else from sending with its address to tunnels.
 */
#include "bpf/lib/finish.h"
#include "bpf/lib/ip.h"
#include "bpf/lib/l3.h"
#include "bpf/lib/outside.h"
#include "bpf/lib/path.h"
#include "bpf/lib/too_big.h"
#include "bpf/lib/translate.h"
#include "bpf/lib/tunnel.h"

EC_INLINE bool to_uplink_is_world(const struct pkt *pkt, const struct destination *to)
{
	return (!to || to->kind == DESTINATION_WORLD) && !ip_not_routed(pkt->family, &pkt->tuple.dst);
}

/*
 * The last step of a packet whose flow is known. It is marked, so that the program
 * of another build, which runs behind this one during an upgrade, does not translate
 * it again.
 */
EC_INLINE enum verdict to_uplink_done(struct __sk_buff *ctx, const struct pkt *pkt, enum verdict verdict)
{
	verdict = verdict ?: rewrite_finish(ctx, pkt);
	if (verdict)
		return verdict;
	ctx->mark |= cfg.mark;
	return VERDICT_STACK;
}

/* A pod's packet to the world that the stack forwards unencrypted; flags are enum destination_flags. */
EC_CALL enum verdict to_uplink_of_pod(struct __sk_buff *ctx, struct scratch *s, const struct endpoint *ep, __u32 flags)
{
	struct translation t = {};
	enum verdict verdict;

	if (pkt_is_icmp(s->pkt.family, s->pkt.tuple.proto)) {
		verdict = icmp_check(ctx, END_SOURCE);
		if (verdict)
			return verdict;
	}
	__builtin_memset(&s->owner, 0, sizeof(s->owner));
	path_source(ctx->ifindex, s->pkt.family, &s->pkt.tuple.dst, &s->owner.address);
	s->owner.uplink = ctx->ifindex;
	s->owner.ifindex = ep->ifindex;
	s->owner.flags = FLOW_VIA_STACK;
	verdict = translate_find(ctx, s, &t);
	if (verdict)
		return verdict;
	if ((flags & DESTINATION_PROTECTED) && !t.recorded)
		return -DROP_IPSEC_POLICY;
	if ((flags & DESTINATION_TO_STACK) && t.masqueraded && s->pkt.l4 == L4_FLOW)
		nat_to_stack(&s->pkt.tuple, t.masqueraded);
	return to_uplink_done(ctx, &s->pkt, translate_source(ctx, s, &t));
}

/*
 * Whether a datagram of the node itself comes from a port on which a Service answers: the reply must not go there.
 * TCP's opens nothing.
 */
EC_INLINE bool to_uplink_noted(struct __sk_buff *ctx, struct scratch *s)
{
	const struct tuple *t = &s->pkt.tuple;

	return cfg.services && t->proto == IPPROTO_UDP && open_is_from_service(t) && nat_address_held(&t->src) &&
	       !takeover_is_answer(ctx, s);
}

/*
 * Whether the node itself may have one more entry only to be noted. Nobody counts those, so that they would leave pods
 * none; without one, a Service may take what is answered.
 */
EC_INLINE bool to_uplink_has_room(void)
{
	const struct usage *u = flow_usage(USAGE_SNAT);

	return u && !flow_pressure(u, USAGE_SNAT);
}

/*
 * A packet of the node itself from a port of the masquerade range or of a Service, such as
 * one that a program has bound explicitly and that the choice of a pod's port could not see.
 * If a pod's flow has that port towards that destination, the node's gets another.
 */
EC_CALL enum verdict to_uplink_of_node(struct __sk_buff *ctx, struct scratch *s, bool noted)
{
	struct pkt *pkt = &s->pkt;
	struct snat_entry *own, *other;
	enum verdict verdict;

	verdict = nat_find(&pkt->tuple, 0, &own);
	if (verdict)
		return verdict;
	if (!own) {
		other = nat_peek_reverse(&pkt->tuple);
		if (!other && !(noted && to_uplink_has_room()))
			return VERDICT_STACK;
		s->owner.address = pkt->tuple.src;
		s->owner.ifindex = 0;
		s->owner.flags = FLOW_VIA_STACK | FLOW_HOST;
		verdict = translate_open(ctx, s, &own);
		if (verdict)
			return verdict;
	}
	nat_note(own, pkt, true);
	return to_uplink_done(ctx, pkt, rewrite_begin(ctx, pkt, END_SOURCE, own));
}

/*
 * Whether what does not fit the tunnel may leave in fragments of the outer packet, which
 * the kernel makes over IPv4. Beside netfilter it always may: its pod may not know a
 * packet that has been translated.
 */
EC_INLINE bool to_uplink_may_fragment(struct __sk_buff *ctx, const struct pkt *pkt, const struct destination *to)
{
	return addr_is_v4(&to->node) && (nf_translates() || too_big_may_fragment(ctx, pkt));
}

/*
 * A pod's packet that the stack forwards inside the cluster. It has no routes through
 * the tunnel to nodes' addresses, since the host itself reaches those without.
 */
EC_INLINE enum verdict to_uplink_to_cluster(struct __sk_buff *ctx, const struct config *config, struct scratch *s,
					    const struct endpoint *ep, struct destination *to)
{
	enum verdict verdict = to->kind == DESTINATION_NODE ? tunnel_guard(ctx, &s->pkt) : VERDICT_GO_ON;
	__u32 mtu;

	/* It has met no program of ours where the pod sent it. */
	if (cfg.services && to->kind == DESTINATION_SERVICE)
		return -DROP_NO_SERVICE;
	if (verdict || !(to->flags & DESTINATION_BY_TUNNEL) || !config->tunnel_ifindex)
		return verdict ?: VERDICT_STACK;
	/* The stack has only compared it with the uplink's MTU. */
	mtu = path_tunnel_mtu(ctx, config, to);
	if (offload_exceeds(ctx, &s->pkt, mtu) && !to_uplink_may_fragment(ctx, &s->pkt, to))
		return too_big_refuse(s, ep->ifindex, mtu);
	return tunnel_redirect(ctx, config->tunnel_ifindex, s->pkt.tos, &to->node, to->mac);
}

/* Whether kube-proxy was to translate the packet, and has not, as while its rules go: it must not reach the world. */
EC_CALL bool to_uplink_missed(const struct config *config, const struct pkt *pkt)
{
	return cfg.services && config_yields(config, pkt->family) &&
	       (frontend_flags(&pkt->tuple.dst) & SERVICE_CLUSTER_IP);
}

/* A pod's packet that the stack forwards. Where the stack decides on routes, it does so for every destination. */
EC_INLINE enum verdict to_uplink_forwarded(struct __sk_buff *ctx, const struct config *config, struct scratch *s,
					   const struct endpoint *ep)
{
	struct destination *to = path_destination(&s->pkt.tuple.dst);
	__u32 flags = to ? to->flags : 0;

	if (!to_uplink_is_world(&s->pkt, to))
		return to ? to_uplink_to_cluster(ctx, config, s, ep, to) : VERDICT_STACK;
	if (to_uplink_missed(config, &s->pkt))
		return -DROP_NO_SERVICE;
	if (!ip_masqueraded(s->pkt.family))
		return VERDICT_STACK;
	if (config->flags & CONFIG_ROUTES_TO_STACK)
		flags |= DESTINATION_TO_STACK;
	return to_uplink_of_pod(ctx, s, ep, flags);
}

/*
 * An ICMP error by the host's stack about a reply that was translated on arrival: it
 * has to quote the packet as the world sent it.
 */
EC_CALL enum verdict to_uplink_error(struct __sk_buff *ctx, struct scratch *s)
{
	struct destination *from = path_destination(&s->pkt.tuple.src);
	struct snat_entry *forward;
	struct endpoint *ep;

	/* Only the host's own errors can be trusted: others may quote what they like. */
	if (!icmp_parse_inner(ctx) || !from || from->kind != DESTINATION_HOST)
		return VERDICT_STACK;
	s->key = tuple_reversed(&s->inner.tuple);
	ep = path_endpoint(&s->key.src);
	forward = nat_peek(&s->key, ep ? ep->ifindex : 0);
	if (!forward)
		return VERDICT_STACK;
	return to_uplink_done(ctx, &s->pkt, icmp_translate(ctx, s, END_SOURCE, forward));
}

/*
 * To a tunnel port, and not by our programs. What somebody else has sent, such as a
 * container, other nodes would trust if it had a node's address: this one's, by the
 * stack's translation, or another's, unless that one has sent it through this node.
 */
EC_INLINE enum verdict to_uplink_outer(struct __sk_buff *ctx, const struct pkt *pkt)
{
	struct uplink_key in = {.ifindex = ctx->ingress_ifindex};
	struct destination *from = path_destination(&pkt->tuple.src);

	if (!ctx->ingress_ifindex || !from)
		return VERDICT_STACK;
	if (from->kind == DESTINATION_HOST)
		return -DROP_TUNNEL_PORT;
	return from->kind == DESTINATION_NODE && !bpf_map_lookup_elem(&uplinks, &in) ? -DROP_TUNNEL_PORT
										     : VERDICT_STACK;
}

/* What answers a client outside, or goes to a Service past every hook. */
EC_CALL enum verdict to_uplink_services(struct __sk_buff *ctx, struct scratch *s)
{
	struct device *world = flow_world();
	enum verdict verdict;

	if (!pkt_l4(ctx, &s->pkt))
		return outside_keeps(ctx, &s->pkt.tuple.dst, frontend_flags(&s->pkt.tuple.dst)) ? -DROP_INVALID
												: VERDICT_STACK;
	verdict = outside_of_host(ctx, s, world);
	if (verdict || s->service.translated)
		return to_uplink_done(ctx, &s->pkt, verdict);
	return outside_caught(ctx, s, world);
}

/* A packet from an address that no pod has. */
EC_INLINE enum verdict to_uplink_from_host(struct __sk_buff *ctx, const struct config *config, struct scratch *s)
{
	struct pkt *pkt = &s->pkt;
	enum verdict verdict;
	bool noted;

	if (path_is_ours(config, pkt->family, &pkt->tuple.src)) {
		if (ip_masqueraded(pkt->family) && to_uplink_is_world(pkt, path_destination(&pkt->tuple.dst)))
			return -DROP_SPOOFED_SOURCE;
		return cfg.services && outside_keeps(ctx, &pkt->tuple.dst, frontend_flags(&pkt->tuple.dst))
			       ? -DROP_SPOOFED_SOURCE
			       : VERDICT_STACK;
	}
	verdict = cfg.services ? to_uplink_services(ctx, s) : VERDICT_GO_ON;
	if (verdict)
		return verdict;
	if (!pkt_proto_known(pkt->family, pkt->tuple.proto) || pkt_flow(ctx, pkt, FRAGMENTS_NODE))
		return VERDICT_STACK;
	if (tunnel_is_outer(pkt))
		return to_uplink_outer(ctx, pkt);
	if (!ip_masqueraded(pkt->family) && !cfg.services)
		return VERDICT_STACK;
	if (pkt->l4 == L4_ICMP_ERROR)
		return to_uplink_error(ctx, s);
	if (pkt->l4 != L4_FLOW)
		return VERDICT_STACK;
	noted = to_uplink_noted(ctx, s);
	return noted || nat_port_may_be_held(pkt->tuple.proto, pkt->tuple.sport) ? to_uplink_of_node(ctx, s, noted)
										 : VERDICT_STACK;
}

EC_INLINE enum verdict to_uplink(struct __sk_buff *ctx)
{
	struct config *config = config_get();
	enum family family = ip_family(ctx);
	enum verdict verdict;
	struct endpoint *ep;
	struct scratch *s;

	if ((ctx->mark & cfg.mark) || family == FAMILIES || pkt_in_vlan(ctx))
		return VERDICT_STACK;
	s = scratch_new(DIRECTION_TO_UPLINK);
	if (!config || !s)
		return VERDICT_STACK;
	verdict = ip_parse(ctx, s, family);
	if (verdict == -DROP_INVALID)
		return VERDICT_STACK;
	ep = path_endpoint(&s->pkt.tuple.src);
	if (ep && path_foreign(ctx, ep))
		return -DROP_SPOOFED_SOURCE;
	/* It may be for a tunnel port, or a Service. */
	if (verdict)
		return ep || to_uplink_outer(ctx, &s->pkt) < 0 ||
				       (cfg.services &&
					outside_keeps(ctx, &s->pkt.tuple.dst, frontend_flags(&s->pkt.tuple.dst)))
			       ? verdict
			       : VERDICT_STACK;
	return ep ? to_uplink_forwarded(ctx, config, s, ep) : to_uplink_from_host(ctx, config, s);
}

SEC("tc")
int ec_to_uplink(struct __sk_buff *ctx)
{
	return answer_or_finish(ctx, DIRECTION_TO_UPLINK, to_uplink(ctx));
}

/* ec_to_uplink of an uplink without an Ethernet header. A packet that it sends on itself is not counted again. */
SEC("tc")
int ec_to_l3(struct __sk_buff *ctx)
{
	enum verdict verdict;

	if (!l3_reads(ctx))
		return EC_ACT_UNSPEC;
	verdict = l3_begin(ctx);
	return l3_leave(ctx, answer_or_finish(ctx, DIRECTION_TO_UPLINK, verdict ?: to_uplink(ctx)));
}
