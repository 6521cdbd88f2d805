/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What both flow tables share: time stamps that double as tombstones, the state that
 * decides how long an idle entry lives, and each pod's share of a table.
 */
#ifndef EC_LIB_FLOW_H
#define EC_LIB_FLOW_H

#include "bpf/lib/holder.h"
#include "bpf/lib/maps.h"
#include "bpf/lib/tcp.h"
#include "bpf/lib/verdict.h"

/*
 * The stamp of an entry that is being removed is below FLOW_MARKS: the tombstone, or the
 * second (CLOCK_MONOTONIC) in which a program first met the tombstone.
 */
#define FLOW_TOMBSTONE 0ULL

/* A removal that has not finished after so many seconds never will. */
#define FLOW_LEFT_S 10

enum flow_seen {
	FLOW_GONE,  /* the entry is being removed */
	FLOW_FRESH, /* seen within the last second */
	FLOW_DUE,   /* seen before: time to renew the stamp and do what is done once a second */
};

EC_INLINE enum flow_seen flow_age_of(__u64 seen, __u64 now)
{
	if (seen < FLOW_MARKS)
		return FLOW_GONE;
	return (__s64)(now - seen) < (__s64)NSEC_PER_SEC ? FLOW_FRESH : FLOW_DUE;
}

/* The age of a stamp, which stays as it is. */
EC_INLINE enum flow_seen flow_age(__u64 *last_seen)
{
	return flow_age_of(*(volatile __u64 *)last_seen, bpf_ktime_get_coarse_ns());
}

/*
 * Renews a stamp. The exchange keeps the collector, which swaps an old stamp for a
 * tombstone, from removing an entry that is in use.
 */
EC_INLINE enum flow_seen flow_touch(__u64 *last_seen)
{
	__u64 seen = *(volatile __u64 *)last_seen, now = bpf_ktime_get_coarse_ns();
	enum flow_seen age = flow_age_of(seen, now);

	if (age == FLOW_DUE && __sync_val_compare_and_swap(last_seen, seen, now) < FLOW_MARKS)
		return FLOW_GONE;
	return age;
}

/*
 * Claims an entry for removal. Only the one that swaps the stamp for the tombstone
 * deletes the entry, so a new entry under the same key is never deleted.
 */
EC_INLINE bool flow_claim(__u64 *last_seen, __u64 seen)
{
	return seen && __sync_val_compare_and_swap(last_seen, seen, 0) == seen;
}

/* Whether an entry is not being removed. */
EC_INLINE bool flow_is_live(__u64 *last_seen)
{
	return *(volatile __u64 *)last_seen >= FLOW_MARKS;
}

/*
 * Whether an entry is a tombstone that its remover has left behind. The first to meet a
 * tombstone marks it with the time, since its remover may be about to delete the entry;
 * whoever meets an old mark may remove the entry instead. now is CLOCK_MONOTONIC, ns.
 */
EC_INLINE bool flow_is_left(__u64 *last_seen, __u64 now)
{
	__u64 seen = *(volatile __u64 *)last_seen, second = now / NSEC_PER_SEC;

	if (seen == FLOW_TOMBSTONE)
		__sync_val_compare_and_swap(last_seen, FLOW_TOMBSTONE, second);
	return seen != FLOW_TOMBSTONE && seen < FLOW_MARKS && (__s64)(second - seen) >= FLOW_LEFT_S;
}

/* Claims an entry that nobody needs for removal, unless somebody else is about to remove it. */
EC_INLINE bool flow_take(__u64 *last_seen)
{
	__u64 seen = *(volatile __u64 *)last_seen;

	if (seen < FLOW_MARKS && !flow_is_left(last_seen, bpf_ktime_get_coarse_ns()))
		return false;
	return flow_claim(last_seen, seen);
}

/* The enum flow_state bits that a packet sets in its own direction, except FLOW_RESET. */
EC_INLINE __u8 flow_bits(const struct pkt *pkt)
{
	__u8 bits = FLOW_PACKET;

	if (pkt->tuple.proto != IPPROTO_TCP || pkt->fragment == FRAGMENT_LATER)
		return bits;
	if (pkt->tcp_flags & TCP_SYN)
		bits |= FLOW_SYN;
	else if (!(pkt->tcp_flags & TCP_RST))
		bits |= FLOW_ACK;
	if (pkt->tcp_flags & TCP_FIN)
		bits |= FLOW_FIN;
	return bits;
}

/* How long an idle connection lives, whose time pressure must not shorten. */
#define FLOW_ESTABLISHED_S 86400

/* How long an idle flow lives, in seconds; out is the state of the opener's direction, in of the other. */
EC_INLINE __u64 flow_lifetime_s(__u8 proto, __u8 out, __u8 in)
{
	if (proto == IPPROTO_ICMP || proto == IPPROTO_ICMPV6)
		return 30;
	if (proto != IPPROTO_TCP)
		return in ? 180 : 60;
	if ((out | in) & FLOW_RESET)
		return 10;
	/* The other side is in TIME_WAIT for a minute; a stamp is up to a second old. */
	if (out & in & FLOW_FIN)
		return in & FLOW_FIRST ? 61 : 10;
	if ((out | in) & FLOW_FIN)
		return 3600;
	/* A RST alone is no answer: else a port scan would fill the table for a day. */
	if ((out & FLOW_ACK) && (in & (FLOW_SYN | FLOW_ACK)))
		return FLOW_ESTABLISHED_S;
	return 60;
}

