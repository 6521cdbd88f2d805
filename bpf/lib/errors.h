/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * ICMP errors about flows to Services: like those about masqueraded flows (icmp.h), but
 * both ends of the quoted packet change, and of the error's own addresses those that are
 * also quoted.
 */
#ifndef EC_LIB_ERRORS_H
#define EC_LIB_ERRORS_H

#include "bpf/lib/icmp.h"
#include "bpf/lib/nat.h"

/* Of the unreachable route that stands for a pod that is gone, or of its neighbour. */
enum {
	ERRORS_HOST_UNREACHABLE = 1,
	ERRORS_NO_ROUTE_IPV6 = 0,
	ERRORS_ADDRESS_UNREACHABLE_IPV6 = 3,
};

/* Reads the quoted packet; false: it can belong to no flow to a Service. */
EC_INLINE bool errors_read(struct __sk_buff *ctx, const struct scratch *s)
{
	return icmp_parse_inner(ctx) || s->inner.tuple.proto == IPPROTO_SCTP;
}

/* Changes one end of the quoted packet. */
EC_INLINE enum verdict errors_quote(struct __sk_buff *ctx, struct scratch *s, enum end end, const struct addr *to,
				    __be16 port)
{
	const struct tuple *inner = &s->inner.tuple;
	bool source = end == END_SOURCE;

	s->change.from = source ? inner->src : inner->dst;
	s->change.to = *to;
	s->change.old_port = source ? inner->sport : inner->dport;
	s->change.port = port;
	s->change.end = end;
	return icmp_patch_inner(ctx);
}

/* Changes an address of the error itself. */
EC_INLINE enum verdict errors_outer(struct __sk_buff *ctx, struct scratch *s, enum end end, const struct addr *to)
{
	enum verdict verdict = icmp_rewrite_outer(ctx, &s->pkt, end, to);

	if (end == END_SOURCE)
		s->pkt.tuple.src = *to;
	else
		s->pkt.tuple.dst = *to;
	return verdict;
}

/*
 * Makes the error one about the tuple in the scratch record: the packet that it quotes
 * becomes that. Where the error comes from the quoted destination, or goes to the quoted
 * source, it does so afterwards.
 */
EC_GLOBAL enum verdict errors_translate(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();
	enum verdict verdict;
	bool from_far, to_near;
	struct tuple *to;

	if (!s)
		return -DROP_INVALID;
	to = &s->service.turns;
	/* Who has no address that the backend knows speaks as the client that it knows. */
	from_far = addr_equal(&s->pkt.tuple.src, &s->inner.tuple.dst) ||
		   (s->service.received && !addr_equal(&to->dst, &s->inner.tuple.dst));
	to_near = addr_equal(&s->pkt.tuple.dst, &s->inner.tuple.src);
	verdict = errors_quote(ctx, s, END_SOURCE, &to->src, to->sport);
	if (verdict)
		return verdict;
	/* The second change goes by what the first has written. */
	if (!errors_read(ctx, s))
		return -DROP_INVALID;
	verdict = errors_quote(ctx, s, END_DESTINATION, &to->dst, to->dport);
	if (!verdict && from_far)
		verdict = errors_outer(ctx, s, END_SOURCE, &to->dst);
	return !verdict && to_near ? errors_outer(ctx, s, END_DESTINATION, &to->src) : verdict;
}

/* The live half with this key, if it is of a flow of this pod to a Service; an error changes nothing in it. */
EC_INLINE struct snat_entry *errors_half(void *map, const struct tuple *key, __u32 ifindex)
{
	struct snat_entry *e = bpf_map_lookup_elem(map, key);

	return e && nat_is_service(e) && e->ifindex == ifindex && flow_is_live(&e->last_seen) ? e : NULL;
}

