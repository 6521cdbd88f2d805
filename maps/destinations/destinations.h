/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * destinations: what an address is and how to reach it, by longest prefix. An
 * address without an entry is the world. The agent writes it.
 */
#ifndef EC_MAPS_DESTINATIONS_H
#define EC_MAPS_DESTINATIONS_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

/* prefix_len counts bits of the 16-byte address: an IPv4 /24 is 120. */
struct destination_key {
	__u32 prefix_len;
	struct addr prefix;
};

enum destination_kind {
	DESTINATION_WORLD,    /* the same as no entry */
	DESTINATION_HOST,     /* an address of this node: to the stack */
	DESTINATION_LOCAL,    /* this node's podCIDR, or a pod of this node outside it */
	DESTINATION_POD_CIDR, /* another node's podCIDR */
	DESTINATION_NODE,     /* another node's address */
	DESTINATION_NATIVE,   /* never masqueraded: cluster CIDR, --non-masquerade-cidr */
};

enum destination_flags {
	DESTINATION_TO_STACK = 1,  /* the host's stack decides, whatever the kind */
	DESTINATION_PROTECTED = 2, /* nothing may go there in clear under the node's own address */
	DESTINATION_PART = 4,      /* a part of a wider entry, there for its flags alone */
};

/*
 * node and ifindex are the next hop and the uplink of a POD_CIDR; ifindex 0
 * says that the node is not on a link of ours, and the stack answers. mtu is
 * the uplink's, in bytes of IP packet. neighbour_checked is the programs' own:
 * when (CLOCK_MONOTONIC, ns) node was last seen to resolve; writers leave it 0.
 * uplinks has the bits (struct uplink) of those through which the host has a route
 * to a POD_CIDR, NODE or NATIVE: no packet from there arrives on another.
 */
struct destination {
	enum destination_kind kind;
	__u32 ifindex;
	struct addr node;
	__u32 mtu;
	__u32 flags; /* enum destination_flags */
	__u64 neighbour_checked;
	__u64 uplinks;
};
_Static_assert(sizeof(struct destination) == 48, "destination is part of the map layout");

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct destination_key);
	__type(value, struct destination);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} destinations SEC(".maps");

#endif
