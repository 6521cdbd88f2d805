/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Paths: what an address is and how it is reached, cached for a moment on each CPU, so
 * that a busy flow does not look up destinations and the kernel's routes for every
 * packet. A path is used for cfg.path_lifetime: a change of destinations, uplinks,
 * routes or rules takes effect that late at most.
 */
#ifndef EC_LIB_PATH_H
#define EC_LIB_PATH_H

#include "bpf/lib/allowance.h"
#include "bpf/lib/ip.h"

/* How long a neighbour that resolved is assumed to resolve, and what was learnt of a tunnel to hold, in ns. */
#define PATH_NEIGHBOUR_NS (NSEC_PER_SEC / 10)

/* A pod may have the stack ask for one neighbour in each interval, in ns. */
#define PATH_ASK_INTERVAL (NSEC_PER_SEC / 20)

/* How long more packets to a neighbour that was asked for cost the pod nothing, in ns. */
#define PATH_ASKED_NS NSEC_PER_SEC

/* What the tunnel adds to a packet over IPv6: the inner Ethernet header, VXLAN, UDP and IPv6, in bytes. */
#define PATH_OUTER_IPV6 (14 + 8 + 8 + 40)

#define PATH_BITS 10

/*
 * The first three fields are the key: what the kernel's routing rules may depend on,
 * apart from the source address, which follows from the pod's interface.
 */
struct path {
	__u32 from; /* interface that the packets come from, or that of a way (way.h) */
	__u32 proto;
	struct addr address;
	enum destination_kind kind;
	__u32 ifindex;            /* of the uplink or the tunnel device */
	__u32 mtu;                /* in bytes of IP packet */
	__u64 found;              /* CLOCK_MONOTONIC, ns */
	__u64 asked;              /* the same: when the stack was last to ask for the address as a neighbour */
	struct addr node;         /* the next hop, or the tunnel's far end; of either family */
	struct addr snat_address; /* to masquerade to */
	struct addr source;       /* of packets that are no pod's (way.h) */
	__u8 mac[6];              /* as in struct destination */
	bool tunnel;              /* through the tunnel, not out of an uplink */
	bool learnt;              /* the tunnel's mtu is learnt_mtu, by which the stack fragments nothing */
	bool unresolved;          /* the kernel does not know the next hop's Ethernet address yet */
	bool redirected;          /* so was the last packet that could open a flow while it did not */
};

/*
 * No other CPU or program accesses a slot at the same time: programs at tc run with
 * softirqs off. Not pinned: the programs of each load have their own.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct path);
	__uint(max_entries, 1 << PATH_BITS);
} paths SEC(".maps");

/* The one slot that can hold the path of a packet from there. */
EC_INLINE struct path *path_slot(__u32 from, const struct pkt *pkt)
{
	/* Multiplied by odd constants, each bit of the key affects the uppermost bits. */
	__u32 hash = (addr_v4(&pkt->tuple.dst) ^ pkt->tuple.proto) * 0x9e3779b1U + from * 0x85ebca6bU;
	const __u32 *w = (const __u32 *)pkt->tuple.dst.bytes;
	__u32 slot;

	if (pkt->family == FAMILY_IPV6)
		hash += w[0] * 0xc2b2ae35U + w[1] * 0x27d4eb2fU + w[2] * 0x165667b1U;
	slot = hash >> (32 - PATH_BITS);
	return bpf_map_lookup_elem(&paths, &slot);
}

/* Whether the slot is that of the packet's path, however old. */
EC_INLINE bool path_names(const struct path *p, __u32 from, const struct pkt *pkt)
{
	return addr_equal(&p->address, &pkt->tuple.dst) && p->from == from && p->proto == pkt->tuple.proto;
}

/* Whether the slot holds the packet's path, and it is not too old. */
EC_INLINE bool path_holds(const struct path *p, __u32 from, const struct pkt *pkt)
{
	return path_names(p, from, pkt) && bpf_ktime_get_coarse_ns() - p->found < cfg.path_lifetime;
}

/* Begins a path to a destination of which this is the entry. */
EC_INLINE void path_begin(struct path *p, const struct destination *to)
{
	p->found = 0;
	p->kind = to ? to->kind : DESTINATION_WORLD;
	p->tunnel = false;
	p->learnt = false;
	p->unresolved = false;
}

/* Makes the slot the packet's path, as found now. Whether its neighbour resolves meanwhile, the next packet asks. */
EC_INLINE void path_keep(struct path *p, __u32 from, const struct pkt *pkt)
{
	p->from = from;
	p->address = pkt->tuple.dst;
	p->proto = pkt->tuple.proto;
	p->found = p->unresolved ? 0 : bpf_ktime_get_coarse_ns();
}

