//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * tc ingress of an uplink: everything that reaches the node. Packets to a pod's
 * address and replies to masqueraded flows are delivered; everything else, malformed
 * packets included, goes to the stack; to the tunnel port only by an uplink that leads
 * to the sender, and IPv6 that the stack would forward only from a source that may be
 * there.
 */
#include "bpf/lib/arrive.h"
#include "bpf/lib/ct.h"
#include "bpf/lib/finish.h"
#include "bpf/lib/fwd.h"
#include "bpf/lib/icmp.h"
#include "bpf/lib/ip.h"
#include "bpf/lib/l3.h"
#include "bpf/lib/nf.h"
#include "bpf/lib/outside.h"
#include "bpf/lib/path.h"
#include "bpf/lib/translate.h"
#include "bpf/lib/tunnel.h"

/* Whether a packet may go straight into the pod. */
EC_CALL enum verdict from_uplink_judge(struct __sk_buff *ctx, const struct config *config, struct scratch *s,
				       const struct endpoint *ep)
{
	struct pkt *pkt = &s->pkt;
	struct destination *from = path_destination(&pkt->tuple.src);
	enum destination_kind kind = arrive_kind(config, pkt->family, &pkt->tuple.src, from);
	enum verdict verdict;

	verdict = arrive_judge_source(ctx, pkt, from, kind) ?: arrive_check_icmp(ctx, pkt);
	if (verdict)
		return verdict;
	/* A flow that the world opens is recorded, so that its replies leave the same way, unmasqueraded. */
	if (kind == DESTINATION_WORLD && ip_masqueraded(pkt->family) && pkt->l4 != L4_ICMP_ERROR)
		return pkt_l4(ctx, pkt) ? ct_record(pkt, ep->ifindex, arrive_to_stack(config, from)) : -DROP_INVALID;
	return arrive_judge(ctx, config, s, ep, from);
}

/*
 * The last step of a translated packet: it takes the way of its flow. What goes to
 * the stack is marked: during an upgrade the program of another build runs behind
 * this one, and must not take it for a packet that the world sends to the pod.
 */
EC_INLINE enum verdict from_uplink_deliver(struct __sk_buff *ctx, struct scratch *s, const struct snat_entry *reverse,
					   const struct endpoint *ep)
{
	enum verdict verdict = VERDICT_STACK;

	if (ep && !(reverse->flags & FLOW_VIA_STACK) && !arrive_under_policy(&s->pkt.tuple.src))
		verdict = fwd_to_pod(ctx, s, ep);
	if (verdict != VERDICT_STACK)
		return verdict;
	ctx->mark |= cfg.mark;
	return rewrite_finish(ctx, &s->pkt) ?: VERDICT_STACK;
}

/* A packet to the node: a reply to a masqueraded flow, or else for the stack. GO_ON: it may be a Service's. */
EC_CALL enum verdict from_uplink_to_node(struct __sk_buff *ctx, const struct config *config, struct scratch *s)
{
	const struct pkt *pkt = &s->pkt;
	struct snat_entry *reverse;
	struct destination *from;
	enum verdict verdict;
	struct endpoint *ep;

	verdict = translate_find_reply(ctx, s, &reverse);
	if (cfg.services && verdict == VERDICT_STACK)
		return VERDICT_GO_ON;
	if (!verdict && pkt->l4 == L4_ICMP_ERROR) {
		from = path_destination(&pkt->tuple.src);
		verdict = arrive_judge_source(ctx, pkt, from, arrive_kind(config, pkt->family, &pkt->tuple.src, from))
				  ?: icmp_check(ctx, END_DESTINATION);
	}
	return verdict ?: translate_destination(ctx, s, reverse, &ep) ?: from_uplink_deliver(ctx, s, reverse, ep);
}

/*
 * To a tunnel port: what another node sends, only by an uplink that leads to it, as if it
 * had come without the tunnel.
 */
EC_INLINE enum verdict from_uplink_outer(struct __sk_buff *ctx, struct pkt *pkt)
{
	struct destination *from;

	if (pkt->tuple.proto != IPPROTO_UDP || tunnel_other_port(ctx, pkt) || pkt_flow(ctx, pkt, FRAGMENTS_WORLD) ||
	    !tunnel_is_outer(pkt))
		return VERDICT_GO_ON;
	from = path_destination(&pkt->tuple.src);
	if (!from)
		return VERDICT_STACK;
	/* The stack would forward it to a node that is reached over a link without our programs, as this node's. */
	if (from->kind == DESTINATION_HOST)
		return -DROP_SPOOFED_SOURCE;
	return arrive_has_route(ctx, from) ? VERDICT_STACK : -DROP_WRONG_UPLINK;
}

/*
 * Whether an error says that the way to a tunnel's far end is too narrow for IPv6 inside. The kernel would believe it,
 * whoever has sent it, and for minutes no IPv6 would get through; only one that quotes TCP can it verify.
 */
EC_CALL bool from_uplink_shuts_tunnel(struct __sk_buff *ctx, const struct config *config, struct scratch *s)
{
	struct destination *to;
	__be32 mtu;

	if (!pkt_is_icmp(FAMILY_IPV6, s->pkt.tuple.proto) || !config->pod_cidr_lens[FAMILY_IPV6] ||
	    !pkt_l4(ctx, &s->pkt) || s->pkt.icmp_type != ICMPV6_PACKET_TOO_BIG ||
	    bpf_skb_load_bytes(ctx, s->pkt.l4_off + offsetof(struct icmp_header, id), &mtu, sizeof(mtu)) ||
	    bpf_ntohl(mtu) >= IPV6_LEAST_MTU + PATH_OUTER_IPV6)
		return false;
	/* The quoted packet may be in a later fragment. No router fragments an error. */
	if (s->pkt.fragment != FRAGMENT_NONE)
		return true;
	icmp_parse_inner(ctx);
	to = path_destination(&s->inner.tuple.dst);
	return s->inner.tuple.proto != IPPROTO_TCP && to && to->kind == DESTINATION_NODE &&
	       (to->flags & DESTINATION_BY_TUNNEL);
}

