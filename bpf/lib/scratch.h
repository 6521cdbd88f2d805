/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Scratch: what the steps of one packet's walk hand to each other. It lies in a
 * map, since a chain of calls has 512 bytes of stack, and each frame of it counts
 * in steps of 32 on Linux 6.1.
 *
 * One record a CPU is enough for programs at tc: they run with softirqs off, so
 * none interrupts another, and none calls another. It is not for programs that
 * run in process context (ec_collect), nor for a PREEMPT_RT kernel, on which the
 * loader refuses.
 */
#ifndef EC_LIB_SCRATCH_H
#define EC_LIB_SCRATCH_H

#include "bpf/lib/pkt.h"
#include "maps/snat/snat.h"

/* The packet inside an ICMP error, and where it stands (icmp.h). */
struct inner {
	struct tuple tuple;
	__u32 ip_off;
	__u32 l4_off;
	__u32 end; /* of the IP packet that quotes it */
	__be16 ip_check;
};

/* What an end of the inner packet becomes (icmp.h). */
struct inner_change {
	__be32 from;
	__be32 to;
	__be16 old_port;
	__be16 port;
	enum end end;
};

/* What a flow is masqueraded for (open.h). */
struct owner {
	struct addr address; /* that the source becomes */
	__u32 ifindex;       /* the pod's generation, 0 for the node itself */
	__u32 flags;         /* enum flow_flags */
	enum direction direction;
};

/* A masqueraded flow, by the keys of both its halves (nat.h), and what a half that is deleted said (reap.h). */
struct pair {
	struct tuple out;
	struct tuple world;
	__u32 ifindex;
	__u32 flags;
};

struct scratch {
	struct pkt pkt;
	struct inner inner;
	struct inner_change change;
	struct owner owner;
	/* Of the pair that is being made, in either table. */
	struct tuple key;
	struct snat_entry entry;
	/* One that may have ended. */
	struct pair pair;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct scratch);
	__uint(max_entries, 1);
} scratch SEC(".maps");

/* As the steps before have left it. NULL only for the verifier. */
EC_INLINE struct scratch *scratch_get(void)
{
	__u32 key = 0;

	return bpf_map_lookup_elem(&scratch, &key);
}

/* The same for a new packet, of which nothing is known yet. */
EC_INLINE struct scratch *scratch_new(void)
{
	struct scratch *s = scratch_get();

	if (!s)
		return NULL;
	__builtin_memset(&s->pkt, 0, sizeof(s->pkt));
	s->owner.ifindex = 0;
	return s;
}

#endif
