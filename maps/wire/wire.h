/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Types that all maps share. Fields in network byte order have a type that says so
 * (__be16, __be32); all others are in host order. The key of an array is a plain
 * integer, since the kernel accepts no other BTF for it.
 */
#ifndef EC_MAPS_WIRE_H
#define EC_MAPS_WIRE_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

enum wire_layout {
	LAYOUT_VERSION = 3,  /* of all maps together; maps/config carries it to the node */
	DIRECTION_SLOTS = 8, /* how many directions drops and traffic have room for */
};

/* The index of what exists once for each family. Append only. */
enum family {
	FAMILY_IPV4,
	FAMILY_IPV6,
	FAMILIES,
};

/* An address of either family, IPv4 as ::ffff:a.b.c.d (RFC 4291, 2.5.5.2). */
struct addr {
	__u8 bytes[16];
} __attribute__((aligned(4)));

/*
 * One direction of a flow. An ICMP echo identifier is in sport of a request and in dport
 * of a reply, so that swapping the ends turns one into the other.
 */
struct tuple {
	struct addr src;
	struct addr dst;
	__be16 sport;
	__be16 dport;
	__u8 proto;
	__u8 pad[3];
};
_Static_assert(sizeof(struct tuple) == 40, "tuple is part of the map layout");

/*
 * Where a packet was seen: one value per program on interfaces, and one for the node's own sockets. Append only, up to
 * DIRECTION_SLOTS.
 */
enum direction {
	DIRECTION_FROM_POD,
	DIRECTION_FROM_UPLINK,
	DIRECTION_TO_UPLINK,
	DIRECTION_FROM_TUNNEL,
	DIRECTION_TO_TUNNEL,
	DIRECTION_TO_POD,
	DIRECTION_SOCKET, /* of a process of the node, before there is a packet */
	DIRECTIONS,
};
_Static_assert((int)DIRECTIONS <= DIRECTION_SLOTS, "drops and traffic have no room for another direction");

#pragma clang diagnostic pop
#endif
