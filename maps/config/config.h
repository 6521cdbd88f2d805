/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * config: what is the same for the whole node. struct config is the map's one
 * value and may change under running programs; struct node_config is constant
 * for a program's life (.rodata), so the verifier removes what it turns off.
 */
#ifndef EC_MAPS_CONFIG_H
#define EC_MAPS_CONFIG_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

/* What the host's stack decides although the programs could, and what the loader is at. */
enum config_flags {
	CONFIG_POD_CIDR_TO_STACK = 1, /* this node's podCIDR is under a policy of the host */
	CONFIG_ROUTES_TO_STACK = 2,   /* its routes depend on more than the programs can ask for */
	CONFIG_POLICIES = 4,          /* there are destinations on which the stack decides */
	CONFIG_FLOWS_MOVE = 8,        /* flow tables move: what one does not hold may be in the other */
};

/*
 * layout is LAYOUT_VERSION of the agent that made the maps. node_* are this
 * node's InternalIPs, pod_cidr_* its podCIDRs, all zero where there is none;
 * *_len count bits of the family's own length (24, 64).
 */
struct config {
	__u32 layout;
	__u32 pod_cidr_ipv4_len;
	__u32 pod_cidr_ipv6_len;
	struct addr node_ipv4;
	struct addr node_ipv6;
	struct addr pod_cidr_ipv4;
	struct addr pod_cidr_ipv6;
	__u32 flags; /* enum config_flags */
};
_Static_assert(sizeof(struct config) == 80, "config is part of the map layout");

/*
 * Ports in host order, inclusive; capacities in entries; path_lifetime is how long the
 * programs go by what they found out about an address, in ns, 0 for not at all.
 * netfilter_nat says that netfilter translates flows on this node.
 */
struct node_config {
	__u32 masquerade;
	__u32 mark;
	__u32 snat_port_low;
	__u32 snat_port_high;
	__u32 snat_entries;
	__u32 conntrack_entries;
	__u32 path_lifetime;
	__u32 netfilter_nat;
};

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct config);
	__uint(max_entries, 1);
} config SEC(".maps");

#endif
