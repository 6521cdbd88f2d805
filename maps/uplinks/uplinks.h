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

struct uplink_key {
	__u32 ifindex;
};

/* All zero: the uplink has no address of that family. */
struct uplink {
	struct addr ipv4;
	struct addr ipv6;
};
_Static_assert(sizeof(struct uplink) == 32, "uplink is part of the map layout");

#pragma clang diagnostic pop
#endif
