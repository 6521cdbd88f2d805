/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * sockets: which Service a socket of the node's own processes talks to, and by which
 * backend. The programs write it. A socket that has not been used for the longest time
 * makes room: its owner then sees the backend's address, and a datagram may go to another.
 */
#ifndef EC_MAPS_SOCKETS_H
#define EC_MAPS_SOCKETS_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

/* Which of the two addresses is the key's. The value has the other one. */
enum socket_end {
	SOCKET_BACKEND,  /* the kernel's peer of the socket, or the sender of a datagram */
	SOCKET_FRONTEND, /* where an unconnected socket has sent a datagram */
};

struct socket_key {
	__u64 cookie; /* the kernel's, of the socket */
	struct addr address;
	__be16 port;
	__u8 proto;
	__u8 end; /* enum socket_end */
	__u32 pad;
};

struct socket_entry {
	struct addr other_address;
	__be16 other_port;
	__u16 connected; /* 1: by connect, else by a datagram */
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
