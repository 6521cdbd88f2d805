/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Flows that the world opens towards a pod: recorded on their way in. */
#ifndef EC_LIB_CT_H
#define EC_LIB_CT_H

#include "bpf/lib/nf.h"
#include "bpf/lib/room.h"

/* Removes an entry that nobody needs, such as one of an address's earlier owner. */
EC_INLINE void ct_forget(struct conntrack_entry *e, const struct tuple *replies)
{
	struct device *owner = flow_owner(e->ifindex);

	if (flow_take(&e->last_seen))
		reap_remove_recorded(replies, owner);
}

/* The live entry of this owner, renewed; NULL: there is none. replies is the tuple of the pod's packets. */
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

/*
 * Notes a FIN or RST, which may end the connection, an ACK after a RST, or one of the
 * world's that may be its first. Returns the flow_state bits that the packet must not set.
 */
EC_CALL __u8 ct_note_turn(struct conntrack_entry *e, const struct pkt *pkt, bool of_pod)
{
	struct tcp_side pod = {&e->from_pod, &e->pod_seq_end, &e->pod_ack};
	struct tcp_side world = {&e->from_world, &e->world_seq_end, &e->world_ack};

	tcp_note_reset(pkt, of_pod ? &pod : &world, of_pod ? &world : &pod);
	return tcp_doubted(pkt, of_pod ? &world : &pod, !of_pod && !(e->from_world & FLOW_ACK));
}

EC_INLINE bool ct_may_turn(const struct pkt *pkt, __u8 state)
{
	return tcp_is_segment(pkt) && ((pkt->tcp_flags & (TCP_RST | TCP_FIN)) || (state & FLOW_RESET));
}

/*
 * Whether a pod's SYN opens a connection of its own, although the world seems to have
 * opened one on the tuple: the pod has never answered that, so its SYN is no reply.
 */
EC_INLINE bool ct_opened_by_pod(const struct conntrack_entry *e, const struct pkt *pkt)
{
	return pkt->tuple.proto == IPPROTO_TCP && tcp_is_opening(pkt) && !(e->from_pod & (FLOW_SYN | FLOW_ACK));
}

/* Notes a packet that the pod sends. */
EC_INLINE void ct_note_from_pod(struct conntrack_entry *e, const struct pkt *pkt)
{
	__u8 bits = flow_bits(pkt);

	if (ct_may_turn(pkt, e->from_pod))
		bits &= ~ct_note_turn(e, pkt, true);
	bits |= e->from_pod;
	tcp_note_edges(pkt, e->from_pod, &e->pod_seq_end, &e->pod_ack);
	if (bits != e->from_pod)
		e->from_pod = bits;
}

/* Notes a packet that the world sends; a SYN may open a new connection on the tuple. */
EC_INLINE void ct_note_from_world(struct conntrack_entry *e, const struct pkt *pkt)
{
	__u8 bits = flow_bits(pkt);

	if (tcp_is_opening(pkt) && tcp_opens_anew(e->from_world, e->from_pod, false)) {
		e->from_world = 0;
		e->from_pod = 0;
	}
	if (ct_may_turn(pkt, e->from_world) || (tcp_is_segment(pkt) && !(e->from_world & FLOW_ACK)))
		bits &= ~ct_note_turn(e, pkt, false);
	bits |= e->from_world;
	tcp_note_edges(pkt, e->from_world, &e->world_seq_end, &e->world_ack);
	if (bits != e->from_world)
		e->from_world = bits;
}

/*
 * An entry is there already: another CPU has just made it, it belongs to another pod
 * that exists, or it is a tombstone. A tombstone that was left behind is removed, and
 * the next packet opens the flow.
 */
EC_CALL enum verdict ct_resolve_conflict(const struct tuple *replies, __u32 ifindex)
{
	struct conntrack_entry *e = bpf_map_lookup_elem(&conntrack, replies);

	if (!e)
		return VERDICT_GO_ON;
	if (!flow_is_live(&e->last_seen))
		ct_forget(e, replies);
	return e->ifindex != ifindex ? -DROP_FLOW_COLLISION : VERDICT_GO_ON;
}

/* Records a flow that the world opens towards the pod behind the interface; flags are enum flow_flags. */
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
	struct holding held = {};
	enum verdict verdict;
	int err;

	if (!dev || !u)
		return -DROP_NO_ENDPOINT;
	masqueraded = bpf_map_lookup_elem(&snat, replies);
	if (masqueraded && masqueraded->ifindex == ifindex && flow_is_live(&masqueraded->last_seen))
		return -DROP_FLOW_COLLISION;
	if (cfg.services && nat_beside_service(pkt))
		return -DROP_FLOW_COLLISION;
	held.own = &dev->conntrack_flows;
	verdict = room_reserve(u, USAGE_CONNTRACK, &held);
	if (verdict)
		return verdict;
	err = flow_insert(&conntrack, replies, &e);
	if (!err) {
		journal_note(u, USAGE_CONNTRACK, replies);
		return VERDICT_GO_ON;
	}
	flow_release(USAGE_CONNTRACK, &held);
	return err == -EC_EEXIST ? ct_resolve_conflict(replies, ifindex) : flow_refusal(err, USAGE_CONNTRACK);
}

/* What becomes of a packet from the world, by its flow's flags. */
EC_INLINE enum verdict ct_verdict(__u8 flags)
{
	return flags & FLOW_VIA_STACK ? VERDICT_STACK : VERDICT_GO_ON;
}

/*
 * Records a packet that the world sends to a pod, so that the replies leave
 * unmasqueraded. Later fragments and ICMP errors belong to flows that are recorded
 * already, or to none. to_stack sends the flow through the stack, even an older one.
 */
EC_INLINE enum verdict ct_record(const struct pkt *pkt, __u32 ifindex, bool to_stack)
{
	struct tuple replies = tuple_reversed(&pkt->tuple);
	__u8 flags = to_stack ? FLOW_VIA_STACK : nf_flags();
	struct conntrack_entry *e;

	if (pkt->fragment == FRAGMENT_LATER || pkt->l4 == L4_ICMP_ERROR)
		return ct_verdict(flags);
	e = ct_lookup(&replies, ifindex);
	if (!e)
		return ct_create(&replies, pkt, ifindex, flags) ?: ct_verdict(flags);
	if (to_stack)
		e->flags |= FLOW_VIA_STACK;
	ct_note_from_world(e, pkt);
	return ct_verdict(e->flags);
}

/* The live entry of this owner, for an ICMP error, which must not renew or change it; NULL: none. */
EC_INLINE struct conntrack_entry *ct_peek(const struct tuple *replies, __u32 ifindex)
{
	struct conntrack_entry *e = bpf_map_lookup_elem(&conntrack, replies);

	return e && flow_is_live(&e->last_seen) && e->ifindex == ifindex ? e : NULL;
}

/* What becomes of an ICMP error that quotes a pod's packet to the world: as its flow, or a new one. */
EC_INLINE enum verdict ct_verdict_of(const struct tuple *replies, __u32 ifindex)
{
	struct conntrack_entry *e = ct_peek(replies, ifindex);

	return ct_verdict(e ? e->flags : nf_flags());
}

#endif
