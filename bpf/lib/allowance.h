/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What the node does for each pod only so often, since it costs the node or others more than the pod. */
#ifndef EC_LIB_ALLOWANCE_H
#define EC_LIB_ALLOWANCE_H

#include "bpf/lib/maps.h"

/* How many a pod gets at once. */
#define ALLOWANCE_BURST 100

/* How often one that another processor takes at the same moment is tried for: only a flood fails as often. */
#define ALLOWANCE_TRIES 4

/*
 * Takes something of which the pod gets one in each interval, in ns (GCRA: allowance_until
 * is the theoretical arrival time of the next one).
 */
EC_INLINE bool allowance_take(struct device *dev, __u64 interval)
{
	__u64 was, now, at;

	for (int i = 0; i < ALLOWANCE_TRIES; i++) {
		was = *(volatile __u64 *)&dev->allowance_until;
		now = bpf_ktime_get_coarse_ns();
		at = was > now ? was : now;
		if (at - now >= ALLOWANCE_BURST * interval)
			return false;
		if (__sync_val_compare_and_swap(&dev->allowance_until, was, at + interval) == was)
			return true;
	}
	return false;
}

#endif
