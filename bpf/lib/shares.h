/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * A table of slots that pods share. Each holder, a pod by its ifindex, has so many slots
 * of its own that no other needs all of them, and overwrites only its own records there.
 */
#ifndef EC_LIB_SHARES_H
#define EC_LIB_SHARES_H

#include "bpf/lib/compiler.h"

/* A stamp of a record: a program is writing it. 0: it was never used. */
#define SHARES_BUSY 1

/*
 * The number, below all, of one of the holder's slots, of which it has so many (each).
 * Each is found by a hash of its own, so two pods may share some, but not all of those
 * that one record can take.
 */
EC_INLINE __u32 shares_slot(__u32 holder, __u32 hash, __u32 each, __u32 all)
{
	__u64 own = ((__u64)holder * each + hash % each) * 0x9e3779b97f4a7c15ULL;

	own = (own ^ (own >> 32)) * 0xbf58476d1ce4e5b9ULL;
	own = (own ^ (own >> 29)) * 0x94d049bb133111ebULL;
	return (own >> 32) * all >> 32;
}

/* When a record was last used, as its writer says. */
EC_INLINE __u64 shares_stamp(const __u64 *last_seen)
{
	return *(const volatile __u64 *)last_seen;
}

/* Begins to write a record if its stamp is still the given one: of two CPUs only one does. */
EC_INLINE bool shares_begin(__u64 *last_seen, __u64 stamp)
{
	return __sync_val_compare_and_swap(last_seen, stamp, SHARES_BUSY) == stamp;
}

/* Ends writing a record, which has been used now. */
EC_INLINE void shares_end(__u64 *last_seen)
{
	__sync_lock_test_and_set(last_seen, bpf_ktime_get_coarse_ns());
}

#endif
