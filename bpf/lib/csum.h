/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The Internet checksum (RFC 1071): the complement of a ones' complement sum of
 * 16-bit words, in the byte order of the packet.
 */
#ifndef EC_LIB_CSUM_H
#define EC_LIB_CSUM_H

#include "bpf/lib/addr.h"

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

/* The same for an address; that of IPv4 grows as its 16 bytes do. At most 0xffff. */
EC_INLINE __u32 csum_growth_address(const struct addr *from, const struct addr *to)
{
	const __u32 *x = (const __u32 *)from->bytes, *y = (const __u32 *)to->bytes;
	__u64 sum = 0;

	for (int i = 0; i < 4; i++)
		sum += (__u64)(__u32)~x[i] + y[i];
	sum = (sum & 0xffffffff) + (sum >> 32);
	return csum_fold((sum & 0xffff) + (sum >> 16));
}

/* The new checksum when the sum grows by less than 2^31. */
EC_INLINE __be16 csum_grown(__be16 check, __u32 growth)
{
	return ~csum_fold((__u16)~check + growth);
}

#endif
