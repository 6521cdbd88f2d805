/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* drops: packets that did not get through, per CPU, by direction and reason. */
#ifndef EC_MAPS_DROPS_H
#define EC_MAPS_DROPS_H

#include "maps/counters/counters.h"

/* Append only: the numbers are part of the map layout. The comments are what ebpfctl prints. */
enum drop_reason {
	DROP_NONE,             /* not a drop */
	DROP_INVALID,          /* malformed or truncated headers */
	DROP_NOT_IP,           /* neither IP nor a question for the gateway's address */
	DROP_IPV6_UNSUPPORTED, /* IPv6, which this version does not carry */
	DROP_SPOOFED_SOURCE,   /* source is not an address that the sender can have */
	DROP_NO_ENDPOINT,      /* no pod has this address (answered: host unreachable) */
	DROP_NODE_OFF_LINK,    /* the pod's node is on no link of ours (answered: host unreachable) */
	DROP_UNKNOWN_PROTOCOL, /* a protocol that cannot be masqueraded */
	DROP_NO_MAPPING,       /* belongs to no masqueraded flow and cannot open one */
	DROP_SNAT_EXHAUSTED,   /* no free port towards this destination */
	DROP_SNAT_LIMIT,       /* the pod holds its share of the snat table */
	DROP_SNAT_FULL,        /* the snat table is full */
	DROP_CONNTRACK_LIMIT,  /* the pod holds its share of the conntrack table */
	DROP_CONNTRACK_FULL,   /* the conntrack table is full */
	DROP_FLOW_COLLISION,   /* the world opens a flow whose tuple another one has */
	DROP_FRAGMENT_UNKNOWN, /* a later fragment whose first was not seen (from an uplink: left to the stack) */
	DROP_NO_SNAT_ADDRESS,  /* no address to masquerade to: the uplink has none, or the node has lost the flow's */
	DROP_WRITE_FAILED,     /* the kernel refused a change to the packet */
	DROP_IPSEC_POLICY,     /* masqueraded it would fall under an IPsec policy of the host, in clear */
	DROP_FORGED_ERROR,     /* an ICMP error that quotes a packet between others */
	DROP_ICMP_REDIRECT,    /* an ICMP redirect, which no pod may send or follow */
	DROP_TABLE_BUSY,       /* the kernel would not write to a flow table at this moment */
	DROP_BAD_OFFLOAD,      /* asks for a checksum to be written where none belongs */
	DROP_WRONG_UPLINK,     /* source is not reached through the uplink that it came by */
	DROP_PORT_LIMIT,       /* the pod holds its share of the ports towards this destination */
	DROP_REASONS,
};

/* The key is direction * DROP_SLOTS + reason. */
enum drop_layout {
	DROP_SLOTS = 64,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct counter);
	__uint(max_entries, DIRECTION_SLOTS * DROP_SLOTS);
} drops SEC(".maps");

#endif