/*
 * What is left to the stack, if the node would forward it: a source that is the cluster's comes from there, since
 * others take this node's word for it. IPv6 alone needs that: it has no reverse path filter, and forwards even what has
 * the node's own address.
 */
EC_CALL enum verdict from_uplink_to_stack(const struct __sk_buff *ctx, const struct pkt *pkt)
{
	struct destination *to = path_destination(&pkt->tuple.dst), *from;

	if (to && to->kind == DESTINATION_HOST)
		return VERDICT_STACK;
	from = path_destination(&pkt->tuple.src);
	if (!from)
		return VERDICT_STACK;
	return arrive_judge_source(ctx, pkt, from, from->kind) ?: VERDICT_STACK;
}

/*
 * In a frame that is not this host's alone. Of those to all, or a group, the stack forwards
 * none, but a tunnel's socket takes them.
 */
EC_CALL enum verdict from_uplink_to_all(struct __sk_buff *ctx, struct pkt *pkt, enum verdict parsed)
{
	if (ctx->pkt_type == EC_PACKET_OTHERHOST)
		return VERDICT_STACK;
	return parsed ?: from_uplink_outer(ctx, pkt) ?: VERDICT_STACK;
}

EC_INLINE enum verdict from_uplink_ip(struct __sk_buff *ctx, enum family family)
{
	struct config *config = config_get();
	struct scratch *s = scratch_new(DIRECTION_FROM_UPLINK);
	enum verdict verdict, judged;
	struct endpoint *ep;

	if (!config || !s)
		return VERDICT_STACK;
	verdict = ip_parse_arrived(ctx, s, family);
	if (verdict == -DROP_INVALID)
		return VERDICT_STACK;
	if (ctx->pkt_type != EC_PACKET_HOST)
		return from_uplink_to_all(ctx, &s->pkt, verdict);
	/* Unread it may be for the tunnel port, or shut the tunnel. A host may refuse it (RFC 8504, section 5.3). */
	if (verdict)
		return verdict;
	ep = path_endpoint(&s->pkt.tuple.dst);
	if (ep)
		return from_uplink_judge(ctx, config, s, ep) ?: fwd_to_pod(ctx, s, ep);
	if (path_is_ours(config, family, &s->pkt.tuple.dst))
		return -DROP_NO_ENDPOINT;
	if (family == FAMILY_IPV6 && from_uplink_shuts_tunnel(ctx, config, s))
		return -DROP_FORGED_ERROR;
	verdict = from_uplink_outer(ctx, &s->pkt);
	if (verdict)
		return verdict;
	verdict = ip_masqueraded(family) || cfg.services ? from_uplink_to_node(ctx, config, s) : VERDICT_STACK;
	if (cfg.services && !verdict)
		verdict = outside_arrive(ctx, s) ?: VERDICT_STACK;
	/*
	 * What has been translated has been judged. A fragment of nobody's goes to the stack as well, but is counted.
	 */
	if (family == FAMILY_IPV4 || service_has_translated(s) ||
	    (verdict != VERDICT_STACK && verdict != -DROP_FRAG_NOT_FOUND))
		return verdict;
	judged = from_uplink_to_stack(ctx, &s->pkt);
	return judged == VERDICT_STACK ? verdict : judged;
}

EC_INLINE enum verdict from_uplink(struct __sk_buff *ctx)
{
	/* What outside_answer_host hands to the stack has the Ethernet addresses of another link. */
	if (cfg.services && (ctx->mark & cfg.mark) && ctx->pkt_type == EC_PACKET_OTHERHOST)
		bpf_skb_change_type(ctx, EC_PACKET_HOST);
	if ((ctx->mark & cfg.mark) || pkt_in_vlan(ctx))
		return VERDICT_STACK;
	/* As in ec_from_pod, each family has code of its own. */
	switch (ip_family(ctx)) {
	case FAMILY_IPV4:
		return from_uplink_ip(ctx, FAMILY_IPV4);
	case FAMILY_IPV6:
		return from_uplink_ip(ctx, FAMILY_IPV6);
	default:
		return VERDICT_STACK;
	}
}

EC_INLINE int from_uplink_finish(struct __sk_buff *ctx, enum verdict verdict)
{
	return cfg.services ? answer_or_finish(ctx, DIRECTION_FROM_UPLINK, verdict)
			    : finish(ctx, DIRECTION_FROM_UPLINK, verdict);
}

SEC("tc")
int ec_from_uplink(struct __sk_buff *ctx)
{
	return from_uplink_finish(ctx, from_uplink(ctx));
}

/* ec_from_uplink of an uplink without an Ethernet header. */
SEC("tc")
int ec_from_l3(struct __sk_buff *ctx)
{
	enum verdict verdict;

	if (!l3_reads(ctx))
		return finish(ctx, DIRECTION_FROM_UPLINK, VERDICT_STACK);
	verdict = l3_begin(ctx);
	return from_uplink_finish(ctx, verdict ?: from_uplink(ctx));
}
