/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The stage translate: gives a packet between a pod and the world the address of its
 * flow, outwards as its source, inwards as its destination. The write to the IP
 * header may be left to a later step (rewrite.h).
 */
#ifndef EC_LIB_TRANSLATE_H
#define EC_LIB_TRANSLATE_H

#include "bpf/lib/ct.h"
#include "bpf/lib/icmp.h"
#include "bpf/lib/nf.h"
#include "bpf/lib/open.h"
#include "bpf/lib/path.h"
#include "bpf/lib/tunnel.h"

/* The flow of a packet on its way out: masqueraded, or opened by the world, whose packets leave unchanged. */
struct translation {
	struct snat_entry *masqueraded;
	struct conntrack_entry *recorded;
};

EC_INLINE bool translate_via_stack(const struct translation *t)
{
	if (t->masqueraded)
		return t->masqueraded->flags & FLOW_VIA_STACK;
	return t->recorded && (t->recorded->flags & FLOW_VIA_STACK);
}

/* Finds the flow of an ICMP error, that of the packet it quotes, which came from the other side; changes nothing. */
EC_CALL enum verdict translate_find_of_error(struct __sk_buff *ctx, struct scratch *s, struct translation *t)
{
	if (!icmp_parse_inner(ctx))
		return -DROP_NO_MAPPING;
	s->key = tuple_reversed(&s->inner.tuple);
	t->masqueraded = nat_peek(&s->key, s->owner.ifindex);
	/* An error about a flow to a Service has been translated before, unless it goes elsewhere. */
	if (t->masqueraded && nat_is_service(t->masqueraded))
		return -DROP_NO_MAPPING;
	if (!t->masqueraded)
		t->recorded = ct_peek(&s->key, s->owner.ifindex);
	return t->masqueraded || t->recorded ? VERDICT_GO_ON : -DROP_NO_MAPPING;
}

/* Finds the flow of a packet that the owner in the scratch record sends, if there is one. */
EC_CALL enum verdict translate_find(struct __sk_buff *ctx, struct scratch *s, struct translation *t)
{
	const struct tuple *out = &s->pkt.tuple;
	struct conntrack_entry *recorded;
	enum verdict verdict;

	verdict = pkt_flow(ctx, &s->pkt, s->owner.ifindex);
	if (verdict)
		return verdict;
	if (s->pkt.l4 == L4_ICMP_ERROR)
		return translate_find_of_error(ctx, s, t);
	/* A packet without ports is never masqueraded, but its tuple looks like that of port 0. */
	if (s->pkt.l4 == L4_FLOW) {
		verdict = nat_find(out, s->owner.ifindex, &t->masqueraded);
		/* A flow to a Service has been translated before, if it could be. */
		if (t->masqueraded && nat_is_service(t->masqueraded))
			return -DROP_NO_MAPPING;
		if (verdict || t->masqueraded)
			return verdict;
	}
	recorded = ct_lookup(out, s->owner.ifindex);
	if (recorded && ct_opened_by_pod(recorded, &s->pkt)) {
		ct_forget(recorded, out);
		recorded = NULL;
	}
	if (recorded)
		ct_note_from_pod(recorded, &s->pkt);
	t->recorded = recorded;
	return recorded || s->pkt.l4 == L4_FLOW ? VERDICT_GO_ON : -DROP_UNKNOWN_PROTOCOL;
}

/*
 * Whether a flow is older than netfilter's translation and keeps bypassing it: the
 * world has opened or answered it. A flow that was never answered, or that opens anew,
 * may be meant for a Service, and walks the stack from now on.
 */
EC_CALL bool translate_is_older(const struct pkt *pkt, const struct translation *t)
{
	struct snat_entry *own = t->masqueraded, *reverse;
	struct tuple key;

	if (!own || pkt->l4 == L4_ICMP_ERROR)
		return own || t->recorded;
	key = nat_reverse_key(&pkt->tuple, &own->to_address, own->to_port);
	reverse = bpf_map_lookup_elem(&snat_reverse, &key);
	if (reverse && (reverse->state & ~(FLOW_RESET | FLOW_CLOSED)) &&
	    !(tcp_is_opening(pkt) && tcp_opens_anew(own->state, reverse->state, true)))
		return true;
	nat_to_stack(&pkt->tuple, own);
	return false;
}

/* Opens a flow for the owner in the scratch record, and finds it. */
EC_INLINE enum verdict translate_open(struct __sk_buff *ctx, const struct scratch *s, struct snat_entry **found)
{
	enum verdict verdict = open_flow(ctx) ?: nat_find(&s->pkt.tuple, s->owner.ifindex, found);

	return verdict || *found ? verdict : -DROP_NO_MAPPING;
}

