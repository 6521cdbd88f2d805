/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Forwarding: the last step of a walk. Every function here either changes and
 * redirects the packet or leaves it as it is for the stack.
 */
#ifndef EC_LIB_FWD_H
#define EC_LIB_FWD_H

#include "bpf/lib/path.h"

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

/* Whether the packet may leave along a path without the stack's help. */
EC_INLINE bool fwd_fits(struct __sk_buff *ctx, const struct pkt *pkt, const struct path *path)
{
	return fwd_simple(pkt) && pkt_fits(ctx, pkt, path->mtu);
}

/* Along a path that was found, out of an uplink. */
EC_INLINE int fwd_along(struct __sk_buff *ctx, const struct pkt *pkt, const struct path *path)
{
	if (!fwd_fits(ctx, pkt, path))
		return TRAFFIC_STACK;
	return fwd_to_neighbour(ctx, path->ifindex, path->nexthop);
}

#endif
