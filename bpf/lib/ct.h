/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Flows that the world opened towards a pod: recorded on their way in. */
#ifndef EC_LIB_CT_H
#define EC_LIB_CT_H

#include "bpf/lib/nf.h"
#include "bpf/lib/room.h"

/* Forgets an entry of an earlier owner of the address. */
EC_INLINE void ct_forget(struct conntrack_entry *e, const struct tuple *replies)
{
	struct device *owner = flow_owner(e->ifindex);

	if (flow_take(&e->last_seen))
		reap_remove_recorded(replies, owner);
}

/* A live entry of this owner, renewed; NULL: none. The tuple is the replies'. */
EC_INLINE struct conntrack_entry *ct_lookup(const struct tuple *replies, __u32 ifindex)
{
	struct conntrack_entry *e = bpf_map_lookup_elem(&conntrack, replies);

	if (!e)
		return NULL;
	if (e->ifindex != ifindex) {
		if (!flow_owner_lives(e->ifindex))
			ct_forget(e, replies);
		return NULL;
	}
	return flow_touch(&e->last_seen) == FLOW_GONE ? NULL : e;
}

/* A FIN may close the connection; a RST may, or may have not. All are rare. Returns the bits that the packet does not
 * set. */
EC_CALL __u8 ct_note_turn(struct conntrack_entry *e, const struct pkt *pkt, bool of_pod)
{
	struct flow_side pod = {&e->from_pod, &e->pod_seq_end, &e->pod_ack};
	struct flow_side world = {&e->from_world, &e->world_seq_end, &e->world_ack};

	flow_note_reset(pkt, of_pod ? &pod : &world, of_pod ? &world : &pod);
	return flow_doubted(pkt, of_pod ? &world : &pod);
}

EC_INLINE bool ct_may_turn(const struct pkt *pkt, __u8 state)
{
	return flow_is_tcp_segment(pkt) && ((pkt->tcp_flags & (TCP_RST | TCP_FIN)) || (state & FLOW_RESET));
}

/*
 * Whether the pod opens a connection itself where somebody has claimed to have opened
 * one: the pod has never answered there, so its SYN is no reply.
 */
EC_INLINE bool ct_is_pods_own(const struct conntrack_entry *e, const struct pkt *pkt)
{
	return pkt->tuple.proto == IPPROTO_TCP && flow_is_opening(pkt) && !(e->from_pod & (FLOW_SYN | FLOW_ACK));
}

/* Notes a packet that the pod sends. */
EC_INLINE void ct_note_from_pod(struct conntrack_entry *e, const struct pkt *pkt)
{
	__u8 bits = flow_bits(pkt);

	if (ct_may_turn(pkt, e->from_pod))
		bits &= ~ct_note_turn(e, pkt, true);
	bits |= e->from_pod;
	flow_note_edges(pkt, e->from_pod, &e->pod_seq_end, &e->pod_ack);
	if (bits != e->from_pod)
		e->from_pod = bits;
}

/* Notes a packet that the world sends; a SYN may open the connection anew. */
EC_INLINE void ct_note_from_world(struct conntrack_entry *e, const struct pkt *pkt)
{
	__u8 bits = flow_bits(pkt);

	if (flow_is_opening(pkt) && flow_opens_anew(e->from_world, e->from_pod, false)) {
		e->from_world = 0;
		e->from_pod = 0;
	}
	if (ct_may_turn(pkt, e->from_world))
		bits &= ~ct_note_turn(e, pkt, false);
	bits |= e->from_world;
	flow_note_edges(pkt, e->from_world, &e->world_seq_end, &e->world_ack);
	if (bits != e->from_world)
		e->from_world = bits;
}

/*
 * An entry is there already: another CPU has just made it, it is that of another pod
 * which lives, or a tombstone. One that was left goes, and the next packet opens the
 * flow.
 */
