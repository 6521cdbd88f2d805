/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The one exit of every program: a result becomes a TC action and exactly one
 * counter. A result is an enum traffic_event, or a negated enum drop_reason.
 */
#ifndef EC_LIB_COUNT_H
#define EC_LIB_COUNT_H

#include "bpf/lib/maps.h"

EC_INLINE void count_traffic(enum direction direction, __u32 event, __u64 packets, __u64 bytes)
{
	__u32 key = direction * TRAFFIC_SLOTS + event;
	struct counter *c = bpf_map_lookup_elem(&traffic, &key);

	if (!c)
		return;
	c->packets += packets;
	c->bytes += bytes;
}

EC_CALL int count_drop(struct __sk_buff *ctx, enum direction direction, __u32 reason)
{
	__u32 key = direction * DROP_SLOTS + (reason & (DROP_SLOTS - 1));
	struct counter *c = bpf_map_lookup_elem(&drops, &key);

	if (c) {
		c->packets++;
		c->bytes += ctx->len;
	}
	/* The kernel's unreachable route answers these with an ICMP error. */
	if (reason == DROP_NO_ENDPOINT || reason == DROP_NODE_OFF_LINK)
		return EC_ACT_UNSPEC;
	/* It may be the node's own, which the stack puts together. */
	if (reason == DROP_FRAGMENT_UNKNOWN && direction == DIRECTION_FROM_UPLINK)
		return EC_ACT_UNSPEC;
	return EC_ACT_SHOT;
}

/* Counts the packet under the result and returns the TC action that it means. */
EC_INLINE int finish(struct __sk_buff *ctx, enum direction direction, int result)
{
	if (result < 0)
		return count_drop(ctx, direction, -result);
	count_traffic(direction, result, 1, ctx->len);
	return result == TRAFFIC_STACK ? EC_ACT_UNSPEC : EC_ACT_REDIRECT;
}

#endif
