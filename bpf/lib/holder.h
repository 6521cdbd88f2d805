/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * In whose share a flow is, and how large that is: of the tables' entries, and of the ports
 * towards each destination.
 *
 * A pod may have one more while it has fewer than are free: so one pod never has more than
 * half, two not more than two thirds, and there is always one for a pod with few. Of the ports it may have one more
 * while it has fewer than twice as many as are free, since a pod mostly talks to few places (ports_may).
 *
 * The world, which is all clients outside that ask Services, leaves an eighth to pods of
 * what they do not have. Of what is then left to it, a client may have one more while it has fewer
 * than twice that: alone it has two thirds at most, and leaves room for many others.
 *
 * Under pressure flows end earlier: all, while pods and the node have more than seven tenths of what
 * the world does not have; the world's alone, while it has more than that of what it may have, which
 * no client has. So what floods in from outside does not shorten the lives of pods' flows.
 */
#ifndef EC_LIB_HOLDER_H
#define EC_LIB_HOLDER_H

#include "bpf/lib/compiler.h"
#include "maps/flow/flow.h"

/* The number of all of the world and, with more bits, of a client. A pod's is its ifindex, which is less. */
#define HOLDER_WORLD (1U << 31)

/* Whether a pair is a client's outside, by the ifindex and flags of either half. */
EC_INLINE bool holder_is_outside(__u32 ifindex, __u32 flags)
{
	return !ifindex && (flags & FLOW_SERVICE);
}

/* The number of a pair's holder. 0: what the node sends for itself is in nobody's share. Of IPv6 a client has a /64. */
EC_INLINE __u32 holder_of(__u32 ifindex, __u32 flags, const struct addr *client)
{
	const __u32 *words = (const __u32 *)client;
	__u64 who = words[0] | words[1] ? (__u64)words[0] << 32 | words[1] : words[3];

	if (!holder_is_outside(ifindex, flags))
		return ifindex;
	return HOLDER_WORLD | 1 | who * 0x9e3779b97f4a7c15ULL >> 32;
}

/* The counts of what a holder has; NULL: nobody counts that. */
struct holding {
	__u32 *own;
	__u32 *world; /* of a client outside, all that the world has */
};

/* How many are left to the world, which has so many. */
EC_INLINE __u64 holder_left_to_world(__u64 free, __u64 world)
{
	__u64 pods = (free + world) / 8;

	return free > pods ? free - pods : 0;
}

/* Whether who has so many, and could have so many at most, is under pressure. */
EC_INLINE bool holder_pressed(__u64 has, __u64 most)
{
	return has * 10 > most * 7;
}

/* Whether the holder may have one more. */
EC_INLINE bool holder_may(const struct holding *h, __u64 free)
{
	if (!h->own)
		return true;
	return h->world ? *h->own < 2 * holder_left_to_world(free, *h->world) : *h->own < free;
}

EC_INLINE void holder_more(const struct holding *h)
{
	if (h->own)
		__sync_fetch_and_add(h->own, 1);
	if (h->world)
		__sync_fetch_and_add(h->world, 1);
}

/* Counts one less. A count that was lost and restarted stays at 0: if it wrapped around, everything would be refused.
 */
EC_INLINE void holder_count_less(__u32 *count)
{
	if (count && !__sync_fetch_and_add(count, -1))
		__sync_fetch_and_add(count, 1);
}

EC_INLINE void holder_less(const struct holding *h)
{
	holder_count_less(h->own);
	holder_count_less(h->world);
}

#endif
