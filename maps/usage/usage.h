/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * usage: how many entries the flow tables hold, counted by the programs as
 * they add and collect, since a hash map does not tell. What is still free
 * bounds a pod's share.
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
};

#pragma clang diagnostic pop
#endif
