/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * devices: the pods of this node by the index of their host-side veth: which source
 * addresses the pod may use, and counters of what it sends and holds. The plugin writes
 * an entry during ADD; the programs add to its counters, atomically. Index 0 is no pod but
 * the world and the node itself, as the holder of their flows to Services, and of an
 * allowance of containers behind bridges; the agent makes that entry, and those of bridges
 * (see there), which have neither addresses nor a pod_mac.
 */
#ifndef EC_MAPS_DEVICES_H
#define EC_MAPS_DEVICES_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

struct device_key {
	__u32 ifindex;
};

/* What is never taken back, and spares lookups where there cannot be a flow. */
enum device_flags {
	DEVICE_CLIENT = 1,   /* the pod, or for index 0 the world, has opened a flow to a Service */
	DEVICE_ITSELF = 2,   /* or one of which it is the backend itself */
	DEVICE_BACKEND = 4,  /* the pod, or for index 0 the host's own stack, is backend of a flow from outside */
	DEVICE_ANY_PORT = 8, /* of index 0: a flow taken over from netfilter has a port beyond those to masquerade to */
};

struct device {
	struct addr addresses[FAMILIES]; /* zero: the pod has none of the family */
	__u8 pod_mac[6];                 /* in the order of an Ethernet header, with host_mac */
	__u8 host_mac[6];
	__u32 snat_flows;      /* counter: the pod's entries in snat */
	__u64 packets;         /* counter: what the pod has sent */
	__u64 bytes;           /* the same, in bytes of whole frames */
	__u32 conntrack_flows; /* counter: the pod's entries in conntrack */
	__u32 answers_until;   /* the programs': until when its answers are used up (CLOCK_MONOTONIC, 2^16 ns) */
	__u64 allowance_until; /* the same for neighbours to ask for, in ns */
	__u32 netns;           /* 1 more than the number of the pod's namespace in the host's; 0: it has none */
	__u32 flags;           /* enum device_flags, which the programs set */
};
_Static_assert(sizeof(struct device) == 88, "device is part of the map layout");

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct device_key);
	__type(value, struct device);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} devices SEC(".maps");

#endif
