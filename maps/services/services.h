/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * services: frontends, by address, port and protocol, and whose they are. sets: for each
 * port of a Service, the slots in which its backends stand (maps/backends). set_names:
 * which Service that is, for operators and for an agent that starts. source_range: who may
 * ask a set's load balancer, where not everybody may. The agent writes them.
 */
#ifndef EC_MAPS_SERVICES_H
#define EC_MAPS_SERVICES_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

/*
 * With port and protocol 0 it is the entry of an address: that some Service has it, or this node. A NodePort is one
 * frontend for each family, whose address is :: or ::ffff:0.0.0.0: it stands for the addresses with SERVICE_NODE.
 */
struct service_key {
	struct addr address;
	__be16 port;
	__u8 proto;
	__u8 pad;
};

enum service_flags {
	SERVICE_CLUSTER_IP = 1,      /* of an address: a ClusterIP, where there is nothing but Services */
	SERVICE_ANSWERS = 2,         /* of an address: a port of it has backends, so echo requests are answered */
	SERVICE_LOCAL = 4,           /* of a port: everybody uses the set Local (internalTrafficPolicy) */
	SERVICE_NODE = 8,            /* of an address: the node's own, on which NodePorts answer */
	SERVICE_EXTERNAL_LOCAL = 16, /* of a port: clients outside use the set Local (externalTrafficPolicy) */
	SERVICE_RANGES = 32,         /* of a port: only sources in source_range may ask (loadBalancerSourceRanges) */
	SERVICE_OWN = 64, /* of an address: the node's own, on which host ports answer; NODE is never without */
};

/* In place of a set's number: a host port, which has one backend (maps/hostports). */
enum set_number {
	SET_HOST_PORT = 65536, /* sets has no such index */
};

struct service {
	__u32 set;   /* index in sets; 0 in the entry of an address */
	__u32 flags; /* enum service_flags */
};

/*
 * Where a set's block is: the first slot, then how many backends are in the sets Cluster and Local, one behind the
 * other.
 */
enum set_layout {
	SET_FIRST_SHIFT = 40, /* 24 bits */
	SET_CLUSTER_SHIFT = 20,
	SET_COUNT_MASK = 1048575, /* 20 bits, as the count of Local has below */
};

/* Index 0 is no set. */
struct service_set {
	__u64 block;    /* enum set_layout: one word, so that it is read and written at once */
	__u32 affinity; /* seconds for which a client keeps its backend (sessionAffinity: ClientIP); 0: it does not */
	__u32 pad;
};

enum service_name_layout {
	SERVICE_NAME_LEN = 64, /* with a final zero byte */
};

struct service_name_key {
	__u32 set;
};

/* Zero-terminated; the port's name is empty if it has none. */
struct service_name {
	char namespace[SERVICE_NAME_LEN];
	char name[SERVICE_NAME_LEN];
	char port_name[SERVICE_NAME_LEN];
	__be16 port; /* of the Service */
	__u8 proto;
	__u8 pad;
};

/* prefix_len counts the 32 bits of the set, then those of the 16-byte address: an IPv4 /24 is 152. */
struct source_range_key {
	__u32 prefix_len;
	__u32 set;
	struct addr source;
};

struct source_range {
	__u32 set; /* as in the key */
};

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct service_key);
	__type(value, struct service);
	__uint(max_entries, 131072);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} services SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct service_set);
	__uint(max_entries, 65536);
} sets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct service_name_key);
	__type(value, struct service_name);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} set_names SEC(".maps");

/* The agent writes a set's ranges before the frontend that asks for them, and removes them after it. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct source_range_key);
	__type(value, struct source_range);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} source_range SEC(".maps");

#endif
