/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * usage: how many entries each flow table has, since a hash map does not tell, and the
 * ends of its journal. What is still free limits each pod's share. All programs write
 * it, atomically.
 */
#ifndef EC_MAPS_USAGE_H
#define EC_MAPS_USAGE_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

enum usage_table {
	USAGE_SNAT,
	USAGE_CONNTRACK,
	USAGE_TABLES,
};

/* The key is an enum usage_table. */
struct usage {
	__u64 entries;
	__u64 head;  /* how many records were ever appended to the journal */
	__u64 tail;  /* how many of those were removed */
	__u64 swept; /* when the last sweep ended (CLOCK_MONOTONIC, ns); ec_collect writes it */
};

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct usage);
	__uint(max_entries, USAGE_TABLES);
} usage SEC(".maps");

#endif
