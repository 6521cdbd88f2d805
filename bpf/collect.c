//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * ec_collect: a slice of a sweep over a flow table, run by the agent as a syscall
 * program, so that no run takes long. What it looks at, the agent has written to
 * the map candidates: keys that it has met in the table. Whether a flow has ended,
 * and if so its end, is reap.h.
 */
#include "bpf/lib/reap.h"

/* What a run does: a sweep is a beginning, slices of the tables' halves, and an end. */
enum collect_stage {
	COLLECT_BEGIN,
	COLLECT_PAIRS,    /* candidates are keys of snat */
	COLLECT_REVERSE,  /* of snat_reverse */
	COLLECT_RECORDED, /* of conntrack */
	COLLECT_END,
};

/*
 * now is CLOCK_MONOTONIC in ns, table an enum usage_table. Under pressure the
 * lifetimes of all but established TCP connections are a quarter. count is how
 * many candidates there are. head is where the journal stood: an answer to the
 * beginning, which the end wants. scanned and deleted are answers, in flows.
 */
struct collect_args {
	__u64 now;
	__u32 table;
	__u32 pressure;
	__u32 stage;
	__u32 count;
	__u64 head;
	__u64 scanned;
	__u64 deleted;
};

/* The same by which a flow is judged. */
EC_INLINE struct reaper collect_reaper(const struct collect_args *args)
{
	struct reaper r = {.now = args->now, .pressure = args->pressure};

	return r;
}

/*
 * What stays is noted in the table's journal, and what was noted before the sweep
 * is done with at its end, so the journal holds each flow that there is.
 */
EC_INLINE void collect_count(struct collect_args *args, enum reaped reaped, const struct tuple *key)
{
	struct usage *u = flow_usage(args->table);

	args->scanned++;
	if (reaped == REAP_GONE) {
		args->deleted++;
	} else if (u && reaped == REAP_KEPT) {
		journal_give_up(u, args->table);
		journal_note(u, args->table, key);
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
	collect_count(args, reap_pair(&p, &r), &p.out);
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
	collect_count(args, reap_recorded(&replies, &r), &replies);
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
