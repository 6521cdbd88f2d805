/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What both flow tables share: time stamps with a tombstone, the TCP states
 * that decide how long an idle entry lives, and each pod's share of a table.
 */
#ifndef EC_LIB_FLOW_H
#define EC_LIB_FLOW_H

#include "bpf/lib/maps.h"
#include "bpf/lib/pkt.h"

/*
 * Stamps that say that an entry is none any more. They are less than any time at
 * which there were flows: half a second after the machine's start.
 */
#define FLOW_TOMBSTONE 0ULL     /* it is being removed */
#define FLOW_MARKS (1ULL << 29) /* less than this: a tombstone that somebody met, with the second in which */

/* Removals that have not come to their end after so many seconds never will. */
#define FLOW_LEFT_S 10

enum flow_seen {
	FLOW_GONE,  /* the entry is being removed */
	FLOW_FRESH, /* seen within the last second */
	FLOW_DUE,   /* not so: the stamp is written, and once a second there is time for more */
};

EC_INLINE enum flow_seen flow_age_of(__u64 seen, __u64 now)
{
	if (seen < FLOW_MARKS)
		return FLOW_GONE;
	return (__s64)(now - seen) < (__s64)NSEC_PER_SEC ? FLOW_FRESH : FLOW_DUE;
}

/* How a stamp is, unchanged. */
EC_INLINE enum flow_seen flow_age(__u64 *last_seen)
{
	return flow_age_of(*(volatile __u64 *)last_seen, bpf_ktime_get_coarse_ns());
}

/*
 * Renews a stamp. The exchange is what keeps the collector, which swaps an old
 * stamp for a tombstone, from removing an entry that is in use.
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
 * Takes an entry for removal: whoever exchanges the stamp for the tombstone, and
 * nobody else, deletes it, so a new entry under the same key is never hit.
 */
EC_INLINE bool flow_claim(__u64 *last_seen, __u64 seen)
{
	return seen && __sync_val_compare_and_swap(last_seen, seen, 0) == seen;
}

/* Whether an entry stands, that is, is not being removed. */
EC_INLINE bool flow_stands(__u64 *last_seen)
{
	return *(volatile __u64 *)last_seen >= FLOW_MARKS;
}

/*
 * Whether an entry was left as a tombstone, by a removal that came to nothing. Who
 * meets a tombstone marks it with the time, for its remover may be about to delete
 * the entry; who meets an old mark may take the entry for removal in its place. now
 * is CLOCK_MONOTONIC, ns.
 */
EC_INLINE bool flow_is_left(__u64 *last_seen, __u64 now)
{
	__u64 seen = *(volatile __u64 *)last_seen, second = now / NSEC_PER_SEC;

	if (seen == FLOW_TOMBSTONE)
		__sync_val_compare_and_swap(last_seen, FLOW_TOMBSTONE, second);
	return seen != FLOW_TOMBSTONE && seen < FLOW_MARKS && (__s64)(second - seen) >= FLOW_LEFT_S;
}

/* Takes an entry for removal that nobody needs, as it is now, unless somebody else is about to remove it. */
EC_INLINE bool flow_take(__u64 *last_seen)
{
	__u64 seen = *(volatile __u64 *)last_seen;

	if (seen < FLOW_MARKS && !flow_is_left(last_seen, bpf_ktime_get_coarse_ns()))
		return false;
	return flow_claim(last_seen, seen);
}

/* The state bits that a packet sets in its own direction, but for FLOW_RESET. */
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

