/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What every file needs: the kernel's types, libbpf's helpers, and the few kernel
 * constants that its exported headers lack.
 */
#ifndef EC_LIB_COMPILER_H
#define EC_LIB_COMPILER_H

#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/*
 * EC_INLINE is part of its caller. EC_CALL has a stack frame of its own and is
 * verified again at each call, with what is known of its arguments there. EC_GLOBAL is
 * verified once, without regard to its callers: for what is large or called from many
 * places, since a node verifies all programs whenever its agent starts. It takes the packet
 * and finds the rest in the scratch record, or takes pointers to records, which it must
 * compare with NULL, though they never are. Linux 6.1 takes no key of a map from there,
 * and before 6.1.100 no record with a byte that was not written, be it padding.
 */
#define EC_INLINE static __always_inline
#define EC_CALL static __noinline
#define EC_GLOBAL __noinline

#define NSEC_PER_SEC 1000000000ULL

/* include/linux/socket.h and include/uapi/linux/if_packet.h */
enum {
	EC_AF_INET = 2,
	EC_AF_INET6 = 10,
	EC_PACKET_HOST = 0,
	EC_PACKET_OTHERHOST = 3,
};

/* include/uapi/linux/pkt_cls.h; UNSPEC lets other programs and the stack go on. */
enum {
	EC_ACT_UNSPEC = -1,
	EC_ACT_SHOT = 2,
	EC_ACT_REDIRECT = 7,
};

/* include/uapi/linux/icmp.h, which also wants the C library's headers (RFC 792) */
enum {
	ICMP_ECHOREPLY = 0,
	ICMP_DEST_UNREACH = 3,
	ICMP_SOURCE_QUENCH = 4,
	ICMP_REDIRECT = 5,
	ICMP_ECHO = 8,
	ICMP_TIME_EXCEEDED = 11,
	ICMP_PARAMETERPROB = 12,
};

/* RFC 4443, RFC 4861, RFC 2710 and RFC 3810 */
enum {
	ICMPV6_UNREACHABLE = 1,
	ICMPV6_PACKET_TOO_BIG = 2,
	ICMPV6_TIME_EXCEEDED = 3,
	ICMPV6_PARAMETER_PROBLEM = 4,
	ICMPV6_ECHO = 128,
	ICMPV6_ECHOREPLY = 129,
	ICMPV6_MLD_QUERY = 130, /* to ICMPV6_REDIRECT, the link's own */
	ICMPV6_NEIGHBOUR_SOLICITATION = 135,
	ICMPV6_NEIGHBOUR_ADVERTISEMENT = 136,
	ICMPV6_REDIRECT = 137,
	ICMPV6_MLD2_REPORT = 143,
};

/* The header of ICMP and of ICMPv6. */
struct icmp_header {
	__u8 type;
	__u8 code;
	__be16 checksum;
	__be16 id; /* of an echo */
	__be16 rest;
};

/* errno values: nothing found; the map is full; the key is in the map already; a port nobody listens on */
enum {
	EC_ENOENT = 2,
	EC_E2BIG = 7,
	EC_EEXIST = 17,
	EC_ECONNREFUSED = 111,
};

#endif
