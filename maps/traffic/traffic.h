/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * traffic: what became of the packets that were not dropped, per CPU. The programs write
 * it: every packet that one sees is counted once, here under one of the first four
 * events or in drops.
 */
#ifndef EC_MAPS_TRAFFIC_H
#define EC_MAPS_TRAFFIC_H

#include "maps/counters/counters.h"

enum traffic_event {
	TRAFFIC_DELIVERED,      /* redirected into a pod of this node */
	TRAFFIC_FORWARDED,      /* redirected out of an uplink, or into the tunnel */
	TRAFFIC_STACK,          /* passed on to other programs and the host's stack */
	TRAFFIC_ANSWERED,       /* answered by the program itself */
	TRAFFIC_SNAT_ALLOCATED, /* a new masqueraded flow got a port */
	TRAFFIC_SNAT_RETRIED,   /* a port was tried for a new flow and was in use */
	TRAFFIC_EVENTS,
};

/* The key is direction * TRAFFIC_SLOTS + event. */
enum traffic_layout {
	TRAFFIC_SLOTS = 16,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct counter);
	__uint(max_entries, DIRECTION_SLOTS * TRAFFIC_SLOTS);
} traffic SEC(".maps");

#endif
