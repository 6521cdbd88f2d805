/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The journals: rings of the keys of flows, one for each table, in the order in
 * which they were opened or last looked at. A record is a hint and no more: what
 * becomes of a flow is judged by its entry, so a record that is lost, torn or
 * there twice does no harm.
 */
#ifndef EC_LIB_JOURNAL_H
#define EC_LIB_JOURNAL_H

#include "bpf/lib/maps.h"
#include "maps/wire/wire.h"

/* The newest records are left alone: they may be half written. */
#define JOURNAL_YOUNG 8

/* Records that a program looks at while the agent sweeps no more, and when it finds no room. */
#define JOURNAL_STEPS 4
#define JOURNAL_STEPS_FULL 16

/* After so long without a sweep the programs do the agent's work. */
#define JOURNAL_SILENCE (30 * NSEC_PER_SEC)

/* Notes a flow. A full ring takes no more: the next sweep notes the flow. */
EC_INLINE void journal_note(void *ring, struct usage *u, __u64 size, const struct tuple *flow)
{
	struct tuple *record;
	__u32 index;

	if (u->head - u->tail >= size)
		return;
	index = __sync_fetch_and_add(&u->head, 1) % size;
	record = bpf_map_lookup_elem(ring, &index);
	if (record)
		*record = *flow;
}

/* Gives up the oldest record of a full ring, for a newer one. */
EC_INLINE void journal_make_room(struct usage *u, __u64 size)
{
	__u64 tail = *(volatile __u64 *)&u->tail;

	if (u->head - tail >= size)
		__sync_val_compare_and_swap(&u->tail, tail, tail + 1);
}

/* Takes the oldest record out; false: there is none, or another CPU has it. */
EC_INLINE bool journal_take(void *ring, struct usage *u, __u64 size, struct tuple *flow)
{
	__u64 tail = *(volatile __u64 *)&u->tail;
	__u32 index = tail % size;
	struct tuple *record;

	if ((__s64)(*(volatile __u64 *)&u->head - tail) <= JOURNAL_YOUNG)
		return false;
	if (__sync_val_compare_and_swap(&u->tail, tail, tail + 1) != tail)
		return false;
	record = bpf_map_lookup_elem(ring, &index);
	if (record)
		*flow = *record;
	return record;
}

/* Whether the agent sweeps no more. */
EC_INLINE bool journal_unswept(const struct usage *u, __u64 now)
{
	return (__s64)(now - u->swept) > (__s64)JOURNAL_SILENCE;
}

/* Whether a table is so full that flows end earlier; the agent's measure is the same. */
EC_INLINE bool journal_pressure(const struct usage *u, __u64 capacity)
{
	return u->entries * 10 > capacity * 7;
}

#endif
