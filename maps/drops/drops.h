/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* drops: packets that did not get through, per CPU, by direction and reason. The programs write it. */
#ifndef EC_MAPS_DROPS_H
#define EC_MAPS_DROPS_H

#include "maps/counters/counters.h"

/* Append only: the numbers are part of the map layout. The comments are what ebpfctl prints. */
enum drop_reason {
	DROP_NONE,             /* not a drop */
	DROP_INVALID,          /* malformed or truncated headers */
	DROP_NOT_IP,           /* neither IP nor an ARP request for the gateway, or with a VLAN tag */
	DROP_LINK_SCOPE,       /* IPv6 of the link alone, other than a neighbour solicitation for the gateway */
	DROP_SPOOFED_SOURCE,   /* source is not an address that the sender can have */
	DROP_NO_ENDPOINT,      /* no pod has this address (answered: host unreachable) */
	DROP_NODE_OFF_LINK,    /* no link and no tunnel leads to the node (pods are answered: host unreachable) */
	DROP_UNKNOWN_PROTOCOL, /* a protocol that cannot be masqueraded (pods are answered: host unreachable) */
	DROP_NO_MAPPING,       /* belongs to no flow that is masqueraded or to a Service, and cannot open one */
	DROP_SNAT_EXHAUSTED,   /* no free port towards this destination (pods are answered: host unreachable) */
	DROP_SNAT_LIMIT,       /* the pod, client outside or all the world has used up its share of the snat table */
	DROP_SNAT_FULL,        /* the snat table is full */
	DROP_CONNTRACK_LIMIT,  /* the pod has used up its share of the conntrack table */
	DROP_CONNTRACK_FULL,   /* the conntrack table is full */
	DROP_FLOW_COLLISION,   /* opens a flow straight to a pod that has another with its tuple */
	DROP_FRAG_NOT_FOUND,   /* a later fragment without its first (from an uplink: passed to the stack) */
	DROP_NO_SNAT_ADDRESS,  /* no address to masquerade to: the uplink has none, or the node has lost the flow's */
	DROP_WRITE_FAILED,     /* the kernel refused a change to the packet */
	DROP_IPSEC_POLICY,     /* unencrypted where an IPsec policy of the host applies: masqueraded, or to a Service */
	DROP_FORGED_ERROR,     /* an ICMP error about no packet of the pod's, or that closes the tunnel to IPv6 */
	DROP_ICMP_REDIRECT,    /* an ICMP redirect, which no pod may send or follow */
	DROP_TABLE_BUSY,       /* the kernel could not write to a flow table at that moment */
	DROP_BAD_OFFLOAD,      /* asks the kernel to write a checksum where none belongs */
	DROP_WRONG_UPLINK,     /* the host has no route to the source through the uplink that it arrived on */
	DROP_PORT_LIMIT,       /* the pod, client outside or all the world has used up its share of the ports there */
	DROP_TUNNEL_PORT,   /* to a tunnel port: with the node's address, by others than its host, or by the tunnel */
	DROP_TUNNEL_VNI,    /* came through the tunnel for another network: the VNI is not ours */
	DROP_TUNNEL_NODE,   /* came through the tunnel from an address that is no known node's */
	DROP_TUNNEL_SOURCE, /* came through the tunnel from a node whose pod or address the source is not */
	DROP_TUNNEL_DESTINATION, /* came through the tunnel for what is neither a pod nor an address of this node */
	DROP_TUNNEL_FAILED,      /* the kernel refused to read or write the packet's tunnel header */
	DROP_EXTENSION_HEADERS,  /* more IPv6 extension headers than are read, or malformed ones */
	DROP_NEIGHBOUR_LIMIT,    /* the pod sends to too many neighbours of the node that do not answer */
	DROP_TOO_BIG,            /* larger than the path's MTU, and not to be fragmented; its sender is told the MTU */
	DROP_NO_BACKEND,         /* the Service has no endpoints (answered: connection refused) */
	DROP_NO_LOCAL_BACKEND,   /* the Service's traffic policy is Local, and no endpoint is on this node */
	DROP_NO_SERVICE_PORT,    /* no Service has this port at the address (answered: connection refused) */
	DROP_NO_SERVICE,         /* no Service has this address of a service CIDR, or this port of a load balancer's */
	DROP_BACKEND_GONE,       /* TCP to a Service's backend that is gone (answered by a RST) */
	DROP_SERVICE_TTL,        /* the TTL ran out where only the programs can say so (answered: time exceeded) */
	DROP_SERVICE_OPTIONS,    /* IP options, in a Service's packet that the programs have to send themselves */
	DROP_SOURCE_RANGE,       /* the load balancer's address is not for this source (loadBalancerSourceRanges) */
	DROP_SERVICE_ROUTE,      /* no route for a Service's packet that the programs have to send themselves */
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
