//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * ec_collect: a slice of a sweep over a flow table, run by the agent as a syscall
 * program, so that no run takes long. What it looks at, the agent has written to
 * the map candidates: keys that it has met in the table. Whether a flow has ended,
 * and if so its end, is reap.h.
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
	if (reaped == REAP_GONE) {
		args->deleted++;
	} else if (u && reaped == REAP_KEPT) {
		journal_make_room(u, size);
		journal_note(ring, u, size, key);
	}
}

/* A pair, by its forward half. */
static long collect_pair(__u32 i, struct collect_args *args)
{
	struct reaper r = collect_reaper(args);
	struct tuple *key = bpf_map_lookup_elem(&candidates, &i);
	struct pair p;

	if (!key)
		return 1;
	p.out = *key;
	collect_count(args, reap_pair(&p, &r), &snat_journal, cfg.snat_entries, &p.out);
	return 0;
}

/* A reverse half: it goes if its forward half is missing and its time has come. */
static long collect_reverse(__u32 i, struct collect_args *args)
{
	struct reaper r = collect_reaper(args);
	struct tuple *key = bpf_map_lookup_elem(&candidates, &i);
	struct pair p;

	if (!key)
		return 1;
	p.world = *key;
	if (reap_reverse(&p, &r, false) == REAP_GONE)
		args->deleted++;
	return 0;
}

static long collect_recorded(__u32 i, struct collect_args *args)
{
	struct reaper r = collect_reaper(args);
	struct tuple *key = bpf_map_lookup_elem(&candidates, &i);
	struct tuple replies;

	if (!key)
		return 1;
	replies = *key;
	collect_count(args, ct_reap(&replies, &r), &ct_journal, cfg.conntrack_entries, &replies);
	return 0;
}

/* The table has been gone through: its journal begins where it stood before. */
EC_INLINE void collect_end(const struct collect_args *args, struct usage *u)
{
	if ((__s64)(args->head - u->tail) > 0)
		u->tail = args->head;
	u->swept = args->now;
}

SEC("syscall")
int ec_collect(struct collect_args *args)
{
	struct collect_args a = *args;
	struct usage *u = flow_usage(a.table);

	if (!u)
		return 0;
	switch (a.stage) {
	case COLLECT_BEGIN:
		a.head = u->head;
		break;
	case COLLECT_PAIRS:
		bpf_loop(a.count, collect_pair, &a, 0);
		break;
	case COLLECT_REVERSE:
		bpf_loop(a.count, collect_reverse, &a, 0);
		break;
	case COLLECT_RECORDED:
		bpf_loop(a.count, collect_recorded, &a, 0);
		break;
	case COLLECT_END:
		collect_end(&a, u);
		break;
	}
	args->head = a.head;
	args->scanned = a.scanned;
	args->deleted = a.deleted;
	return 0;
}
