/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * snat and snat_reverse: the two halves of a masqueraded flow. Both keys are
 * tuples of packets on their way out: in snat as the pod sends them, in
 * snat_reverse as the world sees them. The programs write both, reverse first;
 * ec_collect removes both together.
 */
#ifndef EC_MAPS_SNAT_H
#define EC_MAPS_SNAT_H

#include "maps/flow/flow.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

/*
 * to_address and to_port are what the pod's side becomes: in snat the node's
 * address and port, in snat_reverse the pod's. state is the flow_state of this
 * half's direction, snat outwards, snat_reverse inwards; flags are flow_flags.
 * ifindex is the pod's generation (see endpoints), 0 for a flow of the node.
 * seq_end and ack are the highest that passed in this direction, in host order.
 * last_seen is CLOCK_MONOTONIC in ns, renewed at most once a second; 0 marks an
 * entry that is being removed, and less than 2^29 the second in which such an
 * entry was met.
 */
struct snat_entry {
	struct addr to_address;
	__be16 to_port;
	__u8 state;
	__u8 flags;
	__u32 ifindex;
	__u32 seq_end;
	__u32 ack;
	__u64 last_seen;
};
_Static_assert(sizeof(struct snat_entry) == 40, "snat_entry is part of the map layout");

#pragma clang diagnostic pop

/* Preallocated, so that a burst of new flows cannot fail for want of memory. */
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
