/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Room for a new flow: where its table or port is taken, flows that have ended are removed. */
#ifndef EC_LIB_ROOM_H
#define EC_LIB_ROOM_H

#include "bpf/lib/reap.h"

/* A flow that was seen within this time, in ns, is taken to go on, unless it is closing. */
#define ROOM_YOUNG (2 * NSEC_PER_SEC)

/* A search for flows that have ended, among the oldest of a table. */
struct room {
	struct scratch *scratch;
	struct usage *usage;
	struct reaper reaper;
	__u32 table;
	__u32 gone;
};

/* Whose share the flow to open is in. */
EC_INLINE __u32 room_holder(const struct scratch *s)
{
	return holder_of(s->owner.ifindex, s->owner.flags, &s->pkt.tuple.src);
}

/* By what flows are judged now. */
EC_CALL void room_begin(struct reaper *r, const struct usage *u, __u32 table)
{
	r->now = bpf_ktime_get_coarse_ns();
	r->pressure = flow_pressure(u, table);
	r->world = flow_world_pressure();
	r->needed = true;
	r->holder = 0;
	r->opens = false;
	r->seq = 0;
}

/* Judges the pair in the scratch record, by its forward half's key. */
EC_GLOBAL enum reaped room_reap_pair(const struct reaper *r)
{
	struct scratch *s = scratch_get();

	return s && r ? reap_pair(&s->pair, r) : REAP_NONE;
}

static long room_step(__u32 i, struct room *r)
{
	struct pair *pair = &r->scratch->pair;
	enum reaped reaped;

	if (!journal_take(r->usage, r->table, &pair->forward_key))
		return 1;
	reaped = r->table == USAGE_SNAT ? room_reap_pair(&r->reaper) : reap_recorded(&pair->forward_key, &r->reaper);
	if (reaped == REAP_KEPT)
		journal_note(r->usage, r->table, &pair->forward_key);
	r->gone += reaped == REAP_GONE;
	return 0;
}

/* Looks at up to steps of the oldest flows; returns how many had ended and were removed. */
EC_GLOBAL int room_make(__u32 table, __u32 steps)
{
	struct room r = {.scratch = scratch_get(), .usage = flow_usage(table), .table = table};

	if (!r.scratch || !r.usage)
		return 0;
	room_begin(&r.reaper, r.usage, table);
	bpf_loop(steps, room_step, &r, 0);
	return r.gone;
}

/* flow_reserve, which removes ended flows if the table is full or the agent has stopped sweeping it. */
EC_INLINE enum verdict room_reserve(struct usage *u, __u32 table, const struct holding *held)
{
	enum verdict verdict;

	if (journal_unswept(u, bpf_ktime_get_coarse_ns()))
		room_make(table, JOURNAL_STEPS);
	verdict = flow_reserve(u, table, held);
	if (verdict && room_make(table, JOURNAL_STEPS_FULL))
		verdict = flow_reserve(u, table, held);
	return verdict;
}

/* Why a port is looked at. */
enum room_need {
	ROOM_PORT,    /* it was drawn */
	ROOM_PRESSED, /* the ports are used up: the world's flows end earlier */
	ROOM_SPARE,   /* the same, and its flow may give way to the one to open */
};

/* Has pairs give way to the flow to open. */
EC_INLINE void room_begin_spare(struct reaper *r, const struct scratch *s)
{
	r->holder = room_holder(s);
	r->opens = tcp_is_opening(&s->pkt);
	r->seq = s->pkt.seq;
}

/*
 * Removes the flow whose reverse half has the scratch record's key, if it has ended or gives way; true if so. need is
 * an enum room_need.
 */
EC_GLOBAL int room_reap_port(__u32 need)
{
	struct reaper r = {};
	struct usage *u = flow_usage(USAGE_SNAT);
	struct scratch *s = scratch_get();
	enum reaped reaped;

	if (!u || !s)
		return false;
	room_begin(&r, u, USAGE_SNAT);
	r.world |= need >= ROOM_PRESSED;
	if (need == ROOM_SPARE)
		room_begin_spare(&r, s);
	s->pair.reverse_key = s->key;
	reaped = reap_reverse(&s->pair, &r);
	if (reaped == REAP_PAIR)
		reaped = room_reap_pair(&r);
	return reaped == REAP_GONE;
}

/*
 * Whether a port that is in use has become free, because its flow had ended and was
 * removed; there is its reverse half, found by the scratch record's key.
 */
EC_INLINE bool room_reclaim_port(const struct snat_entry *there, enum room_need need)
{
	__u64 age = bpf_ktime_get_coarse_ns() - there->last_seen;

	if ((__s64)age < (__s64)ROOM_YOUNG && !(there->state & (FLOW_FIN | FLOW_CLOSED)) &&
	    flow_owner_lives(there->ifindex))
		return false;
	return room_reap_port(need);
}

/*
 * Notes the flow whose reverse half has the scratch record's key as spare, if it may give way to the one to open and is
 * the stalest so far.
 */
EC_GLOBAL int room_note_spare(void)
{
	struct reaper r = {.now = bpf_ktime_get_coarse_ns()};
	struct snat_entry *forward, *reverse;
	struct scratch *s = scratch_get();
	__u32 recent;

	if (!s)
		return 0;
	room_begin_spare(&r, s);
	reverse = bpf_map_lookup_elem(&snat_reverse, &s->key);
	if (!reverse)
		return 0;
	nat_set_other_key(&s->pair.forward_key, &s->key, reverse);
	forward = bpf_map_lookup_elem(&snat, &s->pair.forward_key);
	if (!forward || !nat_leads_to(forward, &s->key, reverse->ifindex) ||
	    !reap_gives_way(&r, &s->pair.forward_key, forward, reverse))
		return 0;
	recent = nat_recent(forward, s->key.proto);
	if (!s->spare.found++ || (__s32)(s->spare.recent - recent) > 0) {
		s->spare.recent = recent;
		s->spare.port = s->key.sport;
	}
	return 0;
}

#endif