/* Whether the packet opens a TCP connection: SYN without ACK. */
EC_INLINE bool flow_is_opening(const struct pkt *pkt)
{
	return (pkt->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN;
}

EC_INLINE bool flow_is_tcp_segment(const struct pkt *pkt)
{
	return pkt->tuple.proto == IPPROTO_TCP && pkt->fragment != FRAGMENT_LATER;
}

/* Notes the edges of a TCP segment in its own direction. */
EC_INLINE void flow_note_edges(const struct pkt *pkt, __u8 state, __u32 *seq_end, __u32 *ack)
{
	if (!flow_is_tcp_segment(pkt) || (pkt->tcp_flags & TCP_RST))
		return;
	if (!(state & (FLOW_SYN | FLOW_ACK)) || (__s32)(pkt->seq_end - *seq_end) > 0)
		*seq_end = pkt->seq_end;
	if ((pkt->tcp_flags & TCP_ACK) && (!(state & (FLOW_ACK | FLOW_RESET)) || (__s32)(pkt->ack - *ack) > 0))
		*ack = pkt->ack;
}

/* How far ahead of what its receiver has acknowledged a RST is believed: the edge of what was sent may be a forgery. */
#define FLOW_RESET_WINDOW (1U << 20)

/*
 * Whether a RST lies where its receiver would take it (RFC 5961, section 3.2,
 * as far as a middlebox can tell): between what the receiver has acknowledged and
 * what the sender has sent; or, answering a SYN, it acknowledges just that.
 */
EC_INLINE bool flow_reset_valid(const struct pkt *pkt, __u8 state, __u32 seq_end, __u32 peer_ack, __u32 peer_seq_end)
{
	if (!(state & (FLOW_SYN | FLOW_ACK)))
		return (pkt->tcp_flags & TCP_ACK) && pkt->ack == peer_seq_end;
	return pkt->seq - peer_ack <= FLOW_RESET_WINDOW && (__s32)(pkt->seq - seq_end) <= 0;
}

/* One direction of a TCP connection, wherever its entry keeps it. */
struct flow_side {
	__u8 *state;
	__u32 *seq_end;
	__u32 *ack;
};

/* How far from what its receiver has acknowledged a FIN is believed, either way: more than is in flight. */
#define FLOW_FIN_WINDOW (1U << 24)

/* The bits that a packet does not set: a FIN far from what its receiver has acknowledged is nobody's. */
EC_INLINE __u8 flow_doubted(const struct pkt *pkt, const struct flow_side *peer)
{
	if (!(pkt->tcp_flags & TCP_FIN) || !(*peer->state & FLOW_ACK))
		return 0;
	return pkt->seq_end - *peer->ack + FLOW_FIN_WINDOW < 2 * FLOW_FIN_WINDOW ? 0 : FLOW_FIN;
}

/*
 * A RST inside the window marks the connection as reset, in both directions. Its
 * receiver may not take it, as it takes an exact one only. So what each side is
 * noted to have acknowledged is raised to all that the other has sent: what goes
 * beyond that later acknowledges what was sent after the RST, and takes the mark
 * away. No segment that was on its way already can, and none of one side alone.
 */
EC_INLINE void flow_note_reset(const struct pkt *pkt, const struct flow_side *own, const struct flow_side *peer)
{
	if (pkt->tcp_flags & TCP_RST) {
		if (!flow_reset_valid(pkt, *own->state, *own->seq_end, *peer->ack, *peer->seq_end))
			return;
		*own->state |= FLOW_RESET;
		*peer->state |= FLOW_RESET;
		*own->ack = *peer->seq_end;
		*peer->ack = *own->seq_end;
		return;
	}
	if (!(pkt->tcp_flags & TCP_ACK) || !(*own->state & FLOW_RESET))
		return;
	if ((__s32)(pkt->ack - *own->ack) <= 0 || (__s32)(pkt->ack - *peer->seq_end) > 0)
		return;
	*own->state &= ~FLOW_RESET;
	*peer->state &= ~FLOW_RESET;
}

/*
 * Whether a SYN starts from nothing: the last connection is closed, or was never
 * answered. A FIN of the world's does not count for a SYN of the world's: both may be
 * anybody's.
 */
EC_INLINE bool flow_opens_anew(__u8 own, __u8 peer, bool by_pod)
{
	__u8 closed = by_pod ? own | peer : peer;

	return !peer || (closed & FLOW_FIN) || ((own | peer) & FLOW_RESET);
}

/* Seconds that an idle flow lives: out is the opener's direction, in the other. */
EC_INLINE __u64 flow_lifetime_s(__u8 proto, __u8 out, __u8 in)
{
	if (proto == IPPROTO_ICMP)
		return 30;
	if (proto != IPPROTO_TCP)
		return in ? 180 : 60;
	if (((out | in) & FLOW_RESET) || (out & in & FLOW_FIN))
		return 10;
	if ((out | in) & FLOW_FIN)
		return 3600;
	/* A reset alone is no answer: a scan would fill the table for a day. */
	if ((out & FLOW_ACK) && (in & (FLOW_SYN | FLOW_ACK)))
		return 86400;
	return 60;
}

/* Whether the flow is one that pressure must not shorten. */
EC_INLINE bool flow_established(__u8 proto, __u8 out, __u8 in)
{
	return proto == IPPROTO_TCP && flow_lifetime_s(proto, out, in) == 86400;
}

EC_INLINE struct usage *flow_usage(__u32 table)
{
	return bpf_map_lookup_elem(&usage, &table);
}

/*
 * Counts one more entry of a table for its holder (NULL: the node itself), before
 * it is made. Granted only while the holder has fewer than are free: so one pod
 * never fills more than half of a table, two not more than two thirds, and there
 * is always room for a pod with few flows. 0, or a negated drop reason: full, or
 * limit.
 */
EC_INLINE int flow_reserve(struct usage *u, __u64 capacity, __u32 *held, int full, int limit)
{
	if (u->entries >= capacity)
		return -full;
	if (held && *held >= capacity - u->entries)
		return -limit;
	__sync_fetch_and_add(&u->entries, 1);
	if (held)
		__sync_fetch_and_add(held, 1);
	return 0;
}

/*
 * Counts one entry less. A count whose record was lost and made anew stays at 0:
 * wrapped around, it would refuse every flow.
 */
EC_INLINE void flow_release(__u32 table, __u32 *held)
{
	struct usage *u = flow_usage(table);

	if (u && !__sync_fetch_and_add(&u->entries, -1))
		__sync_fetch_and_add(&u->entries, 1);
	if (held && !__sync_fetch_and_add(held, -1))
		__sync_fetch_and_add(held, 1);
}

/*
 * Inserts an entry. The kernel may refuse for reasons of the moment: the bucket is
 * locked by what was interrupted here (-EBUSY; -EDEADLK, -ETIMEDOUT since Linux
 * 6.15), or memory is short (-ENOMEM). Then it is tried once more.
 */
EC_INLINE int flow_insert(void *map, const struct tuple *key, const void *entry)
{
	int ret = bpf_map_update_elem(map, key, entry, BPF_NOEXIST);

	if (!ret || ret == -EC_EEXIST || ret == -EC_E2BIG)
		return ret;
	return bpf_map_update_elem(map, key, entry, BPF_NOEXIST);
}

/* The reason to drop a packet after an insertion failed, negated. */
EC_INLINE int flow_refusal(int ret, int full)
{
	return ret == -EC_E2BIG ? -full : -DROP_TABLE_BUSY;
}

EC_INLINE struct device *flow_owner(__u32 ifindex)
{
	struct device_key key = {.ifindex = ifindex};

	return bpf_map_lookup_elem(&devices, &key);
}

/* Whether the generation that opened a flow is still there; the node, 0, always is. */
EC_INLINE bool flow_owner_lives(__u32 ifindex)
{
	return !ifindex || flow_owner(ifindex);
}

#endif
