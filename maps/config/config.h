/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * config: what is the same for the whole node. struct config is the map's only value,
 * which the agent may change under running programs. struct node_config is constant for
 * a program's life (.rodata), so the verifier removes the code that it turns off.
 */
#ifndef EC_MAPS_CONFIG_H
#define EC_MAPS_CONFIG_H

#include "maps/wire/wire.h"

#pragma clang diagnostic push
#pragma clang diagnostic error "-Wpadded"

/* What is left to the host's stack, and what the loader is doing; the agent sets and clears them at any time. */
enum config_flags {
	CONFIG_POD_CIDR_TO_STACK = 1, /* an IPsec policy of the host covers this node's podCIDR */
	CONFIG_ROUTES_TO_STACK = 2,   /* the host's routes depend on more than bpf_fib_lookup knows */
	CONFIG_POLICIES = 4,          /* a destination has DESTINATION_TO_STACK */
	CONFIG_FLOWS_MOVE = 8, /* flow tables are being moved: a flow may be in a table that a program does not see */
	CONFIG_SERVICES = 16,  /* pods' packets to Services are translated here: pods' links carry ec_to_pod as well */
	CONFIG_YIELDS_IPV4 = 32, /* what is new to a Service is netfilter's, as long as kube-proxy's rules stand */
	CONFIG_YIELDS_IPV6 = 64, /* the same of IPv6, for which kube-proxy has rules of its own */
};

/* What netfilter's rules may translate on this node; 0: nothing. */
enum netfilter_nat {
	NETFILTER_MASQUERADES = 1, /* others' packets, which take ports of the node's addresses */
	NETFILTER_TRANSLATES = 2,  /* pods' packets as well */
};

/* What the tunnel has of a family. */
struct tunnel_addresses {
	struct addr source;  /* of outer packets of the family; zero: the kernel chooses */
	struct addr address; /* of the tunnel device: the host's, though in the podCIDR; zero: none */
};

/* The agent writes it at its start, and when the Node or what the stack decides changes. */
struct config {
	__u32 layout;                         /* LAYOUT_VERSION of the agent that made the maps */
	__u32 pod_cidr_lens[FAMILIES];        /* of the podCIDRs, in their own family: 24, not 120; 0: it has none */
	struct addr node_addresses[FAMILIES]; /* this node's InternalIPs; zero: it has none of the family */
	struct addr pod_cidr_addresses[FAMILIES]; /* this node's podCIDRs; zero: it has none of the family */
	__u32 flags;                              /* enum config_flags */
	__u32 tunnel_ifindex;                     /* of the tunnel device; 0: there is none */
	struct tunnel_addresses tunnel[FAMILIES];
};
_Static_assert(sizeof(struct config) == 148, "config is part of the map layout");

/* Ports in host order, beginning with first. */
struct port_range {
	__u32 first;
	__u32 count; /* 0: none */
};

enum snat_port_ranges {
	SNAT_PORT_RANGES = 4, /* how many make up the ports to masquerade to */
};

/* The loader sets it before the verifier sees the programs. */
struct node_config {
	__u32 masquerade; /* bits by enum family: what pods send to the world in it is masqueraded */
	__u32 mark;       /* skb mark bit of packets that our programs have sent out or translated */
	struct port_range snat_ports[SNAT_PORT_RANGES]; /* ports to masquerade to */
	struct port_range snat_held; /* ports that flows may hold which given_ports does not have: of older builds */
	/* Ports for pods' flows that begin with one below 1024. From their end on lie the node's. None: these get any.
	 */
	struct port_range snat_privileged;
	__u32 snat_entries; /* capacities of the flow tables */
	__u32 conntrack_entries;
	__u32 path_lifetime;   /* how long a path is cached, in ns; 0: not at all */
	__u32 netfilter_nat;   /* enum netfilter_nat */
	__u32 tunnel_port;     /* UDP port of all nodes' tunnels, in host order */
	__u32 tunnel_vni;      /* VXLAN network identifier of the cluster, 24 bits (RFC 7348) */
	__u32 tunnel_checksum; /* 1: the outer UDP checksum over IPv4 is computed, not 0; over IPv6 it always is */
	__u32 services;        /* 1: the programs serve Services, or host ports alone: they translate to backends */
	__u32 loopback;        /* bits by enum family: NodePorts answer on its loopback addresses */
	__u32 bridges;    /* 1: containers behind bridges of somebody else's are endpoints as well (maps/bridges) */
	__u64 host_netns; /* cookie of the host's network namespace, whose sockets reach Services; 0: none do */
};

#pragma clang diagnostic pop

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct config);
	__uint(max_entries, 1);
} config SEC(".maps");

#endif
