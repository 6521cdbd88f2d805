/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * snat_journal and ct_journal: rings of keys of flows, with as many records as their
 * tables have entries, which the programs write; their ends are in usage. candidates:
 * keys of a flow table that the agent writes for ec_collect.
 */
#ifndef EC_MAPS_JOURNAL_H
#define EC_MAPS_JOURNAL_H

#include "maps/wire/wire.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct tuple);
	__uint(max_entries, 262144);
} snat_journal SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct tuple);
	__uint(max_entries, 262144);
} ct_journal SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct tuple);
	__uint(max_entries, 1024);
} candidates SEC(".maps");

#endif
