/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What the entries of all flow tables share. */
#ifndef EC_MAPS_FLOW_H
#define EC_MAPS_FLOW_H

#include "maps/wire/wire.h"

/* What has passed in one direction of a flow. */
enum flow_state {
	FLOW_SYN = 1,     /* TCP SYN, with or without ACK */
	FLOW_ACK = 2,     /* TCP segment without SYN */
	FLOW_FIN = 4,     /* TCP FIN */
	FLOW_RESET = 8,   /* TCP RST inside the window, in either direction */
	FLOW_PACKET = 16, /* any packet */
	FLOW_STREAM = 32, /* UDP of a pair: answered a second or more after the first packet */
	FLOW_CLOSED = 64, /* TCP RST with exactly the next number: neither side knows the connection any more */
	FLOW_FIRST = 128, /* TCP FIN of a masqueraded flow that was sent before the other side's was acknowledged */
};

enum flow_flags {
	FLOW_VIA_STACK = 1, /* both directions walk the host's stack */
	FLOW_HOST = 2,      /* of the host's stack: off a pod's port, kept from a Service, or caught (outside.h) */
	FLOW_COUNTED = 4,   /* its port is counted in the map ports */
	FLOW_SERVICE = 8,   /* a flow to a Service, or beside one: the far side has an address of its own as well */
	FLOW_ON_NODE = 16,  /* its backend was on a node of the cluster when the flow began (enum backend_flags) */
	FLOW_DEAD = 32,     /* its backend is known to be gone: TCP is reset */
};

/*
 * A last_seen below FLOW_MARKS (2^29 ns) is not a time: it marks an entry that is being
 * removed. No flow is seen in the first half second after the machine has started.
 */
enum flow_layout {
	FLOW_MARKS = 536870912,
};

#endif
