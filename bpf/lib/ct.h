/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Flows that the world opened towards a pod: recorded on their way in. */
#ifndef EC_LIB_CT_H
#define EC_LIB_CT_H

#include "bpf/lib/reap.h"

/* Forgets an entry of an earlier owner of the address. */
EC_INLINE void ct_forget(struct conntrack_entry *e, const struct tuple *replies)
{
	struct device *dev = flow_owner(e->ifindex);

	if (!flow_take(&e->last_seen))
		return;
	if (!bpf_map_delete_elem(&conntrack, replies))
		flow_release(USAGE_CONNTRACK, dev ? &dev->conntrack_flows : NULL);
}

/* An entry by its key: whether it has ended, and if so is gone. */
EC_CALL enum reaped ct_reap(const struct tuple *replies, const struct reaper *r)
{
	struct conntrack_entry *e = bpf_map_lookup_elem(&conntrack, replies);
	struct device *dev;
	__u64 seen;

	if (!e)
		return REAP_NONE;
	seen = e->last_seen;
	dev = flow_owner(e->ifindex);
	if (!reap_may(r, &e->last_seen, seen,
		      !dev || reap_expired(r, replies->proto, e->from_world, e->from_pod, seen)))
		return REAP_KEPT;
	if (!flow_claim(&e->last_seen, seen))
		return REAP_KEPT;
	if (!bpf_map_delete_elem(&conntrack, replies))
		flow_release(USAGE_CONNTRACK, dev ? &dev->conntrack_flows : NULL);
	return REAP_GONE;
}

/* A look at the oldest recorded flows, for one that has ended. */
struct ct_search {
	struct scratch *scratch;
	struct usage *usage;
	struct reaper reaper;
	__u64 gone;
};

static long ct_search_step(__u32 i, struct ct_search *s)
{
	struct tuple *key = &s->scratch->key;

	if (!journal_take(&ct_journal, s->usage, cfg.conntrack_entries, key))
		return 1;
	switch (ct_reap(key, &s->reaper)) {
	case REAP_KEPT:
		journal_note(&ct_journal, s->usage, cfg.conntrack_entries, key);
		break;
	case REAP_GONE:
		s->gone++;
		break;
	default:
		break;
	}
	return 0;
}

/* Looks at the oldest flows, and returns how many have ended and are gone. */
EC_GLOBAL int ct_make_room(__u32 steps)
{
	struct ct_search s = {.scratch = scratch_get(), .usage = flow_usage(USAGE_CONNTRACK)};

	if (!s.scratch || !s.usage)
		return 0;
	s.reaper.now = bpf_ktime_get_coarse_ns();
	s.reaper.pressure = journal_pressure(s.usage, cfg.conntrack_entries);
	bpf_loop(steps, ct_search_step, &s, 0);
	return s.gone;
}

/* Counts a new flow of the pod; where there is no room, what has ended gives way. */
EC_INLINE int ct_reserve(struct usage *u, struct device *dev, __u64 now)
{
	int ret;

	if (journal_unswept(u, now))
		ct_make_room(JOURNAL_STEPS);
	ret = flow_reserve(u, cfg.conntrack_entries, &dev->conntrack_flows, DROP_CONNTRACK_FULL, DROP_CONNTRACK_LIMIT);
	if (ret < 0 && ct_make_room(JOURNAL_STEPS_FULL))
		ret = flow_reserve(u, cfg.conntrack_entries, &dev->conntrack_flows, DROP_CONNTRACK_FULL,
				   DROP_CONNTRACK_LIMIT);
	return ret;
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
EC_CALL int ct_met(const struct tuple *replies, __u32 ifindex)
{
	struct conntrack_entry *e = bpf_map_lookup_elem(&conntrack, replies);

	if (!e)
		return 0;
	if (!flow_stands(&e->last_seen))
		ct_forget(e, replies);
	return e->ifindex != ifindex ? -DROP_FLOW_COLLISION : 0;
}

/* Makes an entry for a packet that the world sends to the pod of that interface. */
EC_CALL int ct_create(const struct tuple *replies, const struct pkt *pkt, __u32 ifindex, __u8 flags)
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
	int ret;

	if (!dev || !u)
		return -DROP_NO_ENDPOINT;
	masqueraded = bpf_map_lookup_elem(&snat, replies);
	if (masqueraded && masqueraded->ifindex == ifindex && flow_stands(&masqueraded->last_seen))
		return -DROP_FLOW_COLLISION;
	ret = ct_reserve(u, dev, e.last_seen);
	if (ret < 0)
		return ret;
	ret = flow_insert(&conntrack, replies, &e);
	if (!ret) {
		journal_note(&ct_journal, u, cfg.conntrack_entries, replies);
		return 0;
	}
	flow_release(USAGE_CONNTRACK, &dev->conntrack_flows);
	return ret == -EC_EEXIST ? ct_met(replies, ifindex) : flow_refusal(ret, DROP_CONNTRACK_FULL);
}

/* The way of a packet that the world sends, by its flow's entry: 0, or TRAFFIC_STACK. */
EC_INLINE int ct_way(__u8 flags)
{
	return flags & SNAT_VIA_STACK ? TRAFFIC_STACK : 0;
}

/*
 * Records a packet that the world sends to a pod, so that the replies leave
 * unmasqueraded. Later fragments and ICMP errors belong to flows that are
 * recorded already, or to none. flags are for a new flow, and VIA_STACK for one that
 * stands there too. 0, TRAFFIC_STACK for a flow that walks the stack, or a negated
 * drop reason.
 */
EC_INLINE int ct_record(const struct pkt *pkt, __u32 ifindex, bool to_stack)
{
	struct tuple replies = tuple_reversed(&pkt->tuple);
	__u8 flags = cfg.netfilter_nat || to_stack ? SNAT_VIA_STACK : 0;
	struct conntrack_entry *e;

	if (pkt->fragment == FRAGMENT_LATER || pkt->l4 == L4_ICMP_ERROR)
		return ct_way(flags);
	e = ct_lookup(&replies, ifindex);
	if (!e)
		return ct_create(&replies, pkt, ifindex, flags) ?: ct_way(flags);
	if (to_stack)
		e->flags |= SNAT_VIA_STACK;
	ct_note_from_world(e, pkt);
	return ct_way(e->flags);
}

/* A live entry of this owner as it is, for an ICMP error, which must change nothing; NULL: none. */
EC_INLINE struct conntrack_entry *ct_peek(const struct tuple *replies, __u32 ifindex)
{
	struct conntrack_entry *e = bpf_map_lookup_elem(&conntrack, replies);

	return e && flow_stands(&e->last_seen) && e->ifindex == ifindex ? e : NULL;
}

#endif
