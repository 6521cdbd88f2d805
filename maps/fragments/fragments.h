/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * fragments: the ports that a datagram's first fragment carried, for the later
 * ones, which carry none. Each holder has a share of the places; what is lost costs
 * a datagram, not a flow.
 */
#ifndef EC_MAPS_FRAGMENTS_H
#define EC_MAPS_FRAGMENTS_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

/* How many places there are for what the world sends to the node, for all else, and for each pod of those. */
enum fragments_layout {
	FRAGMENTS_OF_WORLD = 8192,
	FRAGMENTS_OF_OTHERS = 57344,
	FRAGMENTS_EACH = 64,
};

/* Who holds a record, where it is no pod. */
enum fragments_holder {
	FRAGMENTS_WORLD = 0, /* what arrives for the node */
	FRAGMENTS_NODE = 1,  /* what the node sends: the index of its loopback device */
};

/*
 * Addresses as the packet has them; id is the IPv4 identification, in host order;
 * ifindex says who holds the record. last_seen is when the first fragment came
 * (CLOCK_MONOTONIC, ns); 1 while a program writes the record, 0 in one never used.
 */
struct fragment {
	struct addr src;
	struct addr dst;
	__u32 id;
	__u8 proto;
	__u8 pad[3];
	__be16 sport;
	__be16 dport;
	__u32 ifindex;
	__u64 last_seen;
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
