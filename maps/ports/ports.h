/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * ports: how many ports the pairs in snat use towards each destination, in total, for each
 * pod, for all clients outside and for each of them; and how many pairs each client outside has. The programs add, they
 * and ec_collect subtract. A cell is found by a hash: where two share one its count is too high, so the programs look
 * at the ports themselves before they refuse a flow.
 *
 * given_ports: which ports of the node masqueraded flows have ever got. The programs set bits, which stay until boot.
 * Packets to and from other ports of the node need no look into the tables of flows, however many ports there are to
 * masquerade to.
 */
#ifndef EC_MAPS_PORTS_H
#define EC_MAPS_PORTS_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

enum ports_layout {
	PORTS_BITS = 17,       /* the key of ports is so many upper bits of the hash */
	PORTS_GIVEN_BITS = 64, /* the key of given_ports is a port in host order, divided by this */
};

struct port_count {
	__u32 flows;
};

/* A bit for each of PORTS_GIVEN_BITS ports, the lowest port first. */
struct given_ports {
	__u64 tcp;
	__u64 udp;
	__u64 others; /* identifiers of ICMP echo among them */
};

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct port_count);
	__uint(max_entries, 1 << PORTS_BITS);
} ports SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct given_ports);
	__uint(max_entries, (1 << 16) / PORTS_GIVEN_BITS);
} given_ports SEC(".maps");

#endif
