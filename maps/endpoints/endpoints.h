/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * endpoints: the pods of this node by address. The plugin writes an entry as
 * the last step of ADD and removes it as the first of DEL.
 */
#ifndef EC_MAPS_ENDPOINTS_H
#define EC_MAPS_ENDPOINTS_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

struct endpoint_key {
	struct addr address;
};

/*
 * ifindex, of the host-side veth, is also the endpoint's generation: the kernel does
 * not give an index to two devices during one boot, so flow entries with another one
 * belong to an earlier owner of the address.
 */
struct endpoint {
	__u32 ifindex;
	__u8 pod_mac[6]; /* in the order of an Ethernet header, with host_mac; zero: a bridge (see bridges) */
	__u8 host_mac[6];
};
_Static_assert(sizeof(struct endpoint) == 16, "endpoint is part of the map layout");

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct endpoint_key);
	__type(value, struct endpoint);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} endpoints SEC(".maps");

#endif
