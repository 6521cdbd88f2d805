/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Ending flows: the one rule by which an entry has ended, and the one way to take
 * it away, for the collector and for programs that need its port or its place. An
 * entry goes only after its stamp, as read, was exchanged for a tombstone: a packet
 * that renews the stamp meanwhile keeps its flow. Nothing here uses the scratch
 * record, since the collector runs in process context.
 */
#ifndef EC_LIB_REAP_H
#define EC_LIB_REAP_H

#include "bpf/lib/journal.h"
#include "bpf/lib/nat.h"

/* What became of an entry that was looked at. */
enum reaped {
	REAP_NONE, /* it is not there */
	REAP_KEPT,
	REAP_GONE,
};

/* By what an entry is judged: now is CLOCK_MONOTONIC in ns; under pressure flows end earlier. */
struct reaper {
	__u64 now;
	__u64 pressure;
};

/* Under pressure the lifetimes of all but established TCP connections are a quarter. */
EC_INLINE bool reap_expired(const struct reaper *r, __u8 proto, __u8 out, __u8 in, __u64 last_seen)
{
	__u64 lifetime = flow_lifetime_s(proto, out, in) * NSEC_PER_SEC;

	if (r->pressure && !flow_established(proto, out, in))
		lifetime /= 4;
	return (__s64)(r->now - last_seen) > (__s64)lifetime;
}

/* Whether an entry may be taken, by its stamp as it was read: it is over, and nobody's to remove, or was left by who
 * was. */
EC_INLINE bool reap_may(const struct reaper *r, __u64 *last_seen, __u64 seen, bool over)
{
	return flow_is_left(last_seen, r->now) || (seen >= FLOW_MARKS && over);
}

/* A pair, by its forward half's key; the reverse half's is written beside it. */
EC_CALL enum reaped reap_pair(struct pair *p, const struct reaper *r)
{
	struct snat_entry *forward = bpf_map_lookup_elem(&snat, &p->out), *reverse;
	__u64 seen, latest, answered = 0;
	__u8 in = 0;

	if (!forward)
		return REAP_NONE;
	nat_set_reverse_key(&p->world, &p->out, &forward->to_address, forward->to_port);
	reverse = bpf_map_lookup_elem(&snat_reverse, &p->world);
	seen = latest = forward->last_seen;
	if (reverse && nat_names(reverse, &p->out, forward->ifindex)) {
		in = reverse->state;
		answered = reverse->last_seen;
		if ((__s64)(answered - seen) > 0)
			latest = answered;
	}
	if (!reap_may(r, &forward->last_seen, seen,
		      !flow_owner_lives(forward->ifindex) || reap_expired(r, p->out.proto, forward->state, in, latest)))
		return REAP_KEPT;
	if (!flow_claim(&forward->last_seen, seen))
		return REAP_KEPT;
	if (answered && reverse && !flow_claim(&reverse->last_seen, answered)) {
		/* Answered just now: it stays. Another's tombstone is no stamp to copy. */
		answered = reverse->last_seen;
		forward->last_seen = answered >= FLOW_MARKS ? answered : seen;
		return REAP_KEPT;
	}
	p->ifindex = forward->ifindex;
	p->flags = forward->flags;
	if (answered && reverse)
		bpf_map_delete_elem(&snat_reverse, &p->world);
	if (!bpf_map_delete_elem(&snat, &p->out))
		nat_uncount(&p->world, p->ifindex, p->flags);
	return REAP_GONE;
}

/* A reverse half by its key. With a forward half it is a pair, and judged as such if pairs are wanted. */
EC_INLINE enum reaped reap_reverse(struct pair *p, const struct reaper *r, bool pairs)
{
	struct snat_entry *reverse = bpf_map_lookup_elem(&snat_reverse, &p->world), *forward;
	__u64 seen;

	if (!reverse)
		return REAP_NONE;
	nat_set_reverse_key(&p->out, &p->world, &reverse->to_address, reverse->to_port);
	forward = bpf_map_lookup_elem(&snat, &p->out);
	if (forward && nat_leads_to(forward, &p->world, reverse->ifindex))
		return pairs ? reap_pair(p, r) : REAP_KEPT;
	seen = reverse->last_seen;
	if (!reap_may(r, &reverse->last_seen, seen,
		      !flow_owner_lives(reverse->ifindex) || reap_expired(r, p->world.proto, 0, reverse->state, seen)))
		return REAP_KEPT;
	if (!flow_claim(&reverse->last_seen, seen))
		return REAP_KEPT;
	p->ifindex = reverse->ifindex;
	p->flags = reverse->flags;
	/* One that was left belonged to a pair that is counted no more. */
	if (!bpf_map_delete_elem(&snat_reverse, &p->world) && seen >= FLOW_MARKS)
		nat_uncount(&p->world, p->ifindex, p->flags);
	return REAP_GONE;
}

/* Removes a recorded flow that was claimed, and takes it off its owner's count (NULL: the owner is gone). */
EC_INLINE void reap_remove_recorded(const struct tuple *replies, struct device *owner)
{
	if (!bpf_map_delete_elem(&conntrack, replies))
		flow_release(USAGE_CONNTRACK, owner ? &owner->conntrack_flows : NULL);
}

/* A recorded flow, by its key. */
EC_CALL enum reaped reap_recorded(const struct tuple *replies, const struct reaper *r)
{
	struct conntrack_entry *e = bpf_map_lookup_elem(&conntrack, replies);
	struct device *owner;
	__u64 seen;

	if (!e)
		return REAP_NONE;
	seen = e->last_seen;
	owner = flow_owner(e->ifindex);
	if (!reap_may(r, &e->last_seen, seen,
		      !owner || reap_expired(r, replies->proto, e->from_world, e->from_pod, seen)))
		return REAP_KEPT;
	if (!flow_claim(&e->last_seen, seen))
		return REAP_KEPT;
	reap_remove_recorded(replies, owner);
	return REAP_GONE;
}

#endif
