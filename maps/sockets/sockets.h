/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * sockets: which Services a socket of the node's own processes talks to, and by which
 * backends. The programs write it, and forget a socket that is closed. Where too many are
 * open, the one that has not been used for the longest time makes room: its owner then sees
 * the backend's address, and a datagram may go to another.
 */
#ifndef EC_MAPS_SOCKETS_H
#define EC_MAPS_SOCKETS_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

/*
 * How many Services are known of one socket; of more, one of those that it has sent to makes
 * room. A resolver asks three servers.
 */
#define SOCKET_PEERS 4

struct socket_key {
	__u64 cookie; /* the kernel's, of the socket */
	__u32 number; /* of the Service: they have no gaps. 0: that of a connected socket, or the first one asked */
	__u32 pad;
};

struct socket_entry {
	struct addr frontend_address;
	struct addr backend_address;
	__be16 frontend_port;
	__be16 backend_port;
	__u8 proto;
	__u8 connected; /* 1: by connect, else by a datagram */
	__u16 pad;
	__u32 set;
	__u32 backend;
	__u32 generation; /* of the backend */
};

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct socket_key);
	__type(value, struct socket_entry);
	__uint(max_entries, 65536);
} sockets SEC(".maps");

#endif
