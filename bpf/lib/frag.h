/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The ports of fragmented datagrams, which only the first fragment carries. Each holder
 * (a pod by its ifindex, or one of enum fragments_holder) has slots of its own in the
 * map, and overwrites only records of its own, the oldest first.
 */
#ifndef EC_LIB_FRAG_H
#define EC_LIB_FRAG_H

#include "bpf/lib/addr.h"
#include "bpf/lib/maps.h"
#include "bpf/lib/shares.h"

/* The kernel gives up reassembling a datagram after the same time. */
#define FRAGMENT_LIFETIME (30 * NSEC_PER_SEC)

enum {
	/* How many of its holder's slots a datagram can take. */
	FRAGMENT_WAYS = 4,
};

/* The protocol, if it tells a datagram from others: of IPv6 a later fragment may name any (RFC 8200, section 4.5). */
EC_INLINE __u8 frag_proto(const struct tuple *t)
{
	return addr_is_v4(&t->src) ? t->proto : 0;
}

EC_INLINE __u32 frag_hash(const struct tuple *t, __u32 id)
{
	const __u32 *src = (const __u32 *)&t->src, *dst = (const __u32 *)&t->dst;
	__u64 hash = ((__u64)id << 8 | frag_proto(t)) * 0x9e3779b97f4a7c15ULL;

	hash += src[3] * 0xbf58476d1ce4e5b9ULL + dst[3] * 0x94d049bb133111ebULL;
	return hash >> 32;
}

/* One of the holder's slots. */
EC_INLINE struct fragment *frag_slot(__u32 holder, __u32 hash)
{
	__u32 slot = hash % FRAGMENTS_OF_WORLD;

	if (holder != FRAGMENTS_WORLD)
		slot = FRAGMENTS_OF_WORLD + shares_slot(holder, hash, FRAGMENTS_EACH, FRAGMENTS_OF_OTHERS);
	return bpf_map_lookup_elem(&fragments, &slot);
}

EC_INLINE bool frag_is_live(__u64 stamp, __u64 now)
{
	return stamp && stamp + FRAGMENT_LIFETIME > now;
}

EC_INLINE bool frag_is(const struct fragment *f, const struct tuple *t, __u32 id, __u32 holder)
{
	return f->id == id && f->ifindex == holder && (f->proto == t->proto || !addr_is_v4(&t->src)) &&
	       addr_equal(&f->src, &t->src) && addr_equal(&f->dst, &t->dst);
}

/* Writes a record if its stamp is still the given one: of two CPUs only one does. */
EC_INLINE void frag_write(struct fragment *f, __u64 stamp, const struct tuple *t, __u32 id, __u32 holder)
{
	if (!shares_begin(&f->last_seen, stamp))
		return;
	f->src = t->src;
	f->dst = t->dst;
	f->id = id;
	f->proto = t->proto;
	f->sport = t->sport;
	f->dport = t->dport;
	f->ifindex = holder;
	shares_end(&f->last_seen);
}

/* Remembers a first fragment's ports, under its tuple as the packet arrived. */
EC_GLOBAL int frag_remember(const struct tuple *t, __u32 id, __u32 holder)
{
	__u64 stamp, oldest = ~0ULL, now = bpf_ktime_get_coarse_ns();
	struct fragment *f, *chosen = NULL;
	__u32 hash;
	bool known;

	if (!t)
		return 0;
	hash = frag_hash(t, id);
	for (int i = 0; i < FRAGMENT_WAYS; i++) {
		f = frag_slot(holder, hash + i);
		if (!f)
			return 0;
		stamp = shares_stamp(&f->last_seen);
		if (stamp == SHARES_BUSY || (f->ifindex != holder && frag_is_live(stamp, now)))
			continue;
		known = frag_is(f, t, id, holder);
		if (known || stamp < oldest) {
			chosen = f;
			oldest = stamp;
		}
		if (known)
			break;
	}
	if (chosen)
		frag_write(chosen, oldest, t, id, holder);
	return 0;
}

/* Gives a later fragment the protocol and the ports of the first; false: the first was not seen, or is forgotten. */
EC_GLOBAL bool frag_recall(struct tuple *t, __u32 id, __u32 holder)
{
	__u64 stamp, now = bpf_ktime_get_coarse_ns();
	struct fragment *f;
	__u32 hash;

	if (!t)
		return false;
	hash = frag_hash(t, id);
	for (int i = 0; i < FRAGMENT_WAYS; i++) {
		f = frag_slot(holder, hash + i);
		if (!f)
			return false;
		stamp = shares_stamp(&f->last_seen);
		barrier();
		if (stamp == SHARES_BUSY || !frag_is_live(stamp, now) || !frag_is(f, t, id, holder))
			continue;
		t->proto = f->proto;
		t->sport = f->sport;
		t->dport = f->dport;
		barrier();
		if (shares_stamp(&f->last_seen) != stamp)
			return false; /* another CPU has begun to write it */
		return true;
	}
	return false;
}

#endif
