/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * usage: how many entries the flow tables hold, counted by the programs as
 * they add and collect, since a hash map does not tell. What is still free
 * bounds a pod's share. And the ends of the tables' journals, rings of flow keys
 * in which a program that finds no room looks for flows that have ended: the
 * oldest first.
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

/*
 * The key is an enum usage_table. head counts the records that were ever written
 * to the journal, tail those that are no more wanted. swept is the time of the
 * last sweep, CLOCK_MONOTONIC in ns; ec_collect writes it.
 */
struct usage {
	__u64 entries;
	__u64 head;
	__u64 tail;
	__u64 swept;
};

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct usage);
	__uint(max_entries, USAGE_TABLES);
} usage SEC(".maps");

#endif
