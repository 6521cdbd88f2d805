/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * bridges: the parts of this node's podCIDRs that are behind bridges of somebody else's
 * (--attach-bridge), and in them the addresses of the host itself, by longest prefix. The
 * agent writes it.
 */
#ifndef EC_MAPS_BRIDGES_H
#define EC_MAPS_BRIDGES_H

#include "maps/endpoints/endpoints.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

/* prefix_len counts bits of the 16-byte address: an IPv4 /24 is 120. */
struct bridge_key {
	__u32 prefix_len;
	struct addr prefix;
};

#pragma clang diagnostic pop

/*
 * All containers behind a bridge are one endpoint, whose generation is the index of the
 * bridge; 0: the address is the host's own. Its pod_mac is zero: the kernel's neighbours
 * and the bridge find out which container it is.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct bridge_key);
	__type(value, struct endpoint);
	__uint(max_entries, 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} bridges SEC(".maps");

#endif
