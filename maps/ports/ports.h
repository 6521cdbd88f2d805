/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * ports: how many ports the pairs in snat use towards each destination, in total, for each
 * pod, for all clients outside and for each of them; and how many pairs each client outside has. The programs add, they
 * and ec_collect subtract. A cell is found by a hash: where two share one its count is too high, so the programs look
 * at the ports themselves before they refuse a flow.
 */
#ifndef EC_MAPS_PORTS_H
#define EC_MAPS_PORTS_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

/* The key is the upper PORTS_BITS of the hash. */
enum ports_layout {
	PORTS_BITS = 17,
};

struct port_count {
	__u32 flows;
};

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct port_count);
	__uint(max_entries, 1 << PORTS_BITS);
} ports SEC(".maps");

#endif
