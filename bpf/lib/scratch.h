/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Scratch: what the steps of one packet's walk share. It is in a map because a chain
 * of calls has 512 bytes of stack, with each frame rounded up to 32 on Linux 6.1.
 *
 * One record a CPU is enough for programs at tc: they run with softirqs off, so
 * none interrupts another. Programs that run in process context (ec_collect) must
 * not use it, and the loader refuses PREEMPT_RT kernels, where softirqs are preempted.
 */
#ifndef EC_LIB_SCRATCH_H
#define EC_LIB_SCRATCH_H

#include "bpf/lib/pkt.h"
#include "maps/snat/snat.h"

/* The packet that an ICMP error quotes (icmp.h). Offsets are in bytes from the start of the frame. */
struct inner {
	struct tuple tuple;
	__u32 ip_off;
	__u32 l4_off;
	__u32 end;       /* of the quoting IP packet */
	__be16 ip_check; /* of IPv4 */
	bool known;      /* its flow may be in a table */
};

/* How one end of the quoted packet changes (icmp.h). */
struct inner_change {
	struct addr from;
	struct addr to;
	__be16 old_port;
	__be16 port;
	enum end end;
};

/* An ICMP error behind the pseudo header of ICMPv6, which is zero for ICMP (answer.h). */
struct icmp_error {
	struct addr src;
	struct addr dst;
	__be32 len;
	__be32 proto;
	struct icmp_header icmp;
	__u8 quote[128];
};

/* A chain of IPv6 headers, and what has been read of it (ipv6.h). */
struct chain {
	__u32 off;     /* of the next header, in bytes from the start of the frame */
	__u32 end;     /* of the packet */
	__u32 id;      /* of the fragment header, host order */
	__u8 next;     /* protocol of the next header */
	__u8 fragment; /* enum fragment_kind */
	__u8 hop_by_hop;
	__u8 broken;
	__u8 may_be_jumbo; /* the kernel itself may have put a jumbo option into the packet */
	__u8 jumbo;        /* length of that option's header, or 0 */
};

/* A tuple for the kernel's lookups, which tell the families by its length: struct bpf_sock_tuple. */
union lookup {
	struct {
		__be32 src;
		__be32 dst;
		__be16 sport;
		__be16 dport;
	} v4;
	struct {
		struct addr src;
		struct addr dst;
		__be16 sport;
		__be16 dport;
	} v6;
};
_Static_assert(sizeof(union lookup) == sizeof(struct bpf_sock_tuple), "lookup is the kernel's");

/* Whom a flow is opened for, and how (open.h). */
struct owner {
	struct addr address; /* the new source address */
	__u32 ifindex;       /* the pod's generation, 0 for the world or the node itself */
	__u32 flags;         /* enum flow_flags */
	__u32 uplink;        /* that a pod's masqueraded packet leaves by; 0: it is none */
};

/* What a flow to a Service leads to (backend.h). */
struct target {
	struct addr address;
	__be16 port;
	__u16 pad;
	__u32 set; /* 0: no Service, but straight to a backend */
	__u32 backend;
	__u32 generation;
	__u32 pod;        /* its own, if it is a pod of this node (see endpoints) */
	__u32 flags;      /* enum flow_flags of a flow to it */
	bool taken_over;  /* netfilter has translated the flow until now, the pod's port included (takeover.h) */
	bool masqueraded; /* the source becomes the node's address, so the flow needs a port of that (way.h) */
	__be16 sport;     /* which the port has become; valid only where it is taken over */
};

/* What is known of a packet that may be to a Service (service.h). */
struct service_walk {
	__u32 flags;        /* what the destination's address is to Services (frontend_flags) */
	__u32 device;       /* enum device_flags of the owner */
	__u32 pod;          /* to which pod of this node alone the packet may go; 0: to any */
	bool opens;         /* a flow is to be opened, to the target */
	bool translated;    /* the packet is no longer what its sender has sent */
	bool answers_host;  /* it answers what the host's stack has sent (outside.h) */
	bool received;      /* of an error: it is about what the client has received, not about what that has sent */
	struct tuple sent;  /* what it was then; valid only then */
	struct tuple turns; /* what it becomes */
};

/* A masqueraded flow: the keys of its halves (nat.h), and the owner and flags of a half that was deleted (reap.h). */
struct pair {
	struct tuple forward_key;
	struct tuple reverse_key;
	__u32 ifindex;
	__u32 flags;
};

/* Of the holder's pairs that may give way to the flow to open, the stalest that was found (quota.h). */
struct spare {
	__u32 recent; /* when its opener has last sent (nat.h) */
	__u32 found;  /* how many there were */
	__u32 reaped; /* how many had ended, and were removed */
	__be16 port;
};

struct scratch {
	struct pkt pkt;
	enum direction direction; /* of the program */
	struct chain chain;
	struct inner inner;
	union lookup lookup;
	struct inner_change change;
	struct owner owner;
	struct target target;
	struct service_walk service;
	/* The half that is being inserted, in either table. */
	struct tuple key;
	struct snat_entry entry;
	/* A flow that may have ended. */
	struct pair pair;
	struct spare spare;
	/* What the owner is told (answer.h). */
	struct icmp_error error;
	__u32 mtu;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct scratch);
	__uint(max_entries, 1);
} scratch SEC(".maps");

/* The record as earlier steps left it. Never NULL, though the verifier wants that checked. */
EC_INLINE struct scratch *scratch_get(void)
{
	__u32 key = 0;

	return bpf_map_lookup_elem(&scratch, &key);
}

/* The record for a new packet, of which nothing is known yet. */
EC_INLINE struct scratch *scratch_new(enum direction direction)
{
	struct scratch *s = scratch_get();

	if (!s)
		return NULL;
	__builtin_memset(&s->pkt, 0, offsetof(struct pkt, rewrite_to));
	s->direction = direction;
	s->owner.ifindex = 0;
	s->owner.flags = 0;
	s->owner.uplink = 0;
	if (cfg.services) {
		s->service.translated = false;
		s->service.pod = 0;
	}
	return s;
}

#endif
