/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * snat and snat_reverse: the forward and the reverse half of a masqueraded flow, or of one
 * to a Service, together a pair. Both keys are tuples of packets on their way out: in snat
 * as the pod or client sends them, in snat_reverse as the world or backend sees them. The
 * programs write both, reverse first; ec_collect removes both together.
 */
#ifndef EC_MAPS_SNAT_H
#define EC_MAPS_SNAT_H

#include "maps/flow/flow.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

/* The direction of a half is outwards in snat, inwards in snat_reverse. */
struct snat_entry {
	struct addr to_address; /* what the pod's side becomes: the node's in snat, the pod's in snat_reverse */
	__be16 to_port;
	__u8 state;    /* enum flow_state of this direction */
	__u8 flags;    /* enum flow_flags, written when the flow opens; VIA_STACK may be set later */
	__u32 ifindex; /* the pod's generation (see endpoints), 0 for a flow of the node, or of the world's */
	/* Highest TCP numbers sent in this direction, host order; of UDP in snat the last packet's time. */
	__u32 seq_end;
	__u32 ack;
	/*
	 * CLOCK_MONOTONIC in ns, renewed at most once a second. Below FLOW_MARKS the entry is
	 * being removed: 0, or the second in which a program first met it so.
	 */
	__u64 last_seen;
	/* Of FLOW_SERVICE, what the far side becomes: the backend's in snat, the Service's in snat_reverse. */
	struct addr far_address;
	__u32 set; /* the Service's port (maps/services); 0: a flow past the Service, straight to a backend */
	__u32 backend;
	__u32 generation; /* the backend's when the flow began */
	__be16 far_port;
	__u16 pad[3];
	__u32 pod; /* the generation (see endpoints) of a backend that is a pod of this node; 0: not known, or none */
};
_Static_assert(sizeof(struct snat_entry) == 80, "snat_entry is part of the map layout");

#pragma clang diagnostic pop

/* Preallocated, so that a burst of new flows cannot fail for lack of memory. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct tuple);
	__type(value, struct snat_entry);
	__uint(max_entries, 262144);
} snat SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct tuple);
	__type(value, struct snat_entry);
	__uint(max_entries, 262144);
} snat_reverse SEC(".maps");

#endif
