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
#include "bpf/lib/rewrite.h"
#include "bpf/lib/service.h"
#include "bpf/lib/too_big.h"
#include "bpf/lib/tunnel.h"

/* Whether the packet can be forwarded without the stack: the TTL lasts, and no router has to look at options. */
EC_INLINE bool fwd_simple(const struct pkt *pkt)
{
	return pkt->ttl > 1 && !pkt->options;
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
	/* An IPv4 packet may have an IPv6 next hop. */
	if (addr_is_v4(&path->node)) {
		nh.nh_family = EC_AF_INET;
		nh.ipv4_nh = addr_v4(&path->node);
	} else {
		nh.nh_family = EC_AF_INET6;
		__builtin_memcpy(nh.ipv6_nh, &path->node, sizeof(nh.ipv6_nh));
	}
	ctx->mark |= cfg.mark;
	bpf_redirect_neigh(path->ifindex, &nh, sizeof(nh), 0);
	return VERDICT_FORWARDED;
}

/*
 * Finds the way to the container behind a bridge that has the packet's destination, which is cached as a path is.
 * Redirection queues the packet and asks for a container that does not resolve, as the stack would; of that its sender
 * has an allowance.
 */
EC_CALL enum verdict fwd_find_container(struct __sk_buff *ctx, struct scratch *s, __u32 bridge)
{
	__u32 owner = s->direction == DIRECTION_FROM_POD ? ctx->ifindex : 0;
	enum verdict verdict = rewrite_settle(ctx, &s->pkt);
	struct path *p = path_slot(ctx->ifindex, &s->pkt);

	if (verdict || !p)
		return verdict ?: -DROP_INVALID;
	if (!path_holds(p, ctx->ifindex, &s->pkt)) {
		path_begin(p, NULL);
		p->kind = DESTINATION_LOCAL;
		if (path_route(ctx, &s->pkt, &s->pkt.tuple.dst, p) && !p->unresolved)
			return VERDICT_STACK;
		if (!p->unresolved)
			path_keep(p, ctx->ifindex, &s->pkt);
		else if (path_ask(owner, ctx->ifindex, &s->pkt, p) < 0)
			return -DROP_NEIGHBOUR_LIMIT;
		else if (!path_device_mtu(ctx, bridge, p))
			return VERDICT_STACK;
	}
	return p->ifindex == bridge && offload_fits(ctx, &s->pkt, p->mtu) ? VERDICT_GO_ON : VERDICT_STACK;
}

/* Out of the bridge, to the container that fwd_find_container has found. */
EC_CALL enum verdict fwd_into_bridge(struct __sk_buff *ctx, struct scratch *s)
{
	struct path *p = path_slot(ctx->ifindex, &s->pkt);
	enum verdict verdict = p ? fwd_along(ctx, &s->pkt, p) : -DROP_INVALID;

	return verdict == VERDICT_FORWARDED ? VERDICT_DELIVERED : verdict;
}

/* Into a pod of this node, past its host-side veth; or to a bridge. */
EC_INLINE enum verdict fwd_to_pod(struct __sk_buff *ctx, struct scratch *s, const struct endpoint *ep)
{
	bool bridge = path_is_bridge(ep->pod_mac);
	__u32 ifindex = ep->ifindex;
	enum verdict verdict;

	if (!fwd_simple(&s->pkt))
		return VERDICT_STACK;
	verdict = bridge ? fwd_find_container(ctx, s, ifindex) : VERDICT_GO_ON;
	verdict = verdict ?: service_back(ctx, s, ep);
	if (!verdict && bridge)
		return fwd_into_bridge(ctx, s);
	/* pod_mac and host_mac are adjacent, in the order of the Ethernet header. */
	verdict = verdict ?: ip_hop(ctx, &s->pkt, ep->pod_mac);
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

#endif
