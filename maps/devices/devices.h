/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * devices: the pods of this node by the index of their host-side veth. Says
 * which source addresses the pod may use, and counts what it sends and holds.
 */
#ifndef EC_MAPS_DEVICES_H
#define EC_MAPS_DEVICES_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

struct device_key {
	__u32 ifindex;
};

/*
 * An address that the pod does not have is all zero. snat_flows and
 * conntrack_flows are the pod's live entries in those tables; packets and bytes
 * (of whole frames) are what it sent. The programs count, atomically. reset_at is
 * theirs too: how far the pod's share of RSTs is used up (CLOCK_MONOTONIC, ns).
 */
struct device {
	struct addr ipv4;
	struct addr ipv6;
	__u8 pod_mac[6];
	__u8 host_mac[6];
	__u32 snat_flows;
	__u64 packets;
	__u64 bytes;
	__u32 conntrack_flows;
	__u32 pad;
	__u64 reset_at;
};
_Static_assert(sizeof(struct device) == 80, "device is part of the map layout");

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct device_key);
	__type(value, struct device);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} devices SEC(".maps");

#endif
