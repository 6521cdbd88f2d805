/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Choosing a backend of a Service's port: one of its set, whose numbers stand in a block of slots (maps/backends). */
#ifndef EC_LIB_BACKEND_H
#define EC_LIB_BACKEND_H

#include "bpf/lib/maps.h"
#include "bpf/lib/path.h"
#include "bpf/lib/scratch.h"

/* How many backends of a set are tried when those that are chosen serve no more. */
#define BACKEND_TRIES 8

/* A backend to which datagrams go on has one of these flags. */
#define BACKEND_GOES_ON (BACKEND_SERVING | BACKEND_ANSWERS)

/* A range of slots. */
struct backend_range {
	__u32 first;
	__u32 count;
};

EC_INLINE struct backend *backend_get(__u32 number)
{
	return bpf_map_lookup_elem(&backends, &number);
}

/* Whether a backend is the same as it was, and has one of the flags. */
EC_INLINE bool backend_is(const struct backend *b, __u32 set, __u32 generation, __u8 flags)
{
	return b->set == set && b->generation == generation && (b->flags & flags);
}

/* The slots to choose from; local: those of this node's endpoints. */
EC_INLINE enum verdict backend_slots(const struct service_set *set, bool local, struct backend_range *range)
{
	__u64 block = *(const volatile __u64 *)&set->block;
	__u32 all = block >> SET_CLUSTER_SHIFT & SET_COUNT_MASK, locals = block & SET_COUNT_MASK;

	range->first = block >> SET_FIRST_SHIFT;
	range->count = all;
	if (local) {
		range->first += all;
		range->count = locals;
	}
	if (range->count)
		return VERDICT_GO_ON;
	return all ? -DROP_NO_LOCAL_BACKEND : -DROP_NO_BACKEND;
}

/*
 * Makes a backend the target; false: it has none of the flags any more, or it is a pod of
 * this node that is gone. A process may sleep here for longer than numbers wait to be used
 * again, so it is looked at again after the copy.
 */
EC_GLOBAL bool backend_take(struct target *t, __u32 number, __u32 set, __u8 flags)
{
	const struct config *config = config_get();
	const struct backend *b = backend_get(number);
	const struct endpoint *ep;
	__u8 family;

	if (!t || !b || !config || b->set != set || !(b->flags & flags))
		return false;
	t->generation = b->generation;
	barrier();
	family = addr_is_v4(&b->address) ? FAMILY_IPV4 : FAMILY_IPV6;
	ep = path_endpoint(&b->address);
	if (!ep && path_is_ours(config, family, &b->address))
		return false;
	t->pod = ep ? ep->ifindex : 0;
	t->address = b->address;
	t->port = b->port;
	t->set = set;
	t->backend = number;
	t->flags = FLOW_SERVICE | (b->flags & BACKEND_ON_NODE ? FLOW_ON_NODE : 0);
	barrier();
	return backend_is(b, set, t->generation, flags);
}

/* A search for a backend among the slots of a set. */
struct backend_search {
	struct target *target;
	struct backend_range range;
	__u32 set;
	__u32 at; /* the slot's number in the range */
	bool found;
};

/* One try: 1 ends the search. */
static long backend_search_step(__u32 i, struct backend_search *b)
{
	__u32 at = b->range.first + b->at;
	struct slot *slot = bpf_map_lookup_elem(&slots, &at);

	b->found = slot && backend_take(b->target, slot->backend, b->set, BACKEND_SERVING);
	if (++b->at >= b->range.count)
		b->at = 0;
	return b->found;
}

/*
 * Chooses the backend of a new flow to a set, each with the same probability, and makes it
 * the target. While the maps name some that have just ended, the next is tried.
 */
EC_CALL enum verdict backend_choose(struct target *t, __u32 number, const struct service_set *set, bool local)
{
	struct backend_search b = {.target = t, .set = number};
	enum verdict verdict = backend_slots(set, local, &b.range);

	if (verdict)
		return verdict;
	b.at = (__u64)bpf_get_prandom_u32() * b.range.count >> 32;
	bpf_loop(BACKEND_TRIES, backend_search_step, &b, 0);
	return b.found ? VERDICT_GO_ON : -DROP_NO_BACKEND;
}

#endif
