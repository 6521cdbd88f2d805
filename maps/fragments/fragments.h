/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * fragments: the ports that a datagram's first fragment has carried, for the later ones,
 * which carry none. The programs write it. Each holder has a share of the slots; a lost
 * record costs one datagram, not a flow.
 */
#ifndef EC_MAPS_FRAGMENTS_H
#define EC_MAPS_FRAGMENTS_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

/* How many slots there are. */
enum fragments_layout {
	FRAGMENTS_OF_WORLD = 8192,   /* for the holder FRAGMENTS_WORLD */
	FRAGMENTS_OF_OTHERS = 57344, /* for all other holders together */
	FRAGMENTS_EACH = 64,         /* for each of those */
};

/* Who holds a record, if not a pod. */
enum fragments_holder {
	FRAGMENTS_WORLD = 0, /* for packets that arrive for the node */
	FRAGMENTS_NODE = 1,  /* for packets that the node sends: the index of its loopback device */
};

struct fragment {
	struct addr src; /* addresses and ports as the packet arrived */
	struct addr dst;
	__u32 id; /* the identification of IPv4 or of the IPv6 fragment header, host order */
	__u8 proto;
	__u8 pad[3];
	__be16 sport;
	__be16 dport;
	__u32 ifindex;   /* the holder: a pod's, or enum fragments_holder */
	__u64 last_seen; /* when the first came (CLOCK_MONOTONIC, ns); 1: being written, 0: never used */
};
_Static_assert(sizeof(struct fragment) == 56, "fragment is part of the map layout");

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct fragment);
	__uint(max_entries, FRAGMENTS_OF_WORLD + FRAGMENTS_OF_OTHERS);
} fragments SEC(".maps");

#endif
