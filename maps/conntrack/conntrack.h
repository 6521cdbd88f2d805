/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * conntrack: flows that the world opened towards a pod, whose replies must leave with
 * the pod's own address. The key is the tuple of the replies. The programs write it,
 * ec_collect removes entries.
 */
#ifndef EC_MAPS_CONNTRACK_H
#define EC_MAPS_CONNTRACK_H

#include "maps/flow/flow.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

struct conntrack_entry {
	__u32 ifindex; /* the pod's generation (see endpoints) */
	__u8 from_pod; /* enum flow_state of each direction */
	__u8 from_world;
	__u8 flags; /* enum flow_flags */
	__u8 pad;
	__u32 pod_seq_end; /* highest TCP numbers sent in each direction, host order */
	__u32 pod_ack;
	__u32 world_seq_end;
	__u32 world_ack;
	__u64 last_seen; /* as in snat_entry */
};
_Static_assert(sizeof(struct conntrack_entry) == 32, "conntrack_entry is part of the map layout");

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct tuple);
	__type(value, struct conntrack_entry);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} conntrack SEC(".maps");

#endif
