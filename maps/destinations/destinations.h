/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * destinations: what an address is and how to reach it, by longest prefix. An address
 * without an entry is the world. The agent writes it; the plugin writes the LOCAL
 * entries of pods outside the podCIDR.
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
	DESTINATION_WORLD,    /* outside the cluster: the same as no entry */
	DESTINATION_HOST,     /* an address of this node: to the stack */
	DESTINATION_LOCAL,    /* this node's podCIDR, or a pod of this node outside it */
	DESTINATION_POD_CIDR, /* another node's podCIDR */
	DESTINATION_NODE,     /* another node's address */
	DESTINATION_NATIVE,   /* never masqueraded: cluster CIDR, --non-masquerade-cidr */
	DESTINATION_SERVICE,  /* a range of Services' addresses: what is there and no frontend is nobody */
};

enum destination_flags {
	DESTINATION_TO_STACK = 1,  /* the host's stack decides, whatever the kind */
	DESTINATION_PROTECTED = 2, /* masqueraded packets are dropped: they would leave unencrypted */
	DESTINATION_PART = 4,      /* a part of a wider entry, of which only the flags differ */
	DESTINATION_BY_TUNNEL = 8, /* packets to a POD_CIDR or NODE go through the tunnel */
};

struct destination {
	enum destination_kind kind;
	/*
	 * Uplink to a POD_CIDR; 0 behind the tunnel, or if no way leads there and the stack answers. Of a HOST: the
	 * uplink that has the address; 0: another link has it, or several.
	 */
	__u32 ifindex;
	/* InternalIP of the node that a POD_CIDR or NODE belongs to: next hop, or far end of the tunnel. Never zero. */
	struct addr node;
	__u32 mtu;   /* in bytes of IP packet: the uplink's, less what the tunnel adds */
	__u32 flags; /* enum destination_flags */
	/*
	 * When node was last seen to resolve, or learnt_mtu was asked for (CLOCK_MONOTONIC, ns). Only the programs
	 * write it, the agent 0.
	 */
	__u64 neighbour_checked;
	/* Bits (struct uplink) of the uplinks through which the host has a route to a POD_CIDR, NODE or NATIVE. */
	__u64 uplinks;
	/* Inner Ethernet address behind the tunnel; zero: the node takes any. */
	__u8 mac[6];
	/*
	 * What the kernel has learnt that the way to the tunnel's far end carries, in bytes of inner IP packet; 0: no
	 * less than mtu. Only the programs write it, with neighbour_checked, the agent 0.
	 */
	__u16 learnt_mtu;
	/* The node's InternalIP of the other family, from which its tunnel may send as well; zero: it has none. */
	struct addr alias;
};
_Static_assert(sizeof(struct destination) == 72, "destination is part of the map layout");

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct destination_key);
	__type(value, struct destination);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} destinations SEC(".maps");

#endif
