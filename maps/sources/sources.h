/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * sources: the address that packets to a destination are masqueraded to, if it is not the
 * one in `uplinks`, by uplink and longest prefix. The agent writes it.
 */
#ifndef EC_MAPS_SOURCES_H
#define EC_MAPS_SOURCES_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

/* prefix_len counts the 32 bits of ifindex, and bits of the 16-byte address: an IPv4 /24 is 152. */
struct source_key {
	__u32 prefix_len;
	__u32 ifindex;
	struct addr prefix;
};

struct source {
	struct addr address;
};
_Static_assert(sizeof(struct source) == 16, "source is part of the map layout");

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct source_key);
	__type(value, struct source);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} sources SEC(".maps");

#endif
