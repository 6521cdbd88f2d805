/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Room in the flow tables: where there is none for a new flow, what has ended gives way. */
#ifndef EC_LIB_ROOM_H
#define EC_LIB_ROOM_H

#include "bpf/lib/reap.h"

/* A look at the oldest flows of a table, for those that have ended. */
struct room {
	struct scratch *scratch;
	struct usage *usage;
	struct reaper reaper;
	__u32 table;
	__u32 gone;
};

static long room_step(__u32 i, struct room *r)
{
	struct pair *pair = &r->scratch->pair;
	enum reaped reaped;

	if (!journal_take(r->usage, r->table, &pair->out))
		return 1;
	reaped = r->table == USAGE_SNAT ? reap_pair(pair, &r->reaper) : reap_recorded(&pair->out, &r->reaper);
	if (reaped == REAP_KEPT)
		journal_note(r->usage, r->table, &pair->out);
	r->gone += reaped == REAP_GONE;
	return 0;
}

/* Looks at so many of the oldest flows, and returns how many have ended and are gone. */
EC_GLOBAL int room_make(__u32 table, __u32 steps)
{
	struct room r = {.scratch = scratch_get(), .usage = flow_usage(table), .table = table};

	if (!r.scratch || !r.usage)
		return 0;
	r.reaper.now = bpf_ktime_get_coarse_ns();
	r.reaper.pressure = journal_pressure(r.usage, table);
	bpf_loop(steps, room_step, &r, 0);
	return r.gone;
}

/* Counts a new flow of a table for its holder (NULL: the node itself), before it is made. */
EC_INLINE enum verdict room_reserve(struct usage *u, __u32 table, __u32 *held)
{
	enum verdict verdict;

	if (journal_unswept(u, bpf_ktime_get_coarse_ns()))
		room_make(table, JOURNAL_STEPS);
	verdict = flow_reserve(u, table, held);
	if (verdict && room_make(table, JOURNAL_STEPS_FULL))
		verdict = flow_reserve(u, table, held);
	return verdict;
}

#endif
