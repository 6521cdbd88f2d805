//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * ec_collect: one slice of a sweep over a flow table, so that no run takes long. The
 * agent runs it as a syscall program, after writing keys of the table to the map
 * candidates. reap.h judges whether a flow has ended, and removes it.
 */
#include "bpf/lib/reap.h"

/* What a run does: a sweep begins, goes through the table's halves in slices, and ends. */
enum collect_stage {
	COLLECT_BEGIN,
	COLLECT_PAIRS,    /* candidates are keys of snat */
	COLLECT_REVERSE,  /* candidates are keys of snat_reverse */
	COLLECT_RECORDED, /* candidates are keys of conntrack */
	COLLECT_END,
};

/* Whose flows end earlier (holder.h). */
enum collect_pressure {
	COLLECT_ALL = 1,
	COLLECT_WORLD = 2,
};

/* The agent passes on what the last run has returned. scanned and deleted are results, in flows. */
struct collect_args {
	__u64 now;      /* CLOCK_MONOTONIC, ns */
	__u32 table;    /* enum usage_table */
	__u32 pressure; /* enum collect_pressure, to which BEGIN adds what there is */
	__u32 stage;    /* enum collect_stage */
	__u32 count;    /* candidates */
	__u64 head;     /* of the journal when the sweep began: BEGIN returns it, END takes it */
	__u64 scanned;
	__u64 deleted;
	__u64 left; /* not 0: all candidates end, since containers have left their addresses, which others may get */
};

/* Later than any flow lives, in ns. */
#define COLLECT_FOREVER (FLOW_ESTABLISHED_S * NSEC_PER_SEC * 2)

/*
 * Counts a candidate. Flows that stay are noted in the journal again, and the end of
 * the sweep drops all records from before it: so the journal holds every flow.
 */
EC_INLINE void collect_count(struct collect_args *args, enum reaped reaped, const struct tuple *key)
{
	struct usage *u = flow_usage(args->table);

	args->scanned++;
	if (reaped == REAP_GONE) {
		args->deleted++;
	} else if (u && reaped == REAP_KEPT) {
		journal_drop_oldest(u, args->table);
		journal_note(u, args->table, key);
	}
}

/* Judges one candidate; 1: there are no more. */
static long collect_step(__u32 i, struct collect_args *args)
{
	struct reaper r = {.now = args->now, .pressure = args->pressure & COLLECT_ALL};
	struct tuple *candidate = bpf_map_lookup_elem(&candidates, &i);
	struct tuple key;
	struct pair p;

	if (!candidate)
		return 1;
	key = *candidate;
	if (cfg.bridges && args->left)
		r.now += COLLECT_FOREVER;
	r.world = flow_world_pressure();
	switch (args->stage) {
	case COLLECT_PAIRS:
		p.forward_key = key;
		collect_count(args, reap_pair(&p, &r), &key);
		break;
	case COLLECT_REVERSE: /* removed if it has no forward half and has expired */
		p.reverse_key = key;
		args->deleted += reap_reverse(&p, &r) == REAP_GONE;
		break;
	default:
		collect_count(args, reap_recorded(&key, &r), &key);
	}
	return 0;
}

/* Drops the journal's records from before the sweep. */
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
		a.pressure |= flow_pressure(u, a.table) ? COLLECT_ALL : 0;
		a.pressure |= flow_world_pressure() ? COLLECT_WORLD : 0;
		break;
	case COLLECT_END:
		collect_end(&a, u);
		break;
	default:
		bpf_loop(a.count, collect_step, &a, 0);
	}
	args->head = a.head;
	args->pressure = a.pressure;
	args->scanned = a.scanned;
	args->deleted = a.deleted;
	return 0;
}
