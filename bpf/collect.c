//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * ec_collect: one sweep over a flow table, run by the agent as a syscall program.
 * An entry goes only after its stamp, as read, was exchanged for a tombstone: a
 * packet that renews the stamp meanwhile keeps its flow. Both halves of a pair go
 * together, and the counters with them.
 */
#include "bpf/lib/collect.h"

/* A pair, met by its forward half. */
static long collect_forward(void *map, const struct tuple *key, struct snat_entry *forward, struct collect_args *args)
{
	struct tuple out = *key;
	struct tuple world = nat_reverse_key(&out, &forward->to_address, forward->to_port);
	struct snat_entry *reverse = bpf_map_lookup_elem(&snat_reverse, &world);
	__u64 seen = forward->last_seen, latest = seen, answered = 0;
	__u32 ifindex = forward->ifindex;
	__u8 in = 0;

	args->scanned++;
	if (reverse && nat_names(reverse, &out, ifindex)) {
		in = reverse->state;
		answered = reverse->last_seen;
		if ((__s64)(answered - seen) > 0)
			latest = answered;
	}
	if (!flow_is_left(&forward->last_seen) && flow_owner_lives(ifindex) &&
	    !collect_expired(args, out.proto, forward->state, in, latest))
		return 0;
	if (!flow_claim(&forward->last_seen, seen))
		return 0;
	if (answered && reverse) {
		if (!flow_claim(&reverse->last_seen, answered)) {
			/* Answered just now: it stays. Another sweep's tombstone is no stamp to copy. */
			answered = reverse->last_seen;
			forward->last_seen = answered ?: seen;
			return 0;
		}
		bpf_map_delete_elem(&snat_reverse, &world);
	}
	nat_remove(&out, forward);
	args->deleted++;
	return 0;
}

/* A reverse half whose forward half is missing. */
static long collect_reverse(void *map, const struct tuple *key, struct snat_entry *reverse, struct collect_args *args)
{
	struct tuple world = *key;
	struct tuple out = nat_reverse_key(&world, &reverse->to_address, reverse->to_port);
	struct snat_entry *forward = bpf_map_lookup_elem(&snat, &out);
	__u64 seen = reverse->last_seen;
	__u32 ifindex = reverse->ifindex;

	if (forward && nat_leads_to(forward, &world, ifindex))
		return 0;
	if (!flow_is_left(&reverse->last_seen) && flow_owner_lives(ifindex) &&
	    !collect_expired(args, world.proto, 0, reverse->state, seen))
		return 0;
	if (!flow_claim(&reverse->last_seen, seen))
		return 0;
	/* One that was left belonged to a pair that is counted no more. */
	if (!bpf_map_delete_elem(&snat_reverse, &world) && seen != FLOW_LEFT)
		collect_release(USAGE_SNAT, ifindex);
	args->deleted++;
	return 0;
}

static long collect_conntrack(void *map, const struct tuple *key, struct conntrack_entry *e, struct collect_args *args)
{
	struct tuple replies = *key;
	__u64 seen = e->last_seen;
	__u32 ifindex = e->ifindex;

	args->scanned++;
	if (!flow_is_left(&e->last_seen) && flow_owner_lives(ifindex) &&
	    !collect_expired(args, replies.proto, e->from_world, e->from_pod, seen))
		return 0;
	if (!flow_claim(&e->last_seen, seen))
		return 0;
	if (!bpf_map_delete_elem(&conntrack, &replies))
		collect_release(USAGE_CONNTRACK, ifindex);
	args->deleted++;
	return 0;
}

/*
 * One function a table: merged into one call instruction, two sweeps of different
 * maps are refused by Linux 6.1 ("tail_call abusing map_ptr"; 6.12 takes them).
 */
EC_CALL void collect_snat(struct collect_args *a)
{
	bpf_for_each_map_elem(&snat, collect_forward, a, 0);
}

EC_CALL void collect_snat_reverse(struct collect_args *a)
{
	bpf_for_each_map_elem(&snat_reverse, collect_reverse, a, 0);
}

EC_CALL void collect_conntracked(struct collect_args *a)
{
	bpf_for_each_map_elem(&conntrack, collect_conntrack, a, 0);
}

SEC("syscall")
int ec_collect(struct collect_args *args)
{
	struct collect_args a = *args;

	switch (a.table) {
	case USAGE_SNAT:
		collect_snat(&a);
		collect_snat_reverse(&a);
		break;
	case USAGE_CONNTRACK:
		collect_conntracked(&a);
		break;
	}
	args->scanned = a.scanned;
	args->deleted = a.deleted;
	return 0;
}
