/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * uplinks: the interfaces that lead out of the node and carry our programs,
 * with the addresses to masquerade to. The agent writes it.
 */
#ifndef EC_MAPS_UPLINKS_H
#define EC_MAPS_UPLINKS_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

enum uplink_flags {
	UPLINK_BARE = 1, /* packets on it have no Ethernet header */
};

struct uplink_key {
	__u32 ifindex;
};

struct uplink {
	struct addr addresses[FAMILIES]; /* to masquerade to; zero: the uplink has none of the family */
	__u32 bit;                       /* its number in the masks of destinations, 0 to 63 */
	__u32 flags;                     /* enum uplink_flags */
};
_Static_assert(sizeof(struct uplink) == 40, "uplink is part of the map layout");

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct uplink_key);
	__type(value, struct uplink);
	__uint(max_entries, 256);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} uplinks SEC(".maps");

#endif