/* The same of a pair: a question and its answers take a port for a short time only, as in netfilter. */
EC_INLINE __u64 flow_lifetime_pair_s(__u8 proto, __u8 out, __u8 in)
{
	if (proto == IPPROTO_UDP && !(in & FLOW_STREAM))
		return 30;
	return flow_lifetime_s(proto, out, in);
}

/*
 * The same of a pair of a client outside to a Service, which ends early if it has cost the client nothing, as in
 * netfilter: the client must have proved that it has its address. A connection that its backend has closed waits for
 * the client as for a pod, unless it is pressed.
 */
EC_INLINE __u64 flow_lifetime_outside_s(__u8 proto, __u8 out, __u8 in, bool pressed)
{
	__u64 lifetime = flow_lifetime_pair_s(proto, out, in), most = lifetime;

	if (proto == IPPROTO_TCP && (in & FLOW_FIN) && pressed)
		most = 120;
	if (proto == IPPROTO_TCP && !(out & FLOW_ACK))
		most = 20;
	return lifetime < most ? lifetime : most;
}

EC_INLINE struct usage *flow_usage(__u32 table)
{
	return bpf_map_lookup_elem(&usage, &table);
}

/* How many entries a flow table has room for, and its journal for records. */
EC_INLINE __u64 flow_capacity(__u32 table)
{
	return table == USAGE_SNAT ? cfg.snat_entries : cfg.conntrack_entries;
}

/* Counts one more entry of a table for its holder, before it is made. */
EC_INLINE enum verdict flow_reserve(struct usage *u, __u32 table, const struct holding *held)
{
	__u64 capacity = flow_capacity(table);

	if (u->entries >= capacity)
		return table == USAGE_SNAT ? -DROP_SNAT_FULL : -DROP_CONNTRACK_FULL;
	if (!holder_may(held, capacity - u->entries))
		return table == USAGE_SNAT ? -DROP_SNAT_LIMIT : -DROP_CONNTRACK_LIMIT;
	__sync_fetch_and_add(&u->entries, 1);
	holder_more(held);
	return VERDICT_GO_ON;
}

/* Counts one entry less. */
EC_INLINE void flow_release(__u32 table, const struct holding *held)
{
	struct usage *u = flow_usage(table);

	if (u && !__sync_fetch_and_add(&u->entries, -1))
		__sync_fetch_and_add(&u->entries, 1);
	holder_less(held);
}

/*
 * Inserts an entry. The kernel may refuse for the moment: the code that was interrupted
 * here holds the bucket's lock (-EBUSY; -EDEADLK, -ETIMEDOUT since Linux 6.15), or
 * memory is short (-ENOMEM). Then it is tried once more.
 */
EC_INLINE int flow_insert(void *map, const struct tuple *key, const void *entry)
{
	int ret = bpf_map_update_elem(map, key, entry, BPF_NOEXIST);

	if (!ret || ret == -EC_EEXIST || ret == -EC_E2BIG)
		return ret;
	return bpf_map_update_elem(map, key, entry, BPF_NOEXIST);
}

/* The drop for an insertion into a table that failed. */
EC_INLINE enum verdict flow_refusal(int err, __u32 table)
{
	if (err != -EC_E2BIG)
		return -DROP_TABLE_BUSY;
	return table == USAGE_SNAT ? -DROP_SNAT_FULL : -DROP_CONNTRACK_FULL;
}

EC_INLINE struct device *flow_owner(__u32 ifindex)
{
	struct device_key key = {.ifindex = ifindex};

	return bpf_map_lookup_elem(&devices, &key);
}

/* The entry of the world, as an owner, and of the node itself; NULL: nobody outside is served. */
EC_INLINE struct device *flow_world(void)
{
	return flow_owner(0);
}

/* How many entries of a table are the world's. */
EC_INLINE __u64 flow_of_world(__u32 table)
{
	struct device *world = cfg.services && table == USAGE_SNAT ? flow_world() : NULL;

	return world ? world->snat_flows : 0;
}

/*
 * Whether all but the world are under pressure in a table (holder.h): their flows end earlier, and the node has no more
 * entries than it needs.
 */
EC_CALL bool flow_pressure(const struct usage *u, __u32 table)
{
	__u64 world = flow_of_world(table), entries = u->entries, capacity = flow_capacity(table);

	return entries > world && capacity > world && holder_pressed(entries - world, capacity - world);
}

/* The same of the world, which no client is alone. */
EC_CALL bool flow_world_pressure(void)
{
	__u64 held = flow_of_world(USAGE_SNAT);
	struct usage *u = flow_usage(USAGE_SNAT);

	return u && held &&
	       holder_pressed(held, held + holder_left_to_world(flow_capacity(USAGE_SNAT) - u->entries, held));
}

/* Notes what an owner has, which spares lookups where it has none; flags are enum device_flags. */
EC_INLINE void flow_note(struct device *owner, __u32 flags)
{
	if (owner && (owner->flags & flags) != flags)
		__sync_fetch_and_or(&owner->flags, flags);
}

/* Whether the pod's generation that opened a flow still exists; the node, 0, always does. */
EC_INLINE bool flow_owner_lives(__u32 ifindex)
{
	return !ifindex || flow_owner(ifindex);
}

#endif
