/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The journals: for each flow table a ring of keys, in the order in which the flows were
 * opened or last judged. A record is only a hint: a flow is judged by its entry, so a
 * record that is lost, torn or doubled does no harm.
 */
#ifndef EC_LIB_JOURNAL_H
#define EC_LIB_JOURNAL_H

#include "bpf/lib/flow.h"

/* So many of the newest records are left alone: they may be half written. */
#define JOURNAL_YOUNG 8

/* How many records a program looks at for each new flow while the agent does not sweep, and when it finds no room. */
#define JOURNAL_STEPS 4
#define JOURNAL_STEPS_FULL 16

/* After so many ns without a sweep the programs do the agent's work. */
#define JOURNAL_SILENCE (30 * NSEC_PER_SEC)

/* A record of a table's journal. */
EC_INLINE struct tuple *journal_record(__u32 table, __u64 at)
{
	__u32 index = at % flow_capacity(table);

	if (table == USAGE_SNAT)
		return bpf_map_lookup_elem(&snat_journal, &index);
	return bpf_map_lookup_elem(&ct_journal, &index);
}

/* Appends a flow, unless the ring is full: then the next sweep does. */
EC_INLINE void journal_note(struct usage *u, __u32 table, const struct tuple *flow)
{
	struct tuple *record;

	if (u->head - u->tail >= flow_capacity(table))
		return;
	record = journal_record(table, __sync_fetch_and_add(&u->head, 1));
	if (record)
		*record = *flow;
}

/* Drops the oldest record of a full ring, for a newer one. */
EC_INLINE void journal_drop_oldest(struct usage *u, __u32 table)
{
	__u64 tail = *(volatile __u64 *)&u->tail;

	if (u->head - tail >= flow_capacity(table))
		__sync_val_compare_and_swap(&u->tail, tail, tail + 1);
}

/* Removes the oldest record; false: there is none, or another CPU was faster. */
EC_INLINE bool journal_take(struct usage *u, __u32 table, struct tuple *flow)
{
	__u64 tail = *(volatile __u64 *)&u->tail;
	struct tuple *record;

	if ((__s64)(*(volatile __u64 *)&u->head - tail) <= JOURNAL_YOUNG)
		return false;
	if (__sync_val_compare_and_swap(&u->tail, tail, tail + 1) != tail)
		return false;
	record = journal_record(table, tail);
	if (record)
		*flow = *record;
	return record;
}

/* Whether the agent has stopped sweeping. */
EC_INLINE bool journal_unswept(const struct usage *u, __u64 now)
{
	return (__s64)(now - u->swept) > (__s64)JOURNAL_SILENCE;
}

#endif
