/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * affinity: which backend a client keeps (sessionAffinity: ClientIP). Each pod overwrites
 * only records of its own, as in fragments. clients: the same for clients in the world and
 * the node itself, where the one that has been used the longest ago goes. The programs
 * write both.
 */
#ifndef EC_MAPS_AFFINITY_H
#define EC_MAPS_AFFINITY_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

enum affinity_layout {
	AFFINITY_SLOTS = 32768,
	AFFINITY_EACH = 64, /* for each pod */
};

struct affinity {
	struct addr client;
	__u32 set;
	__u32 backend;
	__u32 generation; /* of the backend */
	__u32 ifindex;    /* the pod that holds the record */
	__u64 last_seen; /* when the client last opened a flow (CLOCK_MONOTONIC, ns); 1: being written, 0: never used */
};
_Static_assert(sizeof(struct affinity) == 40, "affinity is part of the map layout");

struct client_key {
	struct addr client; /* zero: the node's own processes */
	__u32 set;
};

struct client {
	__u32 backend;
	__u32 generation; /* of the backend */
	__u64 last_seen;  /* when the client last opened a flow (CLOCK_MONOTONIC, ns) */
};

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct affinity);
	__uint(max_entries, AFFINITY_SLOTS);
} affinity SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct client_key);
	__type(value, struct client);
	__uint(max_entries, 32768);
} clients SEC(".maps");

#endif
