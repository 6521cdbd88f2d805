//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * tc ingress of a pod's host-side veth: everything that the pod sends. No packet
 * leaves with a source that is not the pod's, nor with a pending checksum that could
 * overwrite it.
 */
#include "bpf/lib/arp.h"
#include "bpf/lib/fwd.h"
#include "bpf/lib/icmp.h"
#include "bpf/lib/ipv4.h"
#include "bpf/lib/nf.h"
#include "bpf/lib/offload.h"
#include "bpf/lib/path.h"
#include "bpf/lib/reset.h"
#include "bpf/lib/translate.h"
#include "bpf/lib/tunnel.h"

EC_INLINE enum verdict from_pod_to_local(struct __sk_buff *ctx, const struct pkt *pkt)
{
	struct endpoint *ep = path_endpoint(&pkt->tuple.dst);

	if (!ep)
		return -DROP_NO_ENDPOINT;
	return nf_judge(ctx, DESTINATION_LOCAL) ?: fwd_to_pod(ctx, pkt, ep);
}

EC_INLINE enum verdict from_pod_along(struct __sk_buff *ctx, struct scratch *s, const struct path *path)
{
	const struct pkt *pkt = &s->pkt;

	if (path->kind == DESTINATION_LOCAL)
		return from_pod_to_local(ctx, pkt);
	/* First of all: a packet that does not fit its path goes to the stack, whatever else it is. */
	return fwd_fits(ctx, pkt, path)
		       ?: nf_judge(ctx, path->kind)
		       ?: translate_out(ctx, s, path)
		       ?: fwd_along(ctx, pkt, path);
}

/* Whether the pod may send the packet, wherever it goes. */
EC_INLINE enum verdict from_pod_check(struct __sk_buff *ctx, const struct device *dev, struct pkt *pkt)
{
	if (!ipv4_parse_arrived(ctx, pkt))
		return -DROP_INVALID;
	if (!offload_right(ctx, pkt))
		return -DROP_BAD_OFFLOAD;
	if (addr_is_zero(&dev->addresses[FAMILY_IPV4]) || !addr_equal(&pkt->tuple.src, &dev->addresses[FAMILY_IPV4]))
		return -DROP_SPOOFED_SOURCE;
	return pkt->tuple.proto == IPPROTO_ICMP ? icmp_check(ctx, END_SOURCE) : VERDICT_GO_ON;
}

EC_INLINE enum verdict from_pod_ip(struct __sk_buff *ctx, const struct device *dev)
{
	struct config *config = config_get();
	struct scratch *s = scratch_new();
	enum verdict verdict;
	struct path *path;

	if (!config || !s)
		return -DROP_INVALID;
	verdict = from_pod_check(ctx, dev, &s->pkt);
	if (verdict)
		return verdict;
	if (path_is_ours(config, &s->pkt.tuple.dst))
		return config->flags & CONFIG_POD_CIDR_TO_STACK ? VERDICT_STACK : from_pod_to_local(ctx, &s->pkt);
	if (ipv4_multicast(addr_v4(&s->pkt.tuple.dst)))
		return VERDICT_STACK;
	path = path_slot(ctx, &s->pkt);
	if (!path)
		return -DROP_INVALID;
	verdict = path_find(ctx, config, &s->pkt, path);
	/* Also what the stack would send on. */
	if (path->kind == DESTINATION_HOST || path->kind == DESTINATION_NODE)
		verdict = tunnel_guard(ctx, &s->pkt) ?: verdict;
	return verdict ?: from_pod_along(ctx, s, path);
}

EC_INLINE enum verdict from_pod(struct __sk_buff *ctx)
{
	struct device_key key = {.ifindex = ctx->ifindex};
	struct device *dev = bpf_map_lookup_elem(&devices, &key);

	if (!dev)
		return -DROP_SPOOFED_SOURCE;
	__sync_fetch_and_add(&dev->packets, 1);
	__sync_fetch_and_add(&dev->bytes, ctx->len);
	/* The tag would leave with the packet, into a network that the pod is not on. */
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
