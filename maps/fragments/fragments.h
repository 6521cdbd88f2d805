/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * fragments: the ports that a datagram's first fragment carried, for the later
 * ones, which carry none. An LRU: what is lost costs a datagram, not a flow.
 */
#ifndef EC_MAPS_FRAGMENTS_H
#define EC_MAPS_FRAGMENTS_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

/* Addresses as the packet has them; id is the IPv4 identification, in host order. */
struct fragment_key {
	struct addr src;
	struct addr dst;
	__u32 id;
	__u8 proto;
	__u8 pad[3];
};
_Static_assert(sizeof(struct fragment_key) == 40, "fragment_key is part of the map layout");

struct fragment {
	__be16 sport;
	__be16 dport;
};

#pragma clang diagnostic pop
#endif
