//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * tc ingress of a pod's host-side veth: everything that the pod sends. Nothing
 * leaves here with a source that is not the pod's, or that is to become another.
 */
#include "bpf/lib/arp.h"
#include "bpf/lib/ct.h"
#include "bpf/lib/fwd.h"
#include "bpf/lib/nf.h"
#include "bpf/lib/offload.h"
#include "bpf/lib/reset.h"
#include "bpf/lib/world.h"

EC_INLINE struct endpoint *endpoint_of(const struct addr *address)
{
	struct endpoint_key key = {.address = *address};

	return bpf_map_lookup_elem(&endpoints, &key);
}

EC_INLINE int from_pod_to_local(struct __sk_buff *ctx, const struct pkt *pkt)
{
	struct endpoint *ep = endpoint_of(&pkt->tuple.dst);

	if (!ep)
		return -DROP_NO_ENDPOINT;
	return nf_passes(ctx) ? fwd_to_pod(ctx, pkt, ep) : TRAFFIC_STACK;
}

/* Where the stack decides on routes. None leads from pod to pod of this node, wherever their addresses lie. */
EC_INLINE int from_pod_by_stack(struct __sk_buff *ctx, const struct pkt *pkt)
{
	struct destination *to = path_destination(&pkt->tuple.dst);

	if (!to || to->kind != DESTINATION_LOCAL || (to->flags & DESTINATION_TO_STACK))
		return TRAFFIC_STACK;
	return from_pod_to_local(ctx, pkt);
}

/* To the world: the flow decides whether and how the source is masqueraded. */
EC_INLINE int from_pod_to_world(struct __sk_buff *ctx, struct scratch *s, const struct path *path)
{
	struct pkt *pkt = &s->pkt;
	struct world world = {};
	int ret;

	if (!cfg.masquerade)
		return cfg.netfilter_nat ? TRAFFIC_STACK : fwd_along(ctx, pkt, path);
	/* First: what leads elsewhere, or nowhere, is the stack's, whatever it is. */
	if (!fwd_fits(ctx, pkt, path))
		return TRAFFIC_STACK;
	s->owner.address = path->snat_address;
	s->owner.ifindex = ctx->ifindex;
	s->owner.flags = 0;
	s->owner.direction = DIRECTION_FROM_POD;
	ret = world_find(ctx, s, &world);
	/* What looks like the world may be a Service. */
	if (cfg.netfilter_nat && (ret < 0 || !world_is_older(pkt, &world)))
		return TRAFFIC_STACK;
	if (ret < 0)
		return ret;
	if (world.via_stack)
		return TRAFFIC_STACK;
	ret = world_translate(ctx, s, &world);
	return ret ?: fwd_to_neighbour(ctx, pkt, path);
}

EC_INLINE int from_pod_along(struct __sk_buff *ctx, struct scratch *s, const struct path *path)
{
	struct pkt *pkt = &s->pkt;

	switch (path->kind) {
	case DESTINATION_LOCAL:
		return from_pod_to_local(ctx, pkt);
	case DESTINATION_POD_CIDR:
		if (!nf_passes(ctx))
			return TRAFFIC_STACK;
		return fwd_along(ctx, pkt, path);
	case DESTINATION_NODE:
	case DESTINATION_NATIVE:
		if (cfg.netfilter_nat)
			return TRAFFIC_STACK;
		return fwd_along(ctx, pkt, path);
	case DESTINATION_HOST:
		return TRAFFIC_STACK;
	default:
		return from_pod_to_world(ctx, s, path);
	}
}

EC_INLINE int from_pod_ip(struct __sk_buff *ctx, const struct device *dev)
{
	struct config *config = config_get();
	struct scratch *s = scratch_new();
	struct path *path;
	struct pkt *pkt;
	__be32 dst;
	int ret;

	if (!config || !s)
		return -DROP_INVALID;
	pkt = &s->pkt;
	if (!pkt_parse_arrived(ctx, pkt))
		return -DROP_INVALID;
	if (!offload_right(ctx, pkt))
		return -DROP_BAD_OFFLOAD;
	if (addr_is_zero(&dev->ipv4) || !addr_equal(&pkt->tuple.src, &dev->ipv4))
		return -DROP_SPOOFED_SOURCE;
	if (pkt->tuple.proto == IPPROTO_ICMP) {
		ret = icmp_check(ctx, END_SOURCE);
		if (ret)
			return ret;
	}
	dst = addr_v4(&pkt->tuple.dst);
	if (addr_v4_in(dst, &config->pod_cidr_ipv4, config->pod_cidr_ipv4_len))
		return config->flags & CONFIG_POD_CIDR_TO_STACK ? TRAFFIC_STACK : from_pod_to_local(ctx, pkt);
	if (addr_v4_multicast(dst))
		return TRAFFIC_STACK;
	if (config->flags & CONFIG_ROUTES_TO_STACK)
		return from_pod_by_stack(ctx, pkt);
	path = path_slot(ctx->ifindex, dst, pkt->tuple.proto);
	if (!path)
		return -DROP_INVALID;
	if (!path_holds(path, ctx->ifindex, dst, pkt->tuple.proto)) {
		ret = path_search(ctx, pkt, path);
		if (ret)
			return ret;
	}
	return from_pod_along(ctx, s, path);
}

EC_INLINE int from_pod(struct __sk_buff *ctx)
{
	struct device_key key = {.ifindex = ctx->ifindex};
	struct device *dev = bpf_map_lookup_elem(&devices, &key);

	if (!dev)
		return -DROP_SPOOFED_SOURCE;
	__sync_fetch_and_add(&dev->packets, 1);
	__sync_fetch_and_add(&dev->bytes, ctx->len);
	/* A tag would leave with the packet, for a network that is none of the pod's. */
	if (ctx->vlan_present)
		return -DROP_NOT_IP;
	switch (ctx->protocol) {
	case bpf_htons(ETH_P_IP):
		return from_pod_ip(ctx, dev);
	case bpf_htons(ETH_P_ARP):
		return arp_answer(ctx, dev);
	case bpf_htons(ETH_P_IPV6):
		return -DROP_IPV6_UNSUPPORTED;
	}
	return -DROP_NOT_IP;
}

SEC("tc")
int ec_from_pod(struct __sk_buff *ctx)
{
	return reset_or_finish(ctx, DIRECTION_FROM_POD, from_pod(ctx));
}
