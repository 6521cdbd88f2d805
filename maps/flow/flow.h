/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What the entries of all flow tables say alike. */
#ifndef EC_MAPS_FLOW_H
#define EC_MAPS_FLOW_H

#include "maps/wire/wire.h"

/* What has passed in one direction of a flow. */
enum flow_state {
	FLOW_SYN = 1,     /* TCP SYN, with or without ACK */
	FLOW_ACK = 2,     /* TCP segment without SYN */
	FLOW_FIN = 4,     /* TCP FIN */
	FLOW_RESET = 8,   /* TCP RST inside the window, of either direction */
	FLOW_PACKET = 16, /* any packet */
};

enum flow_flags {
	FLOW_VIA_STACK = 1, /* both directions walk the host's stack */
	FLOW_HOST = 2,      /* a flow of the node itself that gave way to a pod's */
	FLOW_COUNTED = 4,   /* its port is counted in the map ports */
};

/*
 * A last_seen below FLOW_MARKS (2^29 ns) is no time but a mark: the entry is being
 * removed. No flow is older than half a second after the machine's start.
 */
enum flow_layout {
	FLOW_MARKS = 536870912,
};

#endif
