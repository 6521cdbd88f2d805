/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Room for a new flow: where its table or port is taken, flows that have ended are removed. */
#ifndef EC_LIB_ROOM_H
#define EC_LIB_ROOM_H

#include "bpf/lib/reap.h"

/* A flow that was seen within this time, in ns, is taken to go on. */
#define ROOM_YOUNG (2 * NSEC_PER_SEC)

/* A search for flows that have ended, among the oldest of a table. */
struct room {
	struct scratch *scratch;
	struct usage *usage;
	struct reaper reaper;
	__u32 table;
	__u32 gone;
};

/* By what flows are judged now. */
EC_CALL void room_begin(struct reaper *r, const struct usage *u, __u32 table)
{
	r->now = bpf_ktime_get_coarse_ns();
	r->pressure = flow_pressure(u, table);
	r->world = flow_world_pressure();
}

static long room_step(__u32 i, struct room *r)
{
	struct pair *pair = &r->scratch->pair;
	enum reaped reaped;

	if (!journal_take(r->usage, r->table, &pair->forward_key))
		return 1;
	reaped = r->table == USAGE_SNAT ? reap_pair(pair, &r->reaper) : reap_recorded(&pair->forward_key, &r->reaper);
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

/*
 * Removes the flow whose reverse half has the scratch record's key, if it has ended; true if it had. pressed: the ports
 * are used up, and the world's flows end earlier.
 */
EC_GLOBAL int room_reap_port(__u32 pressed)
{
	struct reaper r;
	struct usage *u = flow_usage(USAGE_SNAT);
	struct scratch *s = scratch_get();

	if (!u || !s)
		return false;
	room_begin(&r, u, USAGE_SNAT);
	r.world |= pressed;
	s->pair.reverse_key = s->key;
	return reap_reverse(&s->pair, &r, true) == REAP_GONE;
}

/*
 * Whether a port that is in use has become free, because its flow had ended and was
 * removed; there is its reverse half, found by the scratch record's key.
 */
EC_INLINE bool room_reclaim_port(const struct snat_entry *there, bool pressed)
{
	__u64 age = bpf_ktime_get_coarse_ns() - there->last_seen;

	if ((__s64)age < (__s64)ROOM_YOUNG && flow_owner_lives(there->ifindex))
		return false;
	return room_reap_port(pressed);
}

#endif