/* Gives the packet the source of its flow, which is opened if there is none. */
EC_INLINE enum verdict translate_source(struct __sk_buff *ctx, struct scratch *s, struct translation *t)
{
	enum verdict verdict;

	if (t->recorded)
		return VERDICT_GO_ON;
	if (s->pkt.l4 == L4_ICMP_ERROR)
		return t->masqueraded ? icmp_translate(ctx, s, END_SOURCE, t->masqueraded) : -DROP_NO_MAPPING;
	/*
	 * With this node's address, a node that is not known here might trust it. Checked
	 * for older flows too: they may be from before the tunnel.
	 */
	if (tunnel_is_outer(&s->pkt))
		return -DROP_TUNNEL_PORT;
	if (!t->masqueraded) {
		verdict = translate_open(ctx, s, &t->masqueraded);
		if (verdict)
			return verdict;
	}
	nat_note(t->masqueraded, &s->pkt, true);
	return rewrite_begin(ctx, &s->pkt, END_SOURCE, t->masqueraded);
}

/* A pod's packet along a path. To the world, its flow decides whether and how the source is masqueraded. */
EC_INLINE enum verdict translate_out(struct __sk_buff *ctx, struct scratch *s, const struct path *path)
{
	struct translation t = {};
	enum verdict verdict;

	if (path->kind != DESTINATION_WORLD || !ip_masqueraded(s->pkt.family))
		return VERDICT_GO_ON;
	s->owner.address = path->snat_address;
	s->owner.uplink = path->ifindex;
	s->owner.ifindex = ctx->ifindex;
	s->owner.flags = 0;
	verdict = translate_find(ctx, s, &t);
	/* What looks like the world may be a Service. */
	if (nf_translates() && (verdict || !translate_is_older(&s->pkt, &t)))
		return VERDICT_STACK;
	if (verdict)
		return verdict;
	return translate_via_stack(&t) ? VERDICT_STACK : translate_source(ctx, s, &t);
}

/*
 * Finds the reverse half of the flow that a packet to the node answers, or that an ICMP
 * error quotes. A packet that belongs to none goes to the stack, malformed or not.
 */
EC_INLINE enum verdict translate_find_reply(struct __sk_buff *ctx, struct scratch *s, struct snat_entry **found)
{
	struct pkt *pkt = &s->pkt;
	enum verdict verdict;
	struct tuple reverse_key;

	/* Before fragments: those of other protocols cannot be a pod's. */
	if (!pkt_proto_known(pkt->family, pkt->tuple.proto) && !ipv6_is_extension(pkt->tuple.proto))
		return VERDICT_STACK;
	verdict = pkt_flow(ctx, pkt, FRAGMENTS_WORLD);
	if (verdict)
		return verdict == -DROP_INVALID ? VERDICT_STACK : verdict;
	if (pkt->l4 == L4_ICMP_ERROR) {
		if (!icmp_parse_inner(ctx) || !nat_port_may_be_held(s->inner.tuple.proto, s->inner.tuple.sport))
			return VERDICT_STACK;
		*found = nat_peek_reverse(&s->inner.tuple);
	} else {
		if (pkt->l4 != L4_FLOW || !nat_port_may_be_held(pkt->tuple.proto, pkt->tuple.dport))
			return VERDICT_STACK;
		reverse_key = tuple_reversed(&pkt->tuple);
		*found = bpf_map_lookup_elem(&snat_reverse, &reverse_key);
		if (*found && !nat_is_service(*found) && !nat_renew_reverse(&reverse_key, *found))
			*found = NULL;
	}
	/* What answers a Service's flow is not for a masqueraded one, and is judged first (outside.h). */
	return *found && !nat_is_service(*found) ? VERDICT_GO_ON : VERDICT_STACK;
}

/*
 * Gives the packet the destination of its flow, whose reverse half translate_find_reply
 * has found. ep: the pod that has the flow, or NULL for the node's own.
 */
EC_INLINE enum verdict translate_destination(struct __sk_buff *ctx, struct scratch *s, struct snat_entry *reverse,
					     struct endpoint **ep)
{
	*ep = path_endpoint(&reverse->to_address);
	/* The pod of the flow is gone. */
	if (!(reverse->flags & FLOW_HOST) && (!*ep || (*ep)->ifindex != reverse->ifindex))
		return VERDICT_STACK;
	if (s->pkt.l4 == L4_ICMP_ERROR)
		return icmp_translate(ctx, s, END_DESTINATION, reverse);
	nat_note(reverse, &s->pkt, false);
	return rewrite_begin(ctx, &s->pkt, END_DESTINATION, reverse);
}

#endif
