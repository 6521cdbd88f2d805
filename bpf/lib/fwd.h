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

/* The Ethernet header and the IPv4 header without options: what a hop rewrites. */
struct hop {
	__u8 macs[12];
	__be16 ethertype;
	__be16 ip_start[4];
	__u8 ttl;
	__u8 proto;
	__u16 check;
	__u16 source[2]; /* in two halves for the checksum */
	__u16 destination[2];
};
_Static_assert(sizeof(struct hop) == 34, "hop mirrors the packet");

/* Puts an address in, if that is to change, and returns by how much the header's one's complement sum grows. */
EC_INLINE __u32 fwd_hop_address(__u16 half[2], bool changes, __be32 to)
{
	__u32 sum;

	if (!changes)
		return 0;
	sum = (__u16)~half[0] + (__u16)~half[1] + (to & 0xffff) + (to >> 16);
	half[0] = to;
	half[1] = to >> 16;
	return sum;
}

/*
 * Takes 1 off the TTL, writes MACs unless NULL, and the address that a rewriting
 * left to this write; the header checksum follows (RFC 1624, equation 3).
 */
EC_CALL int fwd_hop(struct __sk_buff *ctx, const struct pkt *pkt, const __u8 *macs)
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
	sum = (__u16)~hop.check + (__u16)~bpf_htons(0x0100);
	sum += fwd_hop_address(hop.source, pkt->rewrite == END_SOURCE, pkt->rewrite_to);
	sum += fwd_hop_address(hop.destination, pkt->rewrite == END_DESTINATION, pkt->rewrite_to);
	sum = (sum & 0xffff) + (sum >> 16);
	hop.check = ~((sum & 0xffff) + (sum >> 16));
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
	ret = fwd_hop(ctx, pkt, ep->pod_mac);
	if (ret < 0)
		return ret;
	bpf_redirect_peer(ifindex, 0);
	return TRAFFIC_DELIVERED;
}

/* Out of an uplink to a neighbour of known IPv4 address; the kernel fills in the MACs. */
EC_INLINE int fwd_to_neighbour(struct __sk_buff *ctx, const struct pkt *pkt, const struct path *path)
{
	struct bpf_redir_neigh nh = {.nh_family = EC_AF_INET, .ipv4_nh = path->nexthop};
	int ret;

	ret = fwd_hop(ctx, pkt, NULL);
	if (ret < 0)
		return ret;
	ctx->mark |= cfg.mark;
	bpf_redirect_neigh(path->ifindex, &nh, sizeof(nh), 0);
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
	return fwd_to_neighbour(ctx, pkt, path);
}

#endif
