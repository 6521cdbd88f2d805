/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Removing flows that have ended: one rule for the collector and for programs that
 * need a flow's port or room in its table. An entry is removed only after its stamp, as
 * read, was swapped for a tombstone: a packet that renews the stamp meanwhile keeps its
 * flow. Nothing here uses the scratch record, since the collector runs in process
 * context.
 */
#ifndef EC_LIB_REAP_H
#define EC_LIB_REAP_H

#include "bpf/lib/journal.h"
#include "bpf/lib/nat.h"

/* What became of an entry that was judged. */
enum reaped {
	REAP_NONE, /* it does not exist */
	REAP_KEPT,
	REAP_GONE, /* it had ended, and was removed */
	REAP_PAIR, /* it is half of a pair, to be judged as that */
};

/* What entries are judged by. */
struct reaper {
	__u64 now;     /* CLOCK_MONOTONIC, ns */
	bool pressure; /* flows end earlier */
	bool world;    /* the same of the world's alone */
	bool needed;   /* a new flow needs a port or room: what both sides have forgotten ends at once */
	bool opens;    /* that begins with a SYN, and with the port of the pair that gives way */
	__u32 seq;     /* of the SYN, host order */
	__u32 holder;  /* at its limit, whose closed and unanswered pairs give way to a new one; 0: nobody's */
	__u32 pad;
};

/* So old must an unanswered SYN be to give way, in ns. */
#define REAP_UNANSWERED (2 * NSEC_PER_SEC)

/* Whether a pair with this half lives a quarter of its time. */
EC_INLINE bool reap_is_pressed(const struct reaper *r, const struct snat_entry *half)
{
	return r->pressure || (r->world && holder_is_outside(half->ifindex, half->flags));
}

/* Under pressure all but established TCP connections live a quarter of their time. age is in ns. */
EC_INLINE bool reap_expired(bool pressed, __u64 lifetime_s, __u64 age)
{
	__u64 lifetime = lifetime_s * NSEC_PER_SEC;

	if (pressed && lifetime_s != FLOW_ESTABLISHED_S)
		lifetime /= 4;
	return (__s64)age > (__s64)lifetime;
}

/* Whether a pair with this half has lived as long as it may, by the states of both. age is in ns. */
EC_INLINE bool reap_pair_expired(const struct reaper *r, const struct snat_entry *half, __u8 proto, __u8 out, __u8 in,
				 __u64 age)
{
	bool pressed = reap_is_pressed(r, half);
	__u64 lifetime_s = holder_is_outside(half->ifindex, half->flags)
				   ? flow_lifetime_outside_s(proto, out, in, pressed)
				   : flow_lifetime_pair_s(proto, out, in);

	return reap_expired(pressed, lifetime_s, age);
}

/*
 * Whether a pair gives way to a new one of its holder: datagrams that are no stream, a SYN that is not answered, and a
 * connection that the far end remembers, to a SYN that it takes.
 */
EC_INLINE bool reap_gives_way(const struct reaper *r, const struct tuple *out, const struct snat_entry *forward,
			      const struct snat_entry *reverse)
{
	if (!r->holder || holder_of(forward->ifindex, forward->flags, &out->src) != r->holder)
		return false;
	if (out->proto == IPPROTO_UDP)
		return !(reverse->state & FLOW_STREAM);
	if (!reverse->state)
		return (__s64)(r->now - forward->last_seen) > (__s64)REAP_UNANSWERED;
	return out->proto == IPPROTO_TCP && r->opens && nat_takes_syn(forward, reverse, r->seq);
}

/*
 * Whether an entry may be removed, by its stamp as read: it has ended and nobody is
 * removing it, or whoever was has left it behind.
 */
EC_INLINE bool reap_may(const struct reaper *r, __u64 *last_seen, __u64 seen, bool ended)
{
	return flow_is_left(last_seen, r->now) || (seen >= FLOW_MARKS && ended);
}

/* When a pair was last used, by its halves' stamps; answered is 0 without a reverse half. */
EC_INLINE __u64 reap_latest(__u64 seen, __u64 answered)
{
	return answered && (__s64)(answered - seen) > 0 ? answered : seen;
}

