/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * backends: the endpoints of Services' ports, by number. slots: the numbers of the
 * backends of each set, one block a set (maps/services). The agent writes both; a block or
 * a number that nothing names any more is used again only after a while, so that no
 * program that has just read it meets another.
 */
#ifndef EC_MAPS_BACKENDS_H
#define EC_MAPS_BACKENDS_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

enum backend_flags {
	BACKEND_SERVING = 1, /* its set names it: new flows may choose it */
	BACKEND_ON_NODE = 2, /* it runs on a node of the cluster, not in the world */
	BACKEND_ANSWERS = 4, /* it answers: datagrams go on, also if its set does not name it */
};

/* Number 0 is no backend. A number belongs to one port of one Service. */
struct backend {
	struct addr address;
	__be16 port;
	__u8 proto;
	__u8 flags;       /* enum backend_flags */
	__u32 generation; /* rises when it is in no EndpointSlice any more: a flow with another is of an earlier one */
	__u32 set;        /* of whose set it is */
};
_Static_assert(sizeof(struct backend) == 28, "backend is part of the map layout");

struct slot {
	__u32 backend;
};

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct backend);
	__uint(max_entries, 131072);
} backends SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct slot);
	__uint(max_entries, 524288);
} slots SEC(".maps");

#endif
