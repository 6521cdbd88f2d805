/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Paths: what an address was found to be and how it is reached, kept for a moment
 * on each CPU, so that a busy flow does not ask the prefix table and the kernel's
 * routes for every packet. A path is used for cfg.path_lifetime after it was
 * found: that late at most a change of destinations, uplinks, routes or rules is
 * seen.
 */
#ifndef EC_LIB_PATH_H
#define EC_LIB_PATH_H

#include "bpf/lib/maps.h"
#include "bpf/lib/pkt.h"

/* How long a neighbour that resolved is taken to go on resolving. */
#define PATH_NEIGHBOUR_NS (NSEC_PER_SEC / 10)

#define PATH_BITS 10

/*
 * The key stands in front: what the kernel's rules may ask for, apart from the
 * source address, which follows from the pod's interface. ifindex and nexthop
 * say where packets leave, mtu is in bytes of IP packet, snat_address is the
 * uplink's to masquerade to. found is CLOCK_MONOTONIC, ns.
 */
struct path {
	__u32 from; /* interface that the packets come from */
	__be32 address;
	__u32 proto;
	enum destination_kind kind;
	__u32 ifindex;
	__be32 nexthop;
	__u32 mtu;
	struct addr snat_address;
	__u32 pad;
	__u64 found;
};

/*
 * No other CPU and no other program reads or writes a slot meanwhile: programs at
 * tc run with softirqs off. Not pinned: the programs of each load have their own.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct path);
	__uint(max_entries, 1 << PATH_BITS);
} paths SEC(".maps");

/* The one slot that a path may stand in. */
EC_INLINE struct path *path_slot(__u32 from, __be32 address, __u32 proto)
{
	/* Multiplied by odd constants, each bit of the key reaches the uppermost bits. */
	__u32 hash = (address ^ proto) * 0x9e3779b1U + from * 0x85ebca6bU;
	__u32 slot = hash >> (32 - PATH_BITS);

	return bpf_map_lookup_elem(&paths, &slot);
}

/* Whether the slot holds this path, and has found it just now. */
EC_INLINE bool path_holds(const struct path *p, __u32 from, __be32 address, __u32 proto)
{
	return p->address == address && p->from == from && p->proto == proto &&
	       bpf_ktime_get_coarse_ns() - p->found < cfg.path_lifetime;
}

/* Keeps what was found until it is too old. */
EC_INLINE void path_keep(struct path *p, __u32 from, __be32 address, __u32 proto)
{
	p->from = from;
	p->address = address;
	p->proto = proto;
	p->found = bpf_ktime_get_coarse_ns();
}

/*
 * What an address is. Who asks without keeping it asks each time: where one program
 * still went by what it kept, and the other did not, the two directions of a flow
 * would part.
 */
EC_INLINE struct destination *path_destination(const struct addr *address)
{
	struct destination_key key = {.prefix_len = 128, .prefix = *address};

	return bpf_map_lookup_elem(&destinations, &key);
}

/*
 * Asks the kernel's routing table for a packet that arrived on this interface.
 * 0: leads to p->ifindex and the neighbour p->nexthop, which resolves, with
 * p->mtu; anything else is for the stack to decide.
 */
EC_CALL int path_route(struct __sk_buff *ctx, const struct pkt *pkt, __be32 dst, struct path *p)
{
	struct bpf_fib_lookup fib = {
		.family = EC_AF_INET,
		.l4_protocol = pkt->tuple.proto,
		.ifindex = ctx->ifindex,
		.ipv4_src = addr_v4(&pkt->tuple.src),
		.ipv4_dst = dst,
		.tot_len = 1, /* to be told the route's MTU; 0 would mean the device's */
	};

	if (bpf_fib_lookup(ctx, &fib, sizeof(fib), 0) != BPF_FIB_LKUP_RET_SUCCESS)
		return -1;
	/* The route may name an IPv6 neighbour for IPv4 (RFC 5549). */
	if (fib.family != EC_AF_INET)
		return -1;
	p->ifindex = fib.ifindex;
	p->nexthop = fib.ipv4_dst;
	p->mtu = fib.mtu_result;
	return 0;
}

/*
 * To a pod of another node over the uplink. The route's neighbour is looked at
 * once in PATH_NEIGHBOUR_NS: while it does not resolve, the stack queues the
 * packet, asks, and answers host unreachable.
 */
EC_INLINE int path_to_node(struct __sk_buff *ctx, const struct pkt *pkt, struct destination *to, struct path *p)
{
	__u64 now = bpf_ktime_get_coarse_ns();

	if (!to->ifindex)
		return -DROP_NODE_OFF_LINK;
	if (now - to->neighbour_checked > PATH_NEIGHBOUR_NS) {
		if (path_route(ctx, pkt, addr_v4(&to->node), p) || p->ifindex != to->ifindex)
			return TRAFFIC_STACK;
		to->neighbour_checked = now;
	}
	p->ifindex = to->ifindex;
	p->nexthop = addr_v4(&to->node);
	p->mtu = to->mtu;
	return 0;
}

/* By the kernel's routing table, if that leads out of an uplink of ours. */
EC_INLINE int path_by_route(struct __sk_buff *ctx, const struct pkt *pkt, struct path *p)
{
	struct uplink_key key;
	struct uplink *uplink;

	if (path_route(ctx, pkt, addr_v4(&pkt->tuple.dst), p))
		return TRAFFIC_STACK;
	key.ifindex = p->ifindex;
	uplink = bpf_map_lookup_elem(&uplinks, &key);
	if (!uplink)
		return TRAFFIC_STACK;
	p->snat_address = uplink->ipv4;
	return 0;
}

/* 0: the path is found; else a result for the packet, and nothing is kept. */
EC_CALL int path_search(struct __sk_buff *ctx, const struct pkt *pkt, struct path *p)
{
	struct destination *to = path_destination(&pkt->tuple.dst);
	int ret = 0;

	p->found = 0;
	if (to && (to->flags & DESTINATION_TO_STACK))
		return TRAFFIC_STACK;
	p->kind = to ? to->kind : DESTINATION_WORLD;
	switch (p->kind) {
	case DESTINATION_HOST:
	case DESTINATION_LOCAL:
		break;
	case DESTINATION_POD_CIDR:
		if (to)
			ret = path_to_node(ctx, pkt, to, p);
		break;
	default:
		ret = path_by_route(ctx, pkt, p);
	}
	if (!ret)
		path_keep(p, ctx->ifindex, addr_v4(&pkt->tuple.dst), pkt->tuple.proto);
	return ret;
}

#endif