/* Judges a pair by its forward half's key; writes the reverse half's key. */
EC_INLINE enum reaped reap_pair(struct pair *p, const struct reaper *r)
{
	struct snat_entry *forward, *reverse;
	__u64 seen, answered = 0;
	bool needless = false;
	__u8 in = 0;

	forward = bpf_map_lookup_elem(&snat, &p->forward_key);
	if (!forward)
		return REAP_NONE;
	nat_set_other_key(&p->reverse_key, &p->forward_key, forward);
	reverse = bpf_map_lookup_elem(&snat_reverse, &p->reverse_key);
	seen = forward->last_seen;
	if (reverse && nat_names(reverse, &p->forward_key, forward->ifindex)) {
		in = reverse->state;
		needless = (r->needed && nat_forgotten(forward, reverse)) ||
			   reap_gives_way(r, &p->forward_key, forward, reverse);
		answered = reverse->last_seen;
	}
	if (!reap_may(r, &forward->last_seen, seen,
		      needless || !flow_owner_lives(forward->ifindex) ||
			      reap_pair_expired(r, forward, p->forward_key.proto, forward->state, in,
						r->now - reap_latest(seen, answered))))
		return REAP_KEPT;
	if (!flow_claim(&forward->last_seen, seen))
		return REAP_KEPT;
	if (answered && reverse && !flow_claim(&reverse->last_seen, answered)) {
		/* A reply has just renewed it: the pair stays. A tombstone is no stamp to copy. */
		answered = reverse->last_seen;
		forward->last_seen = answered >= FLOW_MARKS ? answered : seen;
		return REAP_KEPT;
	}
	barrier_var(p); /* else the addresses of both keys lie on the stack */
	p->ifindex = forward->ifindex;
	p->flags = forward->flags;
	if (answered && reverse)
		bpf_map_delete_elem(&snat_reverse, &p->reverse_key);
	if (!bpf_map_delete_elem(&snat, &p->forward_key))
		nat_uncount(&p->reverse_key, &p->forward_key.src, p->ifindex, p->flags);
	return REAP_GONE;
}

/* Judges a reverse half by its key; writes the forward half's key. */
EC_INLINE enum reaped reap_reverse(struct pair *p, const struct reaper *r)
{
	struct snat_entry *reverse = bpf_map_lookup_elem(&snat_reverse, &p->reverse_key), *forward;
	__u64 seen;

	if (!reverse)
		return REAP_NONE;
	nat_set_other_key(&p->forward_key, &p->reverse_key, reverse);
	forward = bpf_map_lookup_elem(&snat, &p->forward_key);
	if (forward && nat_leads_to(forward, &p->reverse_key, reverse->ifindex))
		return REAP_PAIR;
	seen = reverse->last_seen;
	if (!reap_may(r, &reverse->last_seen, seen,
		      !flow_owner_lives(reverse->ifindex) ||
			      reap_pair_expired(r, reverse, p->reverse_key.proto, 0, reverse->state, r->now - seen)))
		return REAP_KEPT;
	if (!flow_claim(&reverse->last_seen, seen))
		return REAP_KEPT;
	p->ifindex = reverse->ifindex;
	p->flags = reverse->flags;
	/* A tombstone that was left behind is no longer counted. */
	if (!bpf_map_delete_elem(&snat_reverse, &p->reverse_key) && seen >= FLOW_MARKS)
		nat_uncount(&p->reverse_key, &p->forward_key.src, p->ifindex, p->flags);
	return REAP_GONE;
}

/* Removes a recorded flow that was claimed, and takes it off the counts; owner is NULL if it is gone. */
EC_INLINE void reap_remove_recorded(const struct tuple *replies, struct device *owner)
{
	struct holding held = {.own = owner ? &owner->conntrack_flows : NULL};

	if (!bpf_map_delete_elem(&conntrack, replies))
		flow_release(USAGE_CONNTRACK, &held);
}

/* Judges a recorded flow by its key. */
EC_CALL enum reaped reap_recorded(const struct tuple *replies, const struct reaper *r)
{
	struct conntrack_entry *e = bpf_map_lookup_elem(&conntrack, replies);
	struct device *owner;
	__u64 seen;

	if (!e)
		return REAP_NONE;
	seen = e->last_seen;
	owner = flow_owner(e->ifindex);
	if (!reap_may(r, &e->last_seen, seen,
		      !owner || reap_expired(r->pressure, flow_lifetime_s(replies->proto, e->from_world, e->from_pod),
					     r->now - seen)))
		return REAP_KEPT;
	if (!flow_claim(&e->last_seen, seen))
		return REAP_KEPT;
	reap_remove_recorded(replies, owner);
	return REAP_GONE;
}

#endif
