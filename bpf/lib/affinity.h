/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Which backend of a set a client keeps (sessionAffinity: ClientIP). Each pod overwrites
 * only records of its own (shares.h), the oldest first, so that none can push out the
 * others'. A record that finds no place costs its client the affinity, not the flow.
 */
#ifndef EC_LIB_AFFINITY_H
#define EC_LIB_AFFINITY_H

#include "bpf/lib/addr.h"
#include "bpf/lib/backend.h"
#include "bpf/lib/flow.h"
#include "bpf/lib/maps.h"
#include "bpf/lib/path.h"
#include "bpf/lib/scratch.h"
#include "bpf/lib/shares.h"

enum {
	AFFINITY_WAYS = 4, /* how many of its holder's slots a record can take */
};

EC_INLINE __u32 affinity_hash(const struct addr *client, __u32 set)
{
	const __u32 *w = (const __u32 *)client;

	return (set * 0x9e3779b97f4a7c15ULL + w[2] * 0xbf58476d1ce4e5b9ULL + w[3] * 0x94d049bb133111ebULL) >> 32;
}

EC_INLINE struct affinity *affinity_slot(__u32 ifindex, __u32 hash)
{
	__u32 slot = shares_slot(ifindex, hash, AFFINITY_EACH, AFFINITY_SLOTS);

	return bpf_map_lookup_elem(&affinity, &slot);
}

EC_INLINE bool affinity_is(const struct affinity *a, const struct scratch *s, __u32 set)
{
	return a->ifindex == s->owner.ifindex && a->set == set && addr_equal(&a->client, &s->pkt.tuple.src);
}

/* The backend with this number, if it serves this set as it did in this generation; NULL: it does not. */
EC_INLINE const struct backend *affinity_backend(__u32 number, __u32 generation, __u32 set)
{
	const struct backend *b = backend_get(number);

	return b && backend_is(b, set, generation, BACKEND_SERVING) ? b : NULL;
}

/* Whether a record still binds its client: the pod is there, the time has not run out, and the backend serves. */
EC_INLINE bool affinity_is_live(const struct affinity *a, __u64 stamp, __u64 now)
{
	__u32 number = a->set;
	const struct service_set *set = bpf_map_lookup_elem(&sets, &number);

	return stamp && set && stamp + set->affinity * NSEC_PER_SEC > now && flow_owner_lives(a->ifindex) &&
	       affinity_backend(a->backend, a->generation, number);
}

/* Whether a backend is on this node: a pod, or in the host's network. */
EC_CALL bool affinity_is_local(const struct backend *b)
{
	struct destination *to;

	if (path_endpoint(&b->address))
		return true;
	to = path_destination(&b->address);
	return to && to->kind == DESTINATION_HOST;
}

/* The record's backend, if it still serves and, where only local ones count, is on this node; 0: it is not. */
EC_INLINE __u32 affinity_usable(__u32 number, __u32 generation, __u32 set, bool local)
{
	const struct backend *b = affinity_backend(number, generation, set);

	return b && (!local || affinity_is_local(b)) ? number : 0;
}

/* affinity_find for a client that is no pod. */
EC_INLINE __u32 affinity_find_client(const struct addr *client, __u32 set, __u32 seconds, bool local)
{
	struct client_key key = {.client = *client, .set = set};
	const struct client *c = bpf_map_lookup_elem(&clients, &key);

	if (!c || c->last_seen + seconds * NSEC_PER_SEC <= bpf_ktime_get_coarse_ns())
		return 0;
	return affinity_usable(c->backend, c->generation, set, local);
}

/* affinity_keep for a client that is no pod. */
EC_INLINE void affinity_keep_client(const struct addr *client, const struct target *t)
{
	struct client_key key = {.client = *client, .set = t->set};
	struct client c = {
		.backend = t->backend,
		.generation = t->generation,
		.last_seen = bpf_ktime_get_coarse_ns(),
	};

	bpf_map_update_elem(&clients, &key, &c, BPF_ANY);
}

/*
 * The number of the backend that the packet's source, an address of the owner, has kept of
 * a set for less than so many seconds; 0: none. local: those of other nodes do not count.
 */
EC_CALL __u32 affinity_find(const struct scratch *s, __u32 set, __u32 seconds, bool local)
{
	__u32 hash = affinity_hash(&s->pkt.tuple.src, set), number, generation;
	__u64 stamp, now = bpf_ktime_get_coarse_ns();
	struct affinity *a;

	if (!s->owner.ifindex)
		return affinity_find_client(&s->pkt.tuple.src, set, seconds, local);
	for (int i = 0; i < AFFINITY_WAYS; i++) {
		a = affinity_slot(s->owner.ifindex, hash + i);
		if (!a)
			return 0;
		stamp = shares_stamp(&a->last_seen);
		barrier();
		if (stamp <= SHARES_BUSY || stamp + seconds * NSEC_PER_SEC <= now || !affinity_is(a, s, set))
			continue;
		number = a->backend;
		generation = a->generation;
		barrier();
		/* Else another CPU has begun to write it. */
		return shares_stamp(&a->last_seen) == stamp ? affinity_usable(number, generation, set, local) : 0;
	}
	return 0;
}

/* Writes a record if its stamp is still the given one: that the packet's source keeps the target. */
EC_INLINE void affinity_write(struct affinity *a, __u64 stamp, const struct scratch *s)
{
	if (!shares_begin(&a->last_seen, stamp))
		return;
	a->client = s->pkt.tuple.src;
	a->set = s->target.set;
	a->backend = s->target.backend;
	a->generation = s->target.generation;
	a->ifindex = s->owner.ifindex;
	shares_end(&a->last_seen);
}

/* From now on the packet's source, which opens a flow to the target, keeps that. */
EC_GLOBAL int affinity_keep(const struct scratch *s)
{
	__u64 stamp, found = 0, used, oldest = ~0ULL, now = bpf_ktime_get_coarse_ns();
	struct affinity *a, *chosen = NULL;
	__u32 hash;

	if (!s)
		return 0;
	if (!s->owner.ifindex) {
		affinity_keep_client(&s->pkt.tuple.src, &s->target);
		return 0;
	}
	hash = affinity_hash(&s->pkt.tuple.src, s->target.set);
	for (int i = 0; i < AFFINITY_WAYS; i++) {
		a = affinity_slot(s->owner.ifindex, hash + i);
		if (!a)
			return 0;
		stamp = shares_stamp(&a->last_seen);
		if (stamp == SHARES_BUSY)
			continue;
		if (affinity_is(a, s, s->target.set)) {
			affinity_write(a, stamp, s);
			return 0;
		}
		used = affinity_is_live(a, stamp, now) ? stamp : 0;
		if (used < oldest && (!used || a->ifindex == s->owner.ifindex)) {
			chosen = a;
			found = stamp;
			oldest = used;
		}
	}
	if (chosen)
		affinity_write(chosen, found, s);
	return 0;
}

#endif
