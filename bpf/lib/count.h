/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The one exit of every program: a verdict becomes a TC action and exactly one
 * counter.
 */
#ifndef EC_LIB_COUNT_H
#define EC_LIB_COUNT_H

#include "bpf/lib/maps.h"
#include "bpf/lib/verdict.h"

EC_INLINE void count_traffic(enum direction direction, enum traffic_event event, __u64 packets, __u64 bytes)
{
	__u32 key = direction * TRAFFIC_SLOTS + event;
	struct counter *c = bpf_map_lookup_elem(&traffic, &key);

	if (!c)
		return;
	c->packets += packets;
	c->bytes += bytes;
}

/* Counts a drop and returns its TC action. */
EC_CALL int count_drop(struct __sk_buff *ctx, enum direction direction, __u32 reason)
{
	__u32 key = direction * DROP_SLOTS + (reason & (DROP_SLOTS - 1));
	struct counter *c = bpf_map_lookup_elem(&drops, &key);

	if (c) {
		c->packets++;
		c->bytes += ctx->len;
	}
	/* The kernel's unreachable route answers these with an ICMP error, unless it has sent the packet already. */
	if ((reason == DROP_NO_ENDPOINT || reason == DROP_NODE_OFF_LINK) && direction != DIRECTION_TO_TUNNEL)
		return EC_ACT_UNSPEC;
	/* It may be the node's own, which the stack reassembles. */
	if (reason == DROP_FRAG_NOT_FOUND && direction == DIRECTION_FROM_UPLINK)
		return EC_ACT_UNSPEC;
	return EC_ACT_SHOT;
}

/* What a packet that is not dropped counts as. If no step has decided, it goes to the stack. */
EC_INLINE enum traffic_event count_event(enum verdict verdict)
{
	switch (verdict) {
	case VERDICT_DELIVERED:
		return TRAFFIC_DELIVERED;
	case VERDICT_FORWARDED:
		return TRAFFIC_FORWARDED;
	case VERDICT_ANSWERED:
		return TRAFFIC_ANSWERED;
	default:
		return TRAFFIC_STACK;
	}
}

/* Counts the packet and returns the TC action that the verdict means. */
EC_INLINE int finish(struct __sk_buff *ctx, enum direction direction, enum verdict verdict)
{
	enum traffic_event event = count_event(verdict);

	if (verdict < 0)
		return count_drop(ctx, direction, -verdict);
	count_traffic(direction, event, 1, ctx->len);
	return event == TRAFFIC_STACK ? EC_ACT_UNSPEC : EC_ACT_REDIRECT;
}

#endif