/* Whether the error says that the quoted destination is unreachable, and comes from the node that would have it. */
EC_INLINE bool errors_bury(struct __sk_buff *ctx, const struct scratch *s)
{
	__u8 code, unreachable = s->pkt.family == FAMILY_IPV6 ? ICMPV6_UNREACHABLE : ICMP_DEST_UNREACH;
	struct destination *to;

	if (s->pkt.icmp_type != unreachable ||
	    bpf_skb_load_bytes(ctx, s->pkt.l4_off + offsetof(struct icmp_header, code), &code, sizeof(code)))
		return false;
	if (s->pkt.family == FAMILY_IPV6 ? code != ERRORS_NO_ROUTE_IPV6 && code != ERRORS_ADDRESS_UNREACHABLE_IPV6
					 : code != ERRORS_HOST_UNREACHABLE)
		return false;
	to = path_destination(&s->inner.tuple.dst);
	return to && to->kind == DESTINATION_POD_CIDR &&
	       (addr_equal(&s->pkt.tuple.src, &to->node) || addr_equal(&s->pkt.tuple.src, &to->alias));
}

/*
 * Whether a quoted segment may be under way: not acknowledged yet, or asking whether the
 * backend lives, from one before that. Anybody may have sent the error, but only who has
 * seen the segment knows its number (RFC 5927). What a client outside seems to have sent far
 * beyond what is acknowledged may be forged.
 */
EC_INLINE bool errors_in_flight(struct __sk_buff *ctx, const struct scratch *s, const struct snat_entry *forward,
				const struct snat_entry *reverse)
{
	__u32 least = forward->seq_end - TCP_RESET_WINDOW;
	__be32 seq;

	if (s->inner.tuple.proto != IPPROTO_TCP)
		return true;
	if (bpf_skb_load_bytes(ctx, s->inner.l4_off + offsetof(struct tcphdr, seq), &seq, sizeof(seq)))
		return false;
	if (reverse->state & (FLOW_SYN | FLOW_ACK))
		least = reverse->ack - 1;
	return bpf_ntohl(seq) - least <= forward->seq_end - least && bpf_ntohl(seq) - least <= TCP_RESET_WINDOW;
}

/* Finds what an error becomes that quotes what the pod's flow has sent to its backend; false: there is no such flow. */
EC_INLINE bool errors_find_sent(struct scratch *s, __u32 ifindex)
{
	struct snat_entry *half = errors_half(&snat_reverse, &s->inner.tuple, ifindex);

	if (!half)
		return false;
	s->service.received = false;
	s->service.answers_host = half->flags & FLOW_HOST;
	nat_set_other_key(&s->service.turns, &s->inner.tuple, half);
	return true;
}

/* Heeds what an error that has been found says of its flow. Its source must have been judged. */
EC_CALL void errors_heed(struct __sk_buff *ctx, struct scratch *s, __u32 ifindex)
{
	struct snat_entry *half, *forward;

	if (s->service.received || !errors_bury(ctx, s))
		return;
	half = errors_half(&snat_reverse, &s->inner.tuple, ifindex);
	forward = errors_half(&snat, &s->service.turns, ifindex);
	if (half && forward && errors_in_flight(ctx, s, forward, half))
		forward->flags |= FLOW_DEAD;
}

/* The same for one that quotes what the pod has received from its flow's backend. */
EC_INLINE bool errors_find_received(struct scratch *s, __u32 ifindex)
{
	struct tuple *turns = &s->service.turns;
	struct snat_entry *half;

	s->key = tuple_reversed(&s->inner.tuple);
	half = errors_half(&snat, &s->key, ifindex);
	if (!half)
		return false;
	nat_set_other_key(turns, &s->key, half);
	*turns = tuple_reversed(turns);
	s->service.received = true;
	s->service.answers_host = false;
	return true;
}

/* Finds what an error becomes that is about to enter the pod; false: it stays as it is. */
EC_GLOBAL int errors_back(struct __sk_buff *ctx, __u32 ifindex)
{
	struct scratch *s = scratch_get();

	if (!s || !cfg.services || !errors_read(ctx, s) || !errors_find_sent(s, ifindex))
		return false;
	errors_heed(ctx, s, ifindex);
	return true;
}

/*
 * The same for one that the pod sends, to the quoted source: to others it would say what
 * it says as the Service. Of a flow to itself it may be about either direction.
 */
EC_GLOBAL int errors_forward(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();

	return s && cfg.services && errors_read(ctx, s) && addr_equal(&s->pkt.tuple.dst, &s->inner.tuple.src) &&
	       (errors_find_received(s, s->owner.ifindex) || errors_find_sent(s, s->owner.ifindex));
}

#endif
