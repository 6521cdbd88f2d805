/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The stage forward, the last of a walk: sends the packet on, or leaves it unchanged
 * for the stack.
 */
#ifndef EC_LIB_FWD_H
#define EC_LIB_FWD_H

#include "bpf/lib/ip.h"
#include "bpf/lib/offload.h"
#include "bpf/lib/path.h"
#include "bpf/lib/service.h"
#include "bpf/lib/too_big.h"
#include "bpf/lib/tunnel.h"

/* Whether the packet can be forwarded without the stack: the TTL lasts, and no router has to look at options. */
EC_INLINE bool fwd_simple(const struct pkt *pkt)
{
	return pkt->ttl > 1 && !pkt->options;
}

/* Into a pod of this node, past its host-side veth. */
EC_INLINE enum verdict fwd_to_pod(struct __sk_buff *ctx, struct scratch *s, const struct endpoint *ep)
{
	__u32 ifindex = ep->ifindex;
	enum verdict verdict;

	if (!fwd_simple(&s->pkt))
		return VERDICT_STACK;
	/* pod_mac and host_mac are adjacent, in the order of the Ethernet header. */
	verdict = service_back(ctx, s, ep) ?: ip_hop(ctx, &s->pkt, ep->pod_mac);
	if (verdict)
		return verdict;
	bpf_redirect_peer(ifindex, 0);
	return VERDICT_DELIVERED;
}

/* Whether a pod's packet can leave along a path without the stack: it fits, and needs nothing that only that does. */
EC_INLINE enum verdict fwd_fits(struct __sk_buff *ctx, struct scratch *s, const struct path *path)
{
	if (!fwd_simple(&s->pkt))
		return VERDICT_STACK;
	return offload_fits(ctx, &s->pkt, path->mtu) ? VERDICT_GO_ON : too_big_judge(ctx, s, path);
}

/* Along a path: through the tunnel, or out of an uplink to its neighbour, where the kernel fills in the MACs. */
EC_INLINE enum verdict fwd_along(struct __sk_buff *ctx, const struct pkt *pkt, const struct path *path)
{
	struct bpf_redir_neigh nh = {};
	enum verdict verdict;

	verdict = ip_hop(ctx, pkt, NULL);
	if (verdict)
		return verdict;
	if (path->tunnel)
		return tunnel_redirect(ctx, path->ifindex, pkt->tos, &path->node, path->mac);
	if (pkt->family == FAMILY_IPV6) {
		nh.nh_family = EC_AF_INET6;
		__builtin_memcpy(nh.ipv6_nh, &path->node, sizeof(nh.ipv6_nh));
	} else {
		nh.nh_family = EC_AF_INET;
		nh.ipv4_nh = addr_v4(&path->node);
	}
	ctx->mark |= cfg.mark;
	bpf_redirect_neigh(path->ifindex, &nh, sizeof(nh), 0);
	return VERDICT_FORWARDED;
}

#endif
