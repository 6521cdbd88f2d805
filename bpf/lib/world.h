/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * A pod's packet to the world, in two steps: which flow it belongs to, and what
 * its source becomes. Between them the caller finds out where it leaves.
 */
#ifndef EC_LIB_WORLD_H
#define EC_LIB_WORLD_H

#include "bpf/lib/ct.h"
#include "bpf/lib/frag.h"
#include "bpf/lib/icmp.h"
#include "bpf/lib/open.h"

/* A packet's flow. */
struct world {
	struct snat_entry *masqueraded;
	bool native;    /* opened by the world: leaves as it is */
	bool via_stack; /* its flow walks the stack */
};

EC_INLINE int world_ports(struct __sk_buff *ctx, struct pkt *pkt, __u32 ifindex)
{
	if (!pkt_parse_l4(ctx, pkt))
		return -DROP_INVALID;
	if (pkt->fragment == FRAGMENT_LATER && !frag_recall(pkt, ifindex))
		return -DROP_FRAGMENT_UNKNOWN;
	if (pkt->fragment == FRAGMENT_FIRST)
		frag_remember(pkt, ifindex);
	return 0;
}

/*
 * Finds the flow of an ICMP error, and leaves it as it is: that of the packet
 * inside, which came the other way. 0, or a negated drop reason.
 */
EC_CALL int world_find_of_error(struct __sk_buff *ctx, struct scratch *s, struct world *w)
{
	struct conntrack_entry *native;

	if (!icmp_parse_inner(ctx))
		return -DROP_NO_MAPPING;
	s->key = tuple_reversed(&s->inner.tuple);
	w->masqueraded = nat_peek(&s->key, s->owner.ifindex);
	if (w->masqueraded) {
		w->via_stack = w->masqueraded->flags & SNAT_VIA_STACK;
		return 0;
	}
	native = ct_peek(&s->key, s->owner.ifindex);
	if (!native)
		return -DROP_NO_MAPPING;
	w->native = true;
	w->via_stack = native->flags & SNAT_VIA_STACK;
	return 0;
}

/* Finds the packet's flow, if it has one. 0, or a negated drop reason. */
EC_CALL int world_find(struct __sk_buff *ctx, struct scratch *s, struct world *w)
{
	struct conntrack_entry *native;
	const struct tuple *out = &s->pkt.tuple;
	int ret;

	ret = world_ports(ctx, &s->pkt, s->owner.ifindex);
	if (ret < 0)
		return ret;
	if (s->pkt.l4 == L4_ICMP_ERROR)
		return world_find_of_error(ctx, s, w);
	/* Without ports that can be rewritten it is nobody's, but it looks like the flow of port 0. */
	if (s->pkt.l4 != L4_UNKNOWN) {
		ret = nat_find(out, s->owner.ifindex, &w->masqueraded);
		if (ret < 0)
			return ret;
	}
	if (w->masqueraded) {
		w->via_stack = w->masqueraded->flags & SNAT_VIA_STACK;
		return 0;
	}
	native = ct_lookup(out, s->owner.ifindex);
	if (native && ct_is_pods_own(native, &s->pkt)) {
		ct_forget(native, out);
		return 0;
	}
	if (native) {
		w->native = true;
		w->via_stack = native->flags & SNAT_VIA_STACK;
		ct_note_from_pod(native, &s->pkt);
		return 0;
	}
	return s->pkt.l4 == L4_FLOW ? 0 : -DROP_UNKNOWN_PROTOCOL;
}

/*
 * Whether a flow is older than netfilter's translation and goes on past it: one
 * that the world opened, or one that the world has answered. What was never
 * answered, or opens anew, may be meant for a Service, and becomes the stack's.
 */
EC_CALL bool world_is_older(const struct pkt *pkt, const struct world *w)
{
	struct snat_entry *own = w->masqueraded, *reverse;
	struct tuple key;

	if (!own || pkt->l4 == L4_ICMP_ERROR)
		return own || w->native;
	key = nat_reverse_key(&pkt->tuple, &own->to_address, own->to_port);
	reverse = bpf_map_lookup_elem(&snat_reverse, &key);
	if (reverse && (reverse->state & ~FLOW_RESET) &&
	    !(flow_is_opening(pkt) && flow_opens_anew(own->state, reverse->state, true)))
		return true;
	nat_to_stack(&pkt->tuple, own);
	return false;
}

EC_INLINE int world_open(struct __sk_buff *ctx, const struct scratch *s, struct world *w)
{
	int ret = open_flow(ctx);

	if (ret < 0)
		return ret;
	ret = nat_find(&s->pkt.tuple, s->owner.ifindex, &w->masqueraded);
	return ret < 0 || w->masqueraded ? ret : -DROP_NO_MAPPING;
}

/*
 * Gives the packet the source of its flow, which is opened for the owner in the
 * scratch record if there is none; the IPv4 header may still wait for it
 * (rewrite.h). 0, or a negated drop reason.
 */
EC_INLINE int world_translate(struct __sk_buff *ctx, struct scratch *s, struct world *w)
{
	int ret;

	if (w->native)
		return 0;
	if (s->pkt.l4 == L4_ICMP_ERROR)
		return w->masqueraded ? icmp_translate_out(ctx, s, w->masqueraded) : -DROP_NO_MAPPING;
	if (!w->masqueraded) {
		ret = world_open(ctx, s, w);
		if (ret < 0)
			return ret;
	}
	nat_note_out(w->masqueraded, &s->pkt);
	return rewrite_begin(ctx, &s->pkt, END_SOURCE, w->masqueraded);
}

#endif
