/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * snat and snat_reverse: the two halves of a masqueraded flow. Both keys are
 * tuples of packets on their way out: in snat as the pod sends them, in
 * snat_reverse as the world sees them. The programs write both, reverse first;
 * ec_collect removes both together.
 */
#ifndef EC_MAPS_SNAT_H
#define EC_MAPS_SNAT_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

/* What has passed in this half's direction: snat outwards, snat_reverse inwards. */
enum flow_state {
	FLOW_SYN = 1,     /* TCP SYN, with or without ACK */
	FLOW_ACK = 2,     /* TCP segment without SYN */
	FLOW_FIN = 4,     /* TCP FIN */
	FLOW_RESET = 8,   /* TCP RST inside the window, of either direction */
	FLOW_PACKET = 16, /* any packet */
};

enum snat_flags {
	SNAT_VIA_STACK = 1, /* both directions walk the host's stack */
	SNAT_HOST = 2,      /* a flow of the node itself that gave way to a pod's */
	SNAT_COUNTED = 4,   /* its port is counted in the map ports */
};

/*
 * to_address and to_port are what the pod's side becomes: in snat the node's
 * address and port, in snat_reverse the pod's. ifindex is the pod's generation
 * (see endpoints), 0 for a flow of the node. seq_end and ack are the highest
 * that passed in this direction, in host order. last_seen is CLOCK_MONOTONIC in
 * ns, renewed at most once a second; 0 marks an entry that is being removed, and
 * less than 2^29 the second in which such an entry was met.
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
#endif
