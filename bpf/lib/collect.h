/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The arguments of ec_collect, and the one rule by which an idle flow ends. */
#ifndef EC_LIB_COLLECT_H
#define EC_LIB_COLLECT_H

#include "bpf/lib/nat.h"

/*
 * now is CLOCK_MONOTONIC in ns, table an enum usage_table. Under pressure the
 * lifetimes of all but established TCP connections are a quarter. scanned and
 * deleted are answers, in flows.
 */
struct collect_args {
	__u64 now;
	__u32 table;
	__u32 pressure;
	__u64 scanned;
	__u64 deleted;
};

EC_INLINE bool collect_expired(const struct collect_args *args, __u8 proto, __u8 out, __u8 in, __u64 last_seen)
{
	__u64 lifetime = flow_lifetime_s(proto, out, in) * NSEC_PER_SEC;

	if (args->pressure && !flow_established(proto, out, in))
		lifetime /= 4;
	return (__s64)(args->now - last_seen) > (__s64)lifetime;
}

/* Takes a collected flow off the counts of its table and its pod. */
EC_INLINE void collect_release(enum usage_table table, __u32 ifindex)
{
	struct device *dev = flow_owner(ifindex);
	__u32 *held = NULL;

	if (dev)
		held = table == USAGE_SNAT ? &dev->snat_flows : &dev->conntrack_flows;
	flow_release(table, held);
}

#endif
