/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Opening a masqueraded flow: the choice of a port, and the making of a pair. */
#ifndef EC_LIB_OPEN_H
#define EC_LIB_OPEN_H

#include "bpf/lib/count.h"
#include "bpf/lib/nat.h"
#include "bpf/lib/nf.h"
#include "bpf/lib/room.h"

/*
 * Tries at a free port before a new flow is refused. Where nine tenths are taken,
 * all of them miss once in 10^46 times.
 */
#define OPEN_TRIES 1024

/* Ports that are looked at when the counts say that none may be taken. */
#define OPEN_SAMPLES 128

/* A reverse half that was seen within this time is not looked at for having ended. */
#define OPEN_YOUNG (2 * NSEC_PER_SEC)

/* What became of a try. */
enum open_try {
	OPEN_IN_USE,
	OPEN_TAKEN,
	OPEN_FOUND,
};

/*
 * Whether a socket of the node would get the replies. TCP finds TIME_WAIT
 * sockets as well; ICMP identifiers have no sockets to ask for.
 */
EC_INLINE bool open_port_has_socket(struct __sk_buff *ctx, struct ipv4_tuple *reply, __u8 proto)
{
	struct bpf_sock *sk = NULL;

	if (proto == IPPROTO_TCP)
		sk = bpf_skc_lookup_tcp(ctx, (void *)reply, sizeof(*reply), BPF_F_CURRENT_NETNS, 0);
	else if (proto == IPPROTO_UDP)
		sk = bpf_sk_lookup_udp(ctx, (void *)reply, sizeof(*reply), BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	bpf_sk_release(sk);
	return true;
}

/* Whether replies to the port would be another's: a socket's, or a flow's that netfilter has masqueraded to it. */
EC_INLINE bool open_port_is_others(struct __sk_buff *ctx, const struct tuple *world)
{
	struct ipv4_tuple reply = ipv4_tuple_reversed(world);

	return open_port_has_socket(ctx, &reply, world->proto) || nf_holds_port(ctx, &reply, world->proto);
}

/* Whether a port that is held, by its reverse half under the scratch record's key, is free now: its flow has ended. */
EC_CALL bool open_reclaim(struct scratch *s, struct snat_entry *there)
{
	struct usage *u = flow_usage(USAGE_SNAT);
	struct reaper r = {.now = bpf_ktime_get_coarse_ns()};

	if (!u || ((__s64)(r.now - there->last_seen) < (__s64)OPEN_YOUNG && flow_owner_lives(there->ifindex)))
		return false;
	r.pressure = journal_pressure(u, USAGE_SNAT);
	s->pair.world = s->key;
	return reap_reverse(&s->pair, &r, true) == REAP_GONE;
}

/* The forward half, or the reverse, of the pair that is being made. */
EC_INLINE void open_fill(struct snat_entry *e, const struct addr *address, __be16 port, const struct owner *owner)
{
	__builtin_memset(e, 0, sizeof(*e));
	e->to_address = *address;
	e->to_port = port;
	e->flags = owner->flags;
	e->ifindex = owner->ifindex;
	e->last_seen = bpf_ktime_get_coarse_ns();
}

/*
 * Takes a port for a new flow by inserting its reverse half. OPEN_FOUND: the
 * half is there already and names this very flow; else a negated drop reason.
 */
EC_INLINE int open_try_port(struct __sk_buff *ctx, struct scratch *s, __be16 port)
{
	const struct owner *owner = &s->owner;
	const struct tuple *out = &s->pkt.tuple;
	struct snat_entry *there;
	int ret;

	nat_set_reverse_key(&s->key, out, &owner->address, port);
	there = bpf_map_lookup_elem(&snat_reverse, &s->key);
	if (there && nat_names(there, out, owner->ifindex) && flow_touch(&there->last_seen) != FLOW_GONE)
		return OPEN_FOUND;
	if (there && !open_reclaim(s, there))
		return OPEN_IN_USE;
	if (open_port_is_others(ctx, &s->key))
		return OPEN_IN_USE;
	open_fill(&s->entry, &out->src, out->sport, owner);
	ret = flow_insert(&snat_reverse, &s->key, &s->entry);
	if (ret == -EC_EEXIST)
		return OPEN_IN_USE;
	return ret ? flow_refusal(ret, USAGE_SNAT) : OPEN_TAKEN;
}

/*
 * Inserts the forward half behind a reverse half that was just taken or found,
 * whose key is in the scratch record. 1: the pair is new, and the caller's to
 * count; 0: it was there; else a negated drop reason. A reverse half that was taken
 * in vain is gone again.
 */
EC_CALL int open_complete(struct scratch *s, bool taken)
{
	const struct owner *owner = &s->owner;
	struct snat_entry *there;
	int ret;

	open_fill(&s->entry, &s->key.src, s->key.sport, owner);
	ret = flow_insert(&snat, &s->pkt.tuple, &s->entry);
	if (!ret)
		return taken;
	/*
	 * Another CPU opened the same flow: its pair serves both, and may stand on this
	 * very reverse half. A tombstone does not: it takes its own count along.
	 */
	there = bpf_map_lookup_elem(&snat, &s->pkt.tuple);
	if (there && !flow_stands(&there->last_seen))
		nat_end(&s->pkt.tuple, there);
	else if (taken && there && nat_leads_to(there, &s->key, owner->ifindex))
		return 1;
	if (taken)
		bpf_map_delete_elem(&snat_reverse, &s->key);
	return ret == -EC_EEXIST ? 0 : flow_refusal(ret, USAGE_SNAT);
}

/* A random port of the range, in host order. */
EC_INLINE __u32 open_random_port(void)
{
	return cfg.snat_port_low + bpf_get_prandom_u32() % (cfg.snat_port_high - cfg.snat_port_low + 1);
}

/* The search for a port, as far as it has come. */
struct open_search {
	struct __sk_buff *ctx;
	struct scratch *scratch;
	__u32 retried;
	int result; /* of the last try */
	__be16 port;
};

/* One try: 1 ends the search. */
static long open_search_step(__u32 i, struct open_search *s)
{
	s->result = open_try_port(s->ctx, s->scratch, s->port);
	if (s->result != OPEN_IN_USE)
		return 1;
	s->retried++;
	s->port = bpf_htons(open_random_port());
	return 0;
}

/* Chooses a port and makes the pair; returns as open_complete does. */
EC_INLINE int open_allocate(struct __sk_buff *ctx, struct scratch *scratch)
{
	struct open_search s = {.ctx = ctx, .scratch = scratch, .port = scratch->pkt.tuple.sport};
	const struct owner *owner = &scratch->owner;

	/* The node's own flow is here because its port is a pod's. */
	if (!nat_port_in_range(s.port) || (owner->flags & FLOW_HOST))
		s.port = bpf_htons(open_random_port());
	bpf_loop(OPEN_TRIES, open_search_step, &s, 0);
	if (s.retried)
		count_traffic(owner->direction, TRAFFIC_SNAT_RETRIED, s.retried, 0);
	if (s.result == OPEN_IN_USE)
		return -DROP_SNAT_EXHAUSTED;
	return s.result < 0 ? s.result : open_complete(scratch, s.result == OPEN_TAKEN);
}

/* What was seen of some ports towards a destination. */
struct open_sample {
	struct scratch *scratch;
	__u32 own;
	__u32 free;
};

static long open_sample_step(__u32 i, struct open_sample *s)
{
	struct scratch *scratch = s->scratch;
	struct snat_entry *there;

	scratch->key.sport = bpf_htons(open_random_port());
	there = bpf_map_lookup_elem(&snat_reverse, &scratch->key);
	if (!there || open_reclaim(scratch, there))
		s->free++;
	else if (there->ifindex == scratch->owner.ifindex)
		s->own++;
	return 0;
}

/* The last refusals that a closer look has confirmed, by the owner's cell. */
struct open_refusal {
	__u32 cell;
	__u32 pad;
	__u64 at; /* CLOCK_MONOTONIC, ns */
};

#define OPEN_REFUSALS 256

/* Like paths, of each CPU and of each load, and for as long: a look takes longer than a hundred packets. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct open_refusal);
	__uint(max_entries, OPEN_REFUSALS);
} refusals SEC(".maps");

/* Whether a look has confirmed a refusal just now; or that one has, which is kept. */
EC_CALL bool open_refused(const struct scratch *s, bool confirmed)
{
	__u32 cell = ports_cell(&s->key, s->owner.ifindex), slot = cell % OPEN_REFUSALS;
	struct open_refusal *last = bpf_map_lookup_elem(&refusals, &slot);
	__u64 now = bpf_ktime_get_coarse_ns();

	if (last && confirmed) {
		last->cell = cell;
		last->at = now;
	}
	return last && last->cell == cell && now - last->at < cfg.path_lifetime;
}

/*
 * The counts say that no port may be taken towards this destination: some of its
 * ports are looked at. What has ended there gives way; and the counts are too high
 * if less than half as many as are free are the owner's. Else the refusal stands.
 */
EC_INLINE enum verdict open_look_closer(struct scratch *scratch, enum verdict refusal)
{
	struct open_sample s = {.scratch = scratch};

	if (open_refused(scratch, false))
		return refusal;
	bpf_loop(OPEN_SAMPLES, open_sample_step, &s, 0);
	if (!ports_reserve(&scratch->key, scratch->owner.ifindex, s.own * 2 < s.free))
		return VERDICT_GO_ON;
	open_refused(scratch, true);
	return refusal;
}

/* Counts a port towards the destination for the owner. */
EC_INLINE enum verdict open_reserve_port(struct scratch *s)
{
	enum verdict verdict;

	nat_set_reverse_key(&s->key, &s->pkt.tuple, &s->owner.address, 0);
	verdict = ports_reserve(&s->key, s->owner.ifindex, false);
	return verdict ? open_look_closer(s, verdict) : VERDICT_GO_ON;
}

/*
 * Finds the flow of a packet that may not open one by its reverse half, and
 * restores the forward half. Only a half that kept the pod's own port can be
 * found.
 */
EC_CALL enum verdict open_adopt(struct scratch *s)
{
	const struct tuple *out = &s->pkt.tuple;
	struct snat_entry *there;

	s->key = nat_reverse_key(out, &s->owner.address, out->sport);
	there = bpf_map_lookup_elem(&snat_reverse, &s->key);
	if (!there || !nat_names(there, out, s->owner.ifindex) || flow_touch(&there->last_seen) == FLOW_GONE)
		return -DROP_NO_MAPPING;
	nat_restore_forward(&s->key, there);
	return VERDICT_GO_ON;
}

/* Whether a packet without a flow may open one. */
EC_INLINE bool open_allowed(const struct pkt *pkt)
{
	if (pkt->tuple.proto == IPPROTO_TCP)
		return flow_is_opening(pkt);
	return pkt->tuple.proto != IPPROTO_ICMP || pkt->icmp_type == ICMP_ECHO;
}

/* Counts a pair of the owner, and makes it. */
EC_INLINE enum verdict open_pair(struct __sk_buff *ctx, struct scratch *s)
{
	struct device *dev = flow_owner(s->owner.ifindex);
	__u32 *held = dev ? &dev->snat_flows : NULL;
	struct usage *u = flow_usage(USAGE_SNAT);
	enum verdict verdict;
	int made;

	if (!u)
		return -DROP_SNAT_FULL;
	verdict = room_reserve(u, USAGE_SNAT, held);
	if (verdict)
		return verdict;
	verdict = open_reserve_port(s);
	if (!verdict) {
		s->owner.flags |= FLOW_COUNTED;
		made = open_allocate(ctx, s);
		if (made > 0) {
			journal_note(u, USAGE_SNAT, &s->pkt.tuple);
			count_traffic(s->owner.direction, TRAFFIC_SNAT_ALLOCATED, 1, 0);
			return VERDICT_GO_ON;
		}
		ports_release(&s->key, s->owner.ifindex);
		verdict = made;
	}
	flow_release(USAGE_SNAT, held);
	return verdict;
}

/*
 * Opens a masqueraded flow for a packet that belongs to none, and for the owner
 * in the scratch record; the pair stands in the table afterwards.
 */
EC_GLOBAL enum verdict open_flow(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();

	if (!s)
		return -DROP_INVALID;
	if (addr_is_zero(&s->owner.address))
		return -DROP_NO_SNAT_ADDRESS;
	if (!open_allowed(&s->pkt))
		return open_adopt(s);
	return open_pair(ctx, s);
}

#endif
