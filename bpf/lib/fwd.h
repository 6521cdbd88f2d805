/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Forwarding: the last step of a walk. Every function here either changes and
 * redirects the packet or leaves it as it is for the stack.
 */
#ifndef EC_LIB_FWD_H
#define EC_LIB_FWD_H

#include "bpf/lib/maps.h"
#include "bpf/lib/pkt.h"

/* How long a neighbour that resolved is taken to go on resolving. */
#define FWD_NEIGHBOUR_NS (NSEC_PER_SEC / 10)

/* Whether a router may forward it without the stack's help. */
EC_INLINE bool fwd_simple(const struct pkt *pkt)
{
	return pkt->ttl > 1 && !pkt->options;
}

/* The Ethernet header and the IPv4 header up to its checksum: what a hop rewrites. */
struct hop {
	__u8 macs[12];
	__be16 ethertype;
	__u8 ip_start[8];
	__u8 ttl;
	__u8 proto;
	__u8 check[2];
};
_Static_assert(sizeof(struct hop) == 26, "hop mirrors the packet");

/* Takes 1 off the TTL, with the header checksum (RFC 1624), and writes MACs unless NULL. */
EC_CALL int fwd_hop(struct __sk_buff *ctx, const __u8 *macs)
{
	void *data = (void *)(long)ctx->data;
	struct hop hop;
	__u32 sum;

	if (data + sizeof(hop) > (void *)(long)ctx->data_end)
		return -DROP_INVALID;
	__builtin_memcpy(&hop, data, sizeof(hop));
	if (macs)
		__builtin_memcpy(hop.macs, macs, sizeof(hop.macs));
	hop.ttl--;
	sum = ((__u32)hop.check[0] << 8 | hop.check[1]) + 0x0100;
	sum = (sum & 0xffff) + (sum >> 16);
	hop.check[0] = sum >> 8;
	hop.check[1] = sum;
	if (bpf_skb_store_bytes(ctx, 0, &hop, sizeof(hop), 0))
		return -DROP_WRITE_FAILED;
	return 0;
}

/* Into a pod of this node, past its host-side veth. */
EC_INLINE int fwd_to_pod(struct __sk_buff *ctx, const struct pkt *pkt, const struct endpoint *ep)
{
	__u32 ifindex = ep->ifindex;
	int ret;

	if (!fwd_simple(pkt))
		return TRAFFIC_STACK;
	/* pod_mac and host_mac are adjacent and in the order of the header. */
	ret = fwd_hop(ctx, ep->pod_mac);
	if (ret < 0)
		return ret;
	bpf_redirect_peer(ifindex, 0);
	return TRAFFIC_DELIVERED;
}

/* Out of an uplink to a neighbour of known IPv4 address; the kernel fills in the MACs. */
EC_INLINE int fwd_to_neighbour(struct __sk_buff *ctx, __u32 ifindex, __be32 nexthop)
{
	struct bpf_redir_neigh nh = {.nh_family = EC_AF_INET, .ipv4_nh = nexthop};
	int ret;

	ret = fwd_hop(ctx, NULL);
	if (ret < 0)
		return ret;
	ctx->mark |= cfg.mark;
	bpf_redirect_neigh(ifindex, &nh, sizeof(nh), 0);
	return TRAFFIC_FORWARDED;
}

/*
 * Asks the kernel's routing table for a packet that arrived on this interface.
 * 0: leads to *ifindex and neighbour *nexthop, which resolves, and the packet
 * fits; anything else is for the stack to decide.
 */
EC_CALL int fwd_route(struct __sk_buff *ctx, const struct pkt *pkt, __be32 dst, __u32 *ifindex, __be32 *nexthop)
{
	struct bpf_fib_lookup fib = {
		.family = EC_AF_INET,
		.l4_protocol = pkt->tuple.proto,
		.ifindex = ctx->ifindex,
		.ipv4_src = addr_v4(&pkt->tuple.src),
		.ipv4_dst = dst,
	};

	/* The length of a GSO packet is no length on the wire. */
	if (!ctx->gso_size)
		fib.tot_len = pkt->ip_len;
	if (bpf_fib_lookup(ctx, &fib, sizeof(fib), 0) != BPF_FIB_LKUP_RET_SUCCESS)
		return -1;
	/* The route may name an IPv6 neighbour for IPv4 (RFC 5549). */
	if (fib.family != EC_AF_INET)
		return -1;
	if (ctx->gso_size && fib.mtu_result && !pkt_fits(ctx, pkt, fib.mtu_result))
		return -1;
	*ifindex = fib.ifindex;
	*nexthop = fib.ipv4_dst;
	return 0;
}

/*
 * To a pod of another node over the uplink. The route's neighbour is looked at
 * once in FWD_NEIGHBOUR_NS: while it does not resolve, the stack queues the
 * packet, asks, and answers host unreachable.
 */
EC_INLINE int fwd_to_node(struct __sk_buff *ctx, const struct pkt *pkt, struct destination *to)
{
	__be32 node = addr_v4(&to->node), nexthop;
	__u32 ifindex = to->ifindex, via;
	__u64 now;

	if (!ifindex)
		return -DROP_NODE_OFF_LINK;
	if (!fwd_simple(pkt) || !pkt_fits(ctx, pkt, to->mtu))
		return TRAFFIC_STACK;
	now = bpf_ktime_get_coarse_ns();
	if (now - to->neighbour_checked > FWD_NEIGHBOUR_NS) {
		if (fwd_route(ctx, pkt, node, &via, &nexthop) || via != ifindex)
			return TRAFFIC_STACK;
		to->neighbour_checked = now;
	}
	return fwd_to_neighbour(ctx, ifindex, node);
}

/* By the kernel's routing table, if that leads out of an uplink of ours. */
EC_INLINE int fwd_by_route(struct __sk_buff *ctx, const struct pkt *pkt)
{
	struct uplink_key key;
	__be32 nexthop;

	if (!fwd_simple(pkt) || fwd_route(ctx, pkt, addr_v4(&pkt->tuple.dst), &key.ifindex, &nexthop))
		return TRAFFIC_STACK;
	if (!bpf_map_lookup_elem(&uplinks, &key))
		return TRAFFIC_STACK;
	return fwd_to_neighbour(ctx, key.ifindex, nexthop);
}

#endif
