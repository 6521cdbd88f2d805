/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Each holder's share of the ports towards one destination (holder.h). The counts (ports.h) may be
 * too high, so before a flow is refused some of the ports themselves are looked at.
 */
#ifndef EC_LIB_QUOTA_H
#define EC_LIB_QUOTA_H

#include "bpf/lib/room.h"

/* How many random ports are looked at when the counts say that none may be taken. */
#define QUOTA_SAMPLES 128

/* How many more are, until one is found whose flow has ended or may give way. */
#define QUOTA_TRIES 256

/* Of so many of the holder's flows the stalest gives way. */
#define QUOTA_SPARES 8

/* What the ports that were looked at are. */
struct quota_sample {
	struct scratch *scratch;
	__u32 holder;
	__u32 own; /* the holder's */
	__u32 world;
	__u32 free;
};

/* Looks at a port; 1: it was the last. */
static long quota_sample_step(__u32 i, struct quota_sample *s)
{
	struct scratch *scratch = s->scratch;
	struct snat_entry *there;
	__u32 holder;

	scratch->key.sport = bpf_htons(nat_random_port());
	there = bpf_map_lookup_elem(&snat_reverse, &scratch->key);
	holder = there ? holder_of(there->ifindex, there->flags, &there->to_address) : 0;
	if (!there) {
		s->free++;
	} else if (room_reclaim_port(there, ROOM_PRESSED)) {
		s->free++;
		scratch->spare.reaped += holder == s->holder;
	} else {
		s->own += holder == s->holder;
		s->world += holder >= HOLDER_WORLD;
		if (s->holder && holder == s->holder)
			room_note_spare();
	}
	return scratch->spare.found >= QUOTA_SPARES ||
	       (i >= QUOTA_SAMPLES && (scratch->spare.reaped || scratch->spare.found));
}

/* The last refusal that a look at the ports, or the table, has confirmed. */
struct quota_refusal {
	__u32 cell; /* the holder's (ports.h), that of all where nobody finds a port, or of all the world */
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
 * Whether a holder has just been refused, for itself or with all the world; confirmed: notes that it has, with all the
 * world if nothing is left to that.
 */
EC_CALL bool quota_holder_refused(__u64 destination, __u32 holder, bool confirmed, bool left)
{
	if (confirmed)
		return quota_refused(ports_cell(destination, left ? holder : HOLDER_WORLD), true);
	return quota_refused(ports_cell(destination, holder), false) ||
	       (holder >= HOLDER_WORLD && quota_refused(ports_cell(destination, HOLDER_WORLD), false));
}

/* Whether the ports that were looked at say clearly that the holder may have one more: even if half as many were free.
 */
EC_INLINE bool quota_sample_allows(struct quota_sample *s)
{
	struct holding held = {.own = &s->own, .world = s->holder >= HOLDER_WORLD ? &s->world : NULL};

	return s->free && ports_may(&held, s->free / 2);
}

/* Has the spare flow give way, whose port the flow to open takes. */
EC_INLINE bool quota_give_way(struct scratch *s)
{
	s->key.sport = s->spare.port;
	if (!s->spare.found || !room_reap_port(ROOM_SPARE))
		s->spare.found = 0;
	s->key.sport = 0;
	return s->spare.found;
}

/*
 * The counts say that the holder may take no port towards this destination. So some of
 * its ports are looked at: flows that have ended there are removed, those of the world as
 * under pressure, and if fewer than half as many belong to the holder as it may have, the counts are too high and the
 * flow is opened. Otherwise a closed or unanswered flow of the holder gives way, or the flow is refused.
 */
EC_INLINE enum verdict quota_verify(struct scratch *scratch, enum verdict refusal)
{
	struct quota_sample s = {.scratch = scratch, .holder = room_holder(scratch)};
	__u64 destination = ports_destination(&scratch->key);
	bool left, allowed;

	if (quota_holder_refused(destination, s.holder, false, false))
		return refusal;
	allowed = bpf_loop(QUOTA_TRIES, quota_sample_step, &s, 0) > QUOTA_SAMPLES && quota_sample_allows(&s);
	if (!ports_reserve(&scratch->key, s.holder, allowed)) {
		scratch->spare.found = 0;
		return VERDICT_GO_ON;
	}
	if (quota_give_way(scratch))
		return ports_reserve(&scratch->key, s.holder, true);
	left = s.holder < HOLDER_WORLD || holder_left_to_world(s.free, s.world);
	quota_holder_refused(destination, s.holder, true, left);
	return refusal;
}

/* Counts a port for its holder, towards the destination that the scratch record's key has. */
EC_INLINE enum verdict quota_reserve(struct scratch *s)
{
	enum verdict verdict = ports_reserve(&s->key, room_holder(s), false);

	s->spare.found = 0;
	s->spare.reaped = 0;
	return verdict ? quota_verify(s, verdict) : VERDICT_GO_ON;
}

/* Whether a client outside has just been refused another pair; full notes that it has. */
EC_CALL bool quota_pair_refused(const struct scratch *s, const struct usage *full)
{
	struct device *world = flow_world();
	__u32 holder = room_holder(s);
	bool left = false;

	if (holder < HOLDER_WORLD || !world)
		return false;
	if (full)
		left = holder_left_to_world(flow_capacity(USAGE_SNAT) - full->entries, world->snat_flows);
	return quota_holder_refused(PORTS_PAIRS, holder, full, left);
}

#endif
