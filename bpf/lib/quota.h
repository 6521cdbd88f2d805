/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Each holder's share of the ports towards one destination. The counts (ports.h) may be
 * too high, so before a flow is refused some of the ports themselves are looked at.
 */
#ifndef EC_LIB_QUOTA_H
#define EC_LIB_QUOTA_H

#include "bpf/lib/room.h"

/* How many random ports are looked at when the counts say that none may be taken. */
#define QUOTA_SAMPLES 128

/* What the ports that were looked at are. */
struct quota_sample {
	struct scratch *scratch;
	__u32 own; /* the owner's */
	__u32 free;
};

static long quota_sample_step(__u32 i, struct quota_sample *s)
{
	struct scratch *scratch = s->scratch;
	struct snat_entry *there;

	scratch->key.sport = bpf_htons(nat_random_port());
	there = bpf_map_lookup_elem(&snat_reverse, &scratch->key);
	if (!there || room_reclaim_port(there))
		s->free++;
	else if (there->ifindex == scratch->owner.ifindex)
		s->own++;
	return 0;
}

/* Instead of a cell: the world has used up its share of the table of pairs. */
#define QUOTA_WORLD (1U << PORTS_BITS)

/* The last refusal that a look at the ports, or the table, has confirmed. */
struct quota_refusal {
	__u32 cell; /* the holder's (ports.h), that of all where nobody finds a port, or QUOTA_WORLD */
	__u32 pad;
	__u64 at; /* CLOCK_MONOTONIC, ns */
};

#define QUOTA_REFUSALS 256

/*
 * Kept like paths, and as long, since looking at the ports takes as much time as a
 * hundred packets. Not pinned: the programs of each load have their own.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct quota_refusal);
	__uint(max_entries, QUOTA_REFUSALS);
} refusals SEC(".maps");

/* Whose share the flow to open is in. */
EC_INLINE __u32 quota_holder(const struct scratch *s)
{
	return flow_holder(s->owner.ifindex, s->owner.flags);
}

/* Whether a refusal has just been confirmed; confirmed notes that it has. */
EC_CALL bool quota_refused(__u32 cell, bool confirmed)
{
	__u32 slot = cell % QUOTA_REFUSALS;
	struct quota_refusal *last = bpf_map_lookup_elem(&refusals, &slot);
	__u64 now = bpf_ktime_get_coarse_ns();

	if (last && confirmed) {
		last->cell = cell;
		last->at = now;
	}
	return last && last->cell == cell && now - last->at < cfg.path_lifetime;
}

/*
 * The counts say that the owner may take no port towards this destination. So some of
 * its ports are looked at: flows that have ended there are removed, and if fewer than
 * half as many belong to the owner as are free, the counts are too high and the flow is
 * opened. Otherwise it is refused.
 */
EC_INLINE enum verdict quota_verify(struct scratch *scratch, enum verdict refusal)
{
	struct quota_sample s = {.scratch = scratch};

	if (quota_refused(ports_cell(&scratch->key, quota_holder(scratch)), false))
		return refusal;
	bpf_loop(QUOTA_SAMPLES, quota_sample_step, &s, 0);
	if (!ports_reserve(&scratch->key, quota_holder(scratch), s.own * 2 < s.free))
		return VERDICT_GO_ON;
	quota_refused(ports_cell(&scratch->key, quota_holder(scratch)), true);
	return refusal;
}

/* Counts a port for its holder, towards the destination that the scratch record's key has. */
EC_INLINE enum verdict quota_reserve(struct scratch *s)
{
	enum verdict verdict = ports_reserve(&s->key, quota_holder(s), false);

	return verdict ? quota_verify(s, verdict) : VERDICT_GO_ON;
}

#endif
