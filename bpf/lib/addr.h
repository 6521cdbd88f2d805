/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Addresses of either family, in 16 bytes, and tuples of them. */
#ifndef EC_LIB_ADDR_H
#define EC_LIB_ADDR_H

#include "bpf/lib/compiler.h"
#include "maps/wire/wire.h"

/* Whether an address is IPv4's; the zero address is of neither family. */
EC_INLINE bool addr_is_v4(const struct addr *a)
{
	const __u32 *w = (const __u32 *)a->bytes;

	return !(w[0] | w[1]) && w[2] == bpf_htonl(0x0000ffff);
}

/* The IPv4 address in an address of either family. */
EC_INLINE __be32 addr_v4(const struct addr *a)
{
	return *(const __be32 *)&a->bytes[12];
}

EC_INLINE void addr_set_v4(struct addr *a, __be32 v4)
{
	__u32 *w = (__u32 *)a->bytes;

	w[0] = 0;
	w[1] = 0;
	w[2] = bpf_htonl(0x0000ffff);
	w[3] = v4;
}

/* The address of the same family that is all zero, which stands for any. */
EC_INLINE struct addr addr_any_like(const struct addr *a)
{
	struct addr any = {};

	if (addr_is_v4(a))
		addr_set_v4(&any, 0);
	return any;
}

EC_INLINE bool addr_equal(const struct addr *a, const struct addr *b)
{
	const __u32 *x = (const __u32 *)a->bytes, *y = (const __u32 *)b->bytes;

	return x[3] == y[3] && x[2] == y[2] && x[1] == y[1] && x[0] == y[0];
}

EC_INLINE bool addr_is_zero(const struct addr *a)
{
	const __u32 *w = (const __u32 *)a->bytes;

	return !(w[0] | w[1] | w[2] | w[3]);
}

EC_INLINE struct tuple tuple_reversed(const struct tuple *t)
{
	struct tuple r = {
		.src = t->dst,
		.dst = t->src,
		.sport = t->dport,
		.dport = t->sport,
		.proto = t->proto,
	};

	return r;
}

#endif
