/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * hostports: the host ports of this node's pods, by host address, port and protocol. The
 * plugin writes an entry during ADD and removes it during DEL.
 */
#ifndef EC_MAPS_HOSTPORTS_H
#define EC_MAPS_HOSTPORTS_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

/* The address :: or ::ffff:0.0.0.0 stands for all of the node's own addresses of that family. */
struct host_port_key {
	struct addr address;
	__be16 port;
	__u8 proto;
	__u8 pad;
};

/* ifindex is the generation of the pod (see endpoints): with another one the entry is of a pod that is gone. */
struct host_port {
	struct addr pod_address;
	__be16 pod_port;
	__u16 pad;
	__u32 ifindex;
};
_Static_assert(sizeof(struct host_port) == 24, "host_port is part of the map layout");

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct host_port_key);
	__type(value, struct host_port);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} hostports SEC(".maps");

#endif