EC_CALL enum verdict ct_met(const struct tuple *replies, __u32 ifindex)
{
	struct conntrack_entry *e = bpf_map_lookup_elem(&conntrack, replies);

	if (!e)
		return VERDICT_GO_ON;
	if (!flow_stands(&e->last_seen))
		ct_forget(e, replies);
	return e->ifindex != ifindex ? -DROP_FLOW_COLLISION : VERDICT_GO_ON;
}

/* Makes an entry for a packet that the world sends to the pod of that interface. */
EC_CALL enum verdict ct_create(const struct tuple *replies, const struct pkt *pkt, __u32 ifindex, __u8 flags)
{
	struct conntrack_entry e = {
		.ifindex = ifindex,
		.from_world = flow_bits(pkt),
		.flags = flags,
		.world_seq_end = pkt->seq_end,
		.world_ack = pkt->ack,
		.last_seen = bpf_ktime_get_coarse_ns(),
	};
	struct device *dev = flow_owner(ifindex);
	struct usage *u = flow_usage(USAGE_CONNTRACK);
	struct snat_entry *masqueraded;
	enum verdict verdict;
	int err;

	if (!dev || !u)
		return -DROP_NO_ENDPOINT;
	masqueraded = bpf_map_lookup_elem(&snat, replies);
	if (masqueraded && masqueraded->ifindex == ifindex && flow_stands(&masqueraded->last_seen))
		return -DROP_FLOW_COLLISION;
	verdict = room_reserve(u, USAGE_CONNTRACK, &dev->conntrack_flows);
	if (verdict)
		return verdict;
	err = flow_insert(&conntrack, replies, &e);
	if (!err) {
		journal_note(u, USAGE_CONNTRACK, replies);
		return VERDICT_GO_ON;
	}
	flow_release(USAGE_CONNTRACK, &dev->conntrack_flows);
	return err == -EC_EEXIST ? ct_met(replies, ifindex) : flow_refusal(err, USAGE_CONNTRACK);
}

/* The way of a packet that the world sends, by its flow's entry. */
EC_INLINE enum verdict ct_way(__u8 flags)
{
	return flags & FLOW_VIA_STACK ? VERDICT_STACK : VERDICT_GO_ON;
}

/*
 * Records a packet that the world sends to a pod, so that the replies leave
 * unmasqueraded. Later fragments and ICMP errors belong to flows that are
 * recorded already, or to none. flags are for a new flow, and VIA_STACK for one that
 * stands there too.
 */
EC_INLINE enum verdict ct_record(const struct pkt *pkt, __u32 ifindex, bool to_stack)
{
	struct tuple replies = tuple_reversed(&pkt->tuple);
	__u8 flags = to_stack ? FLOW_VIA_STACK : nf_flags();
	struct conntrack_entry *e;

	if (pkt->fragment == FRAGMENT_LATER || pkt->l4 == L4_ICMP_ERROR)
		return ct_way(flags);
	e = ct_lookup(&replies, ifindex);
	if (!e)
		return ct_create(&replies, pkt, ifindex, flags) ?: ct_way(flags);
	if (to_stack)
		e->flags |= FLOW_VIA_STACK;
	ct_note_from_world(e, pkt);
	return ct_way(e->flags);
}

/* A live entry of this owner as it is, for an ICMP error, which must change nothing; NULL: none. */
EC_INLINE struct conntrack_entry *ct_peek(const struct tuple *replies, __u32 ifindex)
{
	struct conntrack_entry *e = bpf_map_lookup_elem(&conntrack, replies);

	return e && flow_stands(&e->last_seen) && e->ifindex == ifindex ? e : NULL;
}

/* The way of an ICMP error about a pod's packet to the world: that of the flow, or of a new one. */
EC_INLINE enum verdict ct_way_of(const struct tuple *replies, __u32 ifindex)
{
	struct conntrack_entry *e = ct_peek(replies, ifindex);

	return ct_way(e ? e->flags : nf_flags());
}

#endif