/*
 * What an address is. Not cached for the source of an arriving packet: a flow whose far
 * end ceases to be a pod has to be recorded before the pod's reply is looked up.
 */
EC_INLINE struct destination *path_destination(const struct addr *address)
{
	struct destination_key key = {.prefix_len = 128, .prefix = *address};

	return bpf_map_lookup_elem(&destinations, &key);
}

/* The bridge that containers with such an address are behind, with index 0 if the host itself has it; NULL: none. */
EC_INLINE struct endpoint *path_bridge(const struct addr *address)
{
	struct bridge_key key = {.prefix_len = 128, .prefix = *address};

	return bpf_map_lookup_elem(&bridges, &key);
}

/* The pod that has an address, or the bridge that it is behind; NULL: none of this node. */
EC_INLINE struct endpoint *path_endpoint(const struct addr *address)
{
	/* One key for both maps, since there is little stack. */
	struct bridge_key key = {.prefix_len = 128, .prefix = *address};
	struct endpoint *ep = bpf_map_lookup_elem(&endpoints, &key.prefix);

	if (!cfg.bridges || ep)
		return ep;
	ep = bpf_map_lookup_elem(&bridges, &key);
	return ep && ep->ifindex ? ep : NULL;
}

/* Whether what has this as its pod_mac is no pod, but a bridge with containers. */
EC_INLINE bool path_is_bridge(const __u8 *pod_mac)
{
	return cfg.bridges && !(pod_mac[0] | pod_mac[1] | pod_mac[2] | pod_mac[3] | pod_mac[4] | pod_mac[5]);
}

/*
 * Of what leaves the node with a pod's address, whether somebody else has sent it. Forwarded for the pod, it came in by
 * the pod's link. Without any, the host sends it from the pod's address.
 */
EC_INLINE bool path_foreign(const struct __sk_buff *ctx, const struct endpoint *ep)
{
	return ctx->ingress_ifindex && ctx->ingress_ifindex != ep->ifindex;
}

/* The address of the node within the cluster. */
EC_INLINE const struct addr *path_node_address(const struct config *config, __u8 family)
{
	const struct addr *node = &config->node_addresses[family & 1];

	return addr_is_zero(node) ? &config->tunnel[family & 1].address : node;
}

/* Whether an address is in this node's podCIDR, and not the host's own on the tunnel device or on a bridge. */
EC_INLINE bool path_is_ours(const struct config *config, __u8 family, const struct addr *address)
{
	struct endpoint *bridge;
	__u32 f = family & 1;

	if (!ip_in(f, address, &config->pod_cidr_addresses[f], config->pod_cidr_lens[f]) ||
	    addr_equal(address, &config->tunnel[f].address))
		return false;
	bridge = cfg.bridges ? path_bridge(address) : NULL;
	return !bridge || bridge->ifindex;
}

/*
 * To a next hop that does not resolve. If that is the destination itself, the stack keeps an entry for it, in a table
 * that the whole host shares, so a pod that sends to all addresses of a link, or the world (0), could leave no room for
 * the node's own neighbours. Routers on the way to others, and nodes, are few. A stream to one that is down must not
 * take the others' share.
 */
EC_CALL enum verdict path_ask(__u32 owner, __u32 from, const struct pkt *pkt, struct path *p)
{
	struct device_key key = {.ifindex = owner};
	__u64 now = bpf_ktime_get_coarse_ns();
	struct device *dev;

	if (p->kind == DESTINATION_NODE || !addr_equal(&p->node, &pkt->tuple.dst) ||
	    (path_names(p, from, pkt) && now - p->asked < PATH_ASKED_NS))
		return VERDICT_STACK;
	dev = bpf_map_lookup_elem(&devices, &key);
	if (dev && !allowance_take(dev, PATH_ASK_INTERVAL))
		return -DROP_NEIGHBOUR_LIMIT;
	path_keep(p, from, pkt);
	p->asked = now;
	return VERDICT_STACK;
}

/* Gives the path a device's MTU: of a neighbour that does not resolve the kernel says none. */
EC_INLINE bool path_device_mtu(struct __sk_buff *ctx, __u32 ifindex, struct path *p)
{
	p->mtu = 1; /* the length that is asked about, and then the answer */
	return bpf_check_mtu(ctx, ifindex, &p->mtu, 0, 0) >= 0;
}

/* Whether it is an uplink without an Ethernet header: the kernel resolves no neighbour there, and only makes itself an
 * entry. */
EC_INLINE bool path_is_bare(__u32 ifindex)
{
	struct uplink_key key = {.ifindex = ifindex};
	struct uplink *uplink = bpf_map_lookup_elem(&uplinks, &key);

	return uplink && (uplink->flags & UPLINK_BARE);
}

