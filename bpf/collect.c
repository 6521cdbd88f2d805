//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * ec_collect: one sweep over a flow table, run by the agent as a syscall program.
 * An entry goes only after its stamp, as read, was exchanged for a tombstone: a
 * packet that renews the stamp meanwhile keeps its flow. Both halves of a pair go
 * together, and the counters with them.
 */
#include "bpf/lib/collect.h"

/*
 * What stays is noted in the table's journal, and what was noted before the sweep
 * is done with at its end, so the journal holds each flow that there is.
 */
EC_INLINE void collect_count(struct collect_args *args, enum reaped reaped, void *ring, __u64 size,
			     const struct tuple *key)
{
	struct usage *u = flow_usage(args->table);

	args->scanned++;
	if (reaped == REAP_GONE)
		args->deleted++;
	else if (u) {
		journal_make_room(u, size);
		journal_note(ring, u, size, key);
	}
}

/* A pair, met by its forward half. */
static long collect_forward(void *map, const struct tuple *key, void *value, struct collect_args *args)
{
	struct reaper r = collect_reaper(args);
	struct pair p = {.out = *key};

	collect_count(args, reap_pair(&p, &r), &snat_journal, cfg.snat_entries, &p.out);
	return 0;
}

/* A reverse half whose forward half is missing. */
static long collect_reverse(void *map, const struct tuple *key, void *value, struct collect_args *args)
{
	struct reaper r = collect_reaper(args);
	struct pair p = {.world = *key};

	if (reap_reverse(&p, &r, false) == REAP_GONE)
		args->deleted++;
	return 0;
}

static long collect_conntrack(void *map, const struct tuple *key, void *value, struct collect_args *args)
{
	struct reaper r = collect_reaper(args);
	struct tuple replies = *key;

	collect_count(args, ct_reap(&replies, &r), &ct_journal, cfg.conntrack_entries, &replies);
	return 0;
}

/*
 * One function a table: merged into one call instruction, two sweeps of different
 * maps are refused by Linux 6.1 ("tail_call abusing map_ptr"; 6.12 takes them).
 */
EC_CALL void collect_snat(struct collect_args *a)
{
	bpf_for_each_map_elem(&snat, collect_forward, a, 0);
}

EC_CALL void collect_snat_reverse(struct collect_args *a)
{
	bpf_for_each_map_elem(&snat_reverse, collect_reverse, a, 0);
}

EC_CALL void collect_conntracked(struct collect_args *a)
{
	bpf_for_each_map_elem(&conntrack, collect_conntrack, a, 0);
}

SEC("syscall")
int ec_collect(struct collect_args *args)
{
	struct collect_args a = *args;
	struct usage *u = flow_usage(a.table);
	__u64 begin;

	if (!u)
		return 0;
	begin = u->head;
	switch (a.table) {
	case USAGE_SNAT:
		collect_snat(&a);
		collect_snat_reverse(&a);
		break;
	case USAGE_CONNTRACK:
		collect_conntracked(&a);
		break;
	}
	if ((__s64)(begin - u->tail) > 0)
		u->tail = begin;
	u->swept = a.now;
	args->scanned = a.scanned;
	args->deleted = a.deleted;
	return 0;
}
