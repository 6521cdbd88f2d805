/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * How many ports towards each destination are taken, in all and by each holder (holder.h), and
 * how many pairs each holder has.
 */
#ifndef EC_LIB_PORTS_H
#define EC_LIB_PORTS_H

#include "bpf/lib/flow.h"

/* The part of a cell's hash that is the destination's; the key is that of a pair's reverse half. */
EC_INLINE __u64 ports_destination(const struct tuple *reverse_key)
{
	const __u32 *src = (const __u32 *)&reverse_key->src, *dst = (const __u32 *)&reverse_key->dst;
	__u64 hash = ((__u32)reverse_key->dport << 8 | reverse_key->proto) * 0x9e3779b97f4a7c15ULL;

	/* Odd constants: each bit of the key reaches the uppermost bits of the sum. */
	hash += src[3] * 0xbf58476d1ce4e5b9ULL + src[1] * 0xd6e8feb86659fd93ULL;
	hash += dst[0] * 0x94d049bb133111ebULL + dst[1] * 0xff51afd7ed558ccdULL;
	return hash + dst[2] * 0xc4ceb9fe1a85ec53ULL + dst[3] * 0xa0761d6478bd642fULL;
}

/* In place of a destination: all pairs. */
#define PORTS_PAIRS 0

/* The cell for a holder, or with 0 for all, and a destination. */
EC_INLINE __u32 ports_cell(__u64 destination, __u32 holder)
{
	__u64 hash = destination + holder * 0xe7037ed1a0b428dbULL;

	hash ^= hash >> 32;
	return (hash * 0x9e3779b97f4a7c15ULL) >> (64 - PORTS_BITS);
}

/* The count in the cell. */
EC_INLINE __u32 *ports_counted(__u64 destination, __u32 holder)
{
	__u32 cell = ports_cell(destination, holder);

	return bpf_map_lookup_elem(&ports, &cell);
}

/* What a holder has of the ports towards a destination. */
EC_INLINE struct holding ports_held(__u64 destination, __u32 holder)
{
	return (struct holding){
		.own = holder ? ports_counted(destination, holder) : NULL,
		.world = holder >= HOLDER_WORLD ? ports_counted(destination, HOLDER_WORLD) : NULL,
	};
}

/* What a holder has of all pairs. */
EC_INLINE struct holding ports_pairs(__u32 holder)
{
	struct device *dev = holder ? flow_owner(holder >= HOLDER_WORLD ? 0 : holder) : NULL;
	struct holding h = {};

	if (dev)
		h.own = &dev->snat_flows;
	if (dev && (holder >= HOLDER_WORLD)) {
		h.world = h.own;
		h.own = ports_counted(PORTS_PAIRS, holder);
	}
	return h;
}

/* How many ports there are to masquerade to. */
EC_INLINE __u32 ports_total(void)
{
	__u32 total = 0;

#pragma unroll
	for (int i = 0; i < SNAT_PORT_RANGES; i++)
		total += cfg.snat_ports[i].count;
	return total;
}

/* The bits of the port and its neighbours. A listener keeps its port from flows of its own protocol alone. */
EC_INLINE __u64 *ports_given(__u8 proto, __u32 port)
{
	__u32 word = port / PORTS_GIVEN_BITS;
	struct given_ports *given = bpf_map_lookup_elem(&given_ports, &word);

	if (!given)
		return NULL;
	if (proto == IPPROTO_TCP)
		return &given->tcp;
	return proto == IPPROTO_UDP ? &given->udp : &given->others;
}

/* Whether a flow has ever got the port. */
EC_INLINE bool ports_was_given(__u8 proto, __be16 port)
{
	__u32 p = bpf_ntohs(port);
	const __u64 *bits = ports_given(proto, p);

	return bits && (*bits >> (p % PORTS_GIVEN_BITS) & 1);
}

/* Notes that a flow gets the port. */
EC_INLINE void ports_give(__u8 proto, __be16 port)
{
	__u32 p = bpf_ntohs(port);
	__u64 *bits = ports_given(proto, p);
	__u64 bit = 1ULL << (p % PORTS_GIVEN_BITS);

	if (bits && !(*bits & bit))
		__sync_fetch_and_or(bits, bit);
}

/*
 * Whether the holder may have one more, while so many are free. A pod may while it has fewer than twice that, like a
 * client outside: alone it has two thirds at most.
 */
EC_INLINE bool ports_may(const struct holding *held, __u64 free)
{
	return holder_may(held, held->world ? free : 2 * free);
}

/*
 * Counts a port for a new pair, before it is taken. force: even beyond the share.
 */
EC_GLOBAL enum verdict ports_reserve(const struct tuple *reverse_key, __u32 holder, bool force)
{
	__u32 *taken, total = ports_total();
	struct holding held;
	__u64 destination;

	if (!reverse_key)
		return -DROP_INVALID;
	destination = ports_destination(reverse_key);
	held = ports_held(destination, holder);
	taken = ports_counted(destination, 0);
	if (!taken)
		return VERDICT_GO_ON;
	if (!total || (!force && *taken >= total))
		return -DROP_SNAT_EXHAUSTED;
	if (!force && !ports_may(&held, total - *taken))
		return -DROP_PORT_LIMIT;
	__sync_fetch_and_add(taken, 1);
	holder_more(&held);
	return VERDICT_GO_ON;
}

/* Takes a pair's port off the counts. */
EC_INLINE void ports_release(const struct tuple *reverse_key, __u32 holder)
{
	__u64 destination = ports_destination(reverse_key);
	struct holding held = ports_held(destination, holder);

	holder_count_less(ports_counted(destination, 0));
	holder_less(&held);
}

#endif
