/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The arguments of ec_collect. */
#ifndef EC_LIB_COLLECT_H
#define EC_LIB_COLLECT_H

#include "bpf/lib/ct.h"
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

#endif