/*
 * Asks the kernel's routing table where a packet that arrived on this interface goes: out
 * of p->ifindex to the neighbour p->node, which resolves, with p->mtu; else the stack
 * decides. p->unresolved says whether it would only have to ask for the neighbour. The
 * kernel answers only for devices that forward, as the tunnel's does and an uplink may not.
 */
EC_CALL enum verdict path_route(struct __sk_buff *ctx, const struct pkt *pkt, const struct addr *dst, struct path *p)
{
	struct bpf_fib_lookup fib = {
		.l4_protocol = pkt->tuple.proto,
		.ifindex = ctx->ifindex,
		.tot_len = 1, /* for the route's MTU; 0 would give the device's */
	};
	const struct config *config;
	long found;

	fib.family = pkt->family == FAMILY_IPV6 ? EC_AF_INET6 : EC_AF_INET;
	if (pkt->family == FAMILY_IPV6) {
		__builtin_memcpy(fib.ipv6_src, &pkt->tuple.src, sizeof(fib.ipv6_src));
		__builtin_memcpy(fib.ipv6_dst, dst, sizeof(fib.ipv6_dst));
	} else {
		fib.ipv4_src = addr_v4(&pkt->tuple.src);
		fib.ipv4_dst = addr_v4(dst);
	}
	found = bpf_fib_lookup(ctx, &fib, sizeof(fib), 0);
	if (found == BPF_FIB_LKUP_RET_FWD_DISABLED && (config = config_get())) {
		fib.ifindex = config->tunnel_ifindex;
		found = bpf_fib_lookup(ctx, &fib, sizeof(fib), 0);
	}
	if (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return VERDICT_STACK;
	p->unresolved = found == BPF_FIB_LKUP_RET_NO_NEIGH;
	p->ifindex = fib.ifindex;
	/* The next hop of an IPv4 route may have an IPv6 address (RFC 5549): then the kernel has changed the family. */
	if (fib.family == EC_AF_INET6)
		__builtin_memcpy(&p->node, fib.ipv6_dst, sizeof(p->node));
	else
		addr_set_v4(&p->node, fib.ipv4_dst);
	p->mtu = fib.mtu_result;
	if (p->unresolved && path_is_bare(p->ifindex))
		p->unresolved = !path_device_mtu(ctx, p->ifindex, p);
	return p->unresolved ? VERDICT_STACK : VERDICT_GO_ON;
}

/*
 * Asks the kernel what MTU it has learnt from routers on the way to a far end. Only over
 * IPv6 does that matter, where it drops larger outer packets and tells no sender of the
 * inner ones. The question is asked for the tunnel device: the kernel answers only for
 * devices that forward, which an uplink may not.
 */
EC_CALL void path_learn(struct __sk_buff *ctx, const struct config *config, struct destination *to)
{
	struct bpf_fib_lookup fib = {
		.family = EC_AF_INET6,
		.l4_protocol = IPPROTO_UDP,
		.ifindex = config->tunnel_ifindex,
		.tot_len = to->mtu + PATH_OUTER_IPV6,
	};
	bool less;

	__builtin_memcpy(fib.ipv6_src, &config->tunnel[FAMILY_IPV6].source, sizeof(fib.ipv6_src));
	__builtin_memcpy(fib.ipv6_dst, &to->node, sizeof(fib.ipv6_dst));
	less = bpf_fib_lookup(ctx, &fib, sizeof(fib), 0) == BPF_FIB_LKUP_RET_FRAG_NEEDED &&
	       fib.mtu_result > PATH_OUTER_IPV6;
	to->learnt_mtu = less ? fib.mtu_result - PATH_OUTER_IPV6 : 0;
	to->neighbour_checked = bpf_ktime_get_coarse_ns();
}

/* What the tunnel carries to a far end, in bytes of inner IP packet. */
EC_INLINE __u32 path_tunnel_mtu(struct __sk_buff *ctx, const struct config *config, struct destination *to)
{
	if (!addr_is_v4(&to->node) && bpf_ktime_get_coarse_ns() - to->neighbour_checked > PATH_NEIGHBOUR_NS)
		path_learn(ctx, config, to);
	return to->learnt_mtu ?: to->mtu;
}

/* To another node or its pods through the tunnel. What resolves its address is the kernel's business. */
EC_INLINE enum verdict path_by_tunnel(struct __sk_buff *ctx, const struct config *config, struct destination *to,
				      struct path *p)
{
	if (!config->tunnel_ifindex)
		return -DROP_NODE_OFF_LINK;
	p->tunnel = true;
	p->ifindex = config->tunnel_ifindex;
	p->node = to->node;
	p->mtu = path_tunnel_mtu(ctx, config, to);
	p->learnt = p->mtu < to->mtu;
	__builtin_memcpy(p->mac, to->mac, sizeof(p->mac));
	return VERDICT_GO_ON;
}

/*
 * To a pod of another node over the uplink. Whether the neighbour resolves is checked
 * every PATH_NEIGHBOUR_NS: while it does not, p->unresolved says so.
 */
EC_INLINE enum verdict path_by_uplink(struct __sk_buff *ctx, const struct pkt *pkt, struct destination *to,
				      struct path *p)
{
	__u64 now = bpf_ktime_get_coarse_ns();

	if (!to->ifindex)
		return -DROP_NODE_OFF_LINK;
	if (now - to->neighbour_checked > PATH_NEIGHBOUR_NS) {
		if ((path_route(ctx, pkt, &to->node, p) && !p->unresolved) || p->ifindex != to->ifindex)
			return VERDICT_STACK;
		if (!p->unresolved)
			to->neighbour_checked = now;
	}
	p->ifindex = to->ifindex;
	p->node = to->node;
	p->mtu = to->mtu;
	return VERDICT_GO_ON;
}

/*
 * Writes the address to masquerade to on the way to dst out of an interface. Returns whether that is an uplink of
 * ours.
 */
EC_CALL bool path_source(__u32 ifindex, __u8 family, const struct addr *dst, struct addr *address)
{
	struct source_key key = {.prefix_len = 160, .ifindex = ifindex, .prefix = *dst};
	struct uplink *uplink = bpf_map_lookup_elem(&uplinks, &key.ifindex);
	struct source *source;

	if (!uplink)
		return false;
	source = bpf_map_lookup_elem(&sources, &key);
	*address = source ? source->address : uplink->addresses[family & 1];
	return true;
}

/* Whether the path to dst leads out of an uplink of ours, which has the address to masquerade to. */
EC_INLINE bool path_leaves(const struct pkt *pkt, const struct addr *dst, struct path *p)
{
	return path_source(p->ifindex, pkt->family, dst, &p->snat_address);
}

/* By the kernel's routing table, if that leads out of an uplink of ours, whether or not the next hop resolves. */
EC_INLINE enum verdict path_by_route(struct __sk_buff *ctx, const struct pkt *pkt, struct path *p)
{
	enum verdict verdict = path_route(ctx, pkt, &pkt->tuple.dst, p);

	if (p->unresolved)
		verdict = path_ask(ctx->ifindex, ctx->ifindex, pkt, p) < 0 ? -DROP_NEIGHBOUR_LIMIT
			  : path_device_mtu(ctx, p->ifindex, p)            ? VERDICT_GO_ON
									   : VERDICT_STACK;
	return verdict || path_leaves(pkt, &pkt->tuple.dst, p) ? verdict : VERDICT_STACK;
}

/* Finds a path and caches it, except one that ends the walk. */
EC_CALL enum verdict path_search(struct __sk_buff *ctx, const struct config *config, const struct pkt *pkt,
				 struct path *p)
{
	struct destination *to = path_destination(&pkt->tuple.dst);
	enum verdict verdict = VERDICT_GO_ON;

	p->redirected = p->redirected && path_names(p, ctx->ifindex, pkt);
	path_begin(p, to);
	if (cfg.services && p->kind == DESTINATION_SERVICE)
		return config_yields(config, pkt->family) ? VERDICT_STACK : -DROP_NO_SERVICE;
	if (to && (to->flags & DESTINATION_TO_STACK))
		return VERDICT_STACK;
	/* Between pods of this node there is no route for the stack to decide on, even outside the podCIDR. */
	if ((config->flags & CONFIG_ROUTES_TO_STACK) && p->kind != DESTINATION_LOCAL)
		return VERDICT_STACK;
	if (to && (to->flags & DESTINATION_BY_TUNNEL))
		verdict = path_by_tunnel(ctx, config, to, p);
	else if (to && p->kind == DESTINATION_POD_CIDR)
		verdict = path_by_uplink(ctx, pkt, to, p);
	else if (p->kind != DESTINATION_HOST && p->kind != DESTINATION_LOCAL)
		verdict = path_by_route(ctx, pkt, p);
	if (!verdict)
		path_keep(p, ctx->ifindex, pkt);
	return verdict;
}

/* The stage path: what the destination of a pod's packet is, and how it is reached; p is its slot. */
EC_INLINE enum verdict path_find(struct __sk_buff *ctx, const struct config *config, const struct pkt *pkt,
				 struct path *p)
{
	enum verdict verdict;

	/* Where the stack decides on routes now, nothing that was cached before is valid. */
	if ((config->flags & CONFIG_ROUTES_TO_STACK) || !path_holds(p, ctx->ifindex, pkt)) {
		verdict = path_search(ctx, config, pkt, p);
		if (verdict)
			return verdict;
	}
	return p->kind == DESTINATION_HOST ? VERDICT_STACK : VERDICT_GO_ON;
}

#endif
