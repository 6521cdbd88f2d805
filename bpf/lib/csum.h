/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The Internet checksum (RFC 1071): the complement of a ones' complement sum of
 * 16-bit words, in the byte order of the packet.
 */
#ifndef EC_LIB_CSUM_H
#define EC_LIB_CSUM_H

#include "bpf/lib/compiler.h"

EC_INLINE __u16 csum_fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

/* By how much the sum grows when a word that it covers changes (RFC 1624, equation 3). */
EC_INLINE __u32 csum_growth(__be16 from, __be16 to)
{
	return (__u16)~from + (__u32)to;
}

/* The same for an IPv4 address. */
EC_INLINE __u32 csum_growth_v4(__be32 from, __be32 to)
{
	return csum_growth(from & 0xffff, to & 0xffff) + csum_growth(from >> 16, to >> 16);
}

/* The new checksum when the sum grows by less than 2^31. */
EC_INLINE __be16 csum_grown(__be16 check, __u32 growth)
{
	return ~csum_fold((__u16)~check + growth);
}

#endif
