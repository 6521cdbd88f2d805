/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * How many ports towards each destination are taken, in all and by each holder, a pod or
 * the world (flow.h): it may take one only while it has fewer than are free.
 */
#ifndef EC_LIB_PORTS_H
#define EC_LIB_PORTS_H

#include "bpf/lib/flow.h"

/*
 * The cell for a holder, or with 0 for all, and the destination of a pair; key is that of
 * its reverse half.
 */
EC_INLINE __u32 ports_cell(const struct tuple *reverse_key, __u32 holder)
{
	const __u32 *src = (const __u32 *)&reverse_key->src, *dst = (const __u32 *)&reverse_key->dst;
	__u64 hash = ((__u32)reverse_key->dport << 8 | reverse_key->proto) * 0x9e3779b97f4a7c15ULL;

	/* Odd constants: each bit of the key reaches the uppermost bits of the sum. */
	hash += src[3] * 0xbf58476d1ce4e5b9ULL + src[1] * 0xd6e8feb86659fd93ULL;
	hash += dst[0] * 0x94d049bb133111ebULL + dst[1] * 0xff51afd7ed558ccdULL;
	hash += dst[2] * 0xc4ceb9fe1a85ec53ULL + dst[3] * 0xa0761d6478bd642fULL;
	hash += holder * 0xe7037ed1a0b428dbULL;
	hash ^= hash >> 32;
	return (hash * 0x9e3779b97f4a7c15ULL) >> (64 - PORTS_BITS);
}

/* The count in the cell. */
EC_INLINE __u32 *ports_counted(const struct tuple *reverse_key, __u32 holder)
{
	__u32 cell = ports_cell(reverse_key, holder);

	return bpf_map_lookup_elem(&ports, &cell);
}

EC_INLINE __u32 ports_range(void)
{
	return cfg.snat_port_high - cfg.snat_port_low + 1;
}

EC_INLINE void ports_count(__u32 *total, __u32 *own)
{
	__sync_fetch_and_add(total, 1);
	if (own != total)
		__sync_fetch_and_add(own, 1);
}

/*
 * Counts a port for a new pair, before it is taken. force: even beyond the share.
 */
EC_CALL enum verdict ports_reserve(const struct tuple *reverse_key, __u32 holder, bool force)
{
	__u32 *total = ports_counted(reverse_key, 0), *own = ports_counted(reverse_key, holder);
	__u32 held, range = ports_range();

	if (!total || !own)
		return VERDICT_GO_ON;
	held = *total;
	if (held >= range && !force)
		return -DROP_SNAT_EXHAUSTED;
	if (holder && *own >= range - held && !force)
		return -DROP_PORT_LIMIT;
	ports_count(total, own);
	return VERDICT_GO_ON;
}

EC_INLINE void ports_less(__u32 *count)
{
	if (count && !__sync_fetch_and_add(count, -1))
		__sync_fetch_and_add(count, 1);
}

/* Takes a pair's port off the counts, which never go below 0. */
EC_INLINE void ports_release(const struct tuple *reverse_key, __u32 holder)
{
	ports_less(ports_counted(reverse_key, 0));
	if (holder)
		ports_less(ports_counted(reverse_key, holder));
}

#endif
