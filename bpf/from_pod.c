//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * tc ingress of a pod's host-side veth: everything that the pod sends. No packet
 * leaves with a source that is not the pod's, nor with a pending checksum that could
 * overwrite it. Also of a bridge that containers are behind, where they are one pod; what
 * they say on their link is between them and the host.
 */
#include "bpf/lib/arp.h"
#include "bpf/lib/finish.h"
#include "bpf/lib/fwd.h"
#include "bpf/lib/icmp.h"
#include "bpf/lib/ip.h"
#include "bpf/lib/nd.h"
#include "bpf/lib/nf.h"
#include "bpf/lib/offload.h"
#include "bpf/lib/outside.h"
#include "bpf/lib/path.h"
#include "bpf/lib/service.h"
#include "bpf/lib/translate.h"
#include "bpf/lib/tunnel.h"

EC_INLINE enum verdict from_pod_to_local(struct __sk_buff *ctx, struct scratch *s)
{
	struct endpoint *ep = service_endpoint(s);

	/* The stack would send it to whoever has the address now. */
	if (!ep)
		return service_unreached(s, path_endpoint(&s->pkt.tuple.dst) ? DROP_NO_BACKEND : DROP_NO_ENDPOINT);
	return nf_judge(ctx, s->pkt.family, DESTINATION_LOCAL) ?: fwd_to_pod(ctx, s, ep);
}

/* A packet of a pod to itself, and to nobody else, by a Service. The stack must not see it. */
EC_CALL enum verdict from_pod_to_itself(struct __sk_buff *ctx, struct scratch *s)
{
	struct endpoint *ep = path_endpoint(&s->pkt.tuple.dst);

	if (s->pkt.options)
		return -DROP_SERVICE_OPTIONS;
	if (!fwd_simple(&s->pkt))
		return -DROP_SERVICE_TTL;
	if (ep && ep->ifindex == ctx->ifindex)
		return fwd_to_pod(ctx, s, ep);
	/* The pod is about to end. The unreachable route, which answers for other backends, is in the stack. */
	service_unreached(s, DROP_NO_ENDPOINT);
	return -DROP_NO_BACKEND;
}

/*
 * To a neighbour that does not resolve yet. The stack queues the packet, asks for the neighbour, and answers host
 * unreachable. But a firewall there may drop the packet before anybody asks, whatever its flow began with; redirection
 * queues and asks, and tells the sender nothing. What may open a flow takes both ways in turn.
 */
EC_INLINE enum verdict from_pod_waits(struct __sk_buff *ctx, struct pkt *pkt, struct path *path)
{
	if (!path->unresolved || (pkt_l4(ctx, pkt) && !nf_may_open(pkt)))
		return VERDICT_GO_ON;
	/* All fragments of a datagram take one way. */
	if (pkt->fragment != FRAGMENT_NONE)
		return VERDICT_STACK;
	path->redirected = !path->redirected;
	return path->redirected ? VERDICT_GO_ON : VERDICT_STACK;
}

EC_INLINE enum verdict from_pod_along(struct __sk_buff *ctx, struct scratch *s, struct path *path)
{
	struct pkt *pkt = &s->pkt;

	if (path->kind == DESTINATION_LOCAL)
		return from_pod_to_local(ctx, s);
	if (service_has_translated(s) && path->kind == DESTINATION_WORLD && pkt->ttl <= 1)
		return -DROP_SERVICE_TTL;
	/* First of all: whatever else it is, a packet that does not fit its path is refused, or goes to the stack. */
	return fwd_fits(ctx, s, path)
		       ?: nf_judge(ctx, pkt->family, path->kind)
		       ?: from_pod_waits(ctx, pkt, path)
		       ?: translate_out(ctx, s, path)
		       ?: fwd_along(ctx, pkt, path);
}

/* Whether a container behind the bridge that the packet comes from may have the address. */
EC_INLINE bool from_pod_behind(const struct __sk_buff *ctx, const struct addr *address)
{
	struct endpoint *ep = path_endpoint(address);

	return ep && ep->ifindex == ctx->ifindex;
}

/* Whether the pod has the address, or a container of the bridge may have it. */
EC_INLINE bool from_pod_has(const struct __sk_buff *ctx, const struct device *dev, enum family family,
			    const struct addr *address)
{
	const struct addr *own = &dev->addresses[family];

	if (path_is_bridge(dev->pod_mac))
		return from_pod_behind(ctx, address);
	/* A pod without IPv6 has :: there, which a packet may have too; no address of IPv4 is all zero. */
	return addr_equal(address, own) && (family != FAMILY_IPV6 || !addr_is_zero(own));
}

/* Whether the host itself has the address. */
EC_INLINE bool from_pod_is_host(const struct addr *address)
{
	struct destination *to = path_destination(address);

	return to && to->kind == DESTINATION_HOST;
}

/*
 * Whether a container may say something on its link with this source: its own or, to the link or the host, one of the
 * link; or none yet, to groups. The stack would take any other for what has come by way of a router.
 */
EC_INLINE bool from_pod_on_link(const struct __sk_buff *ctx, const struct pkt *pkt)
{
	const struct addr *src = &pkt->tuple.src, *dst = &pkt->tuple.dst;
	bool link = ip_not_routed(pkt->family, dst), v6 = pkt->family == FAMILY_IPV6;

	if (v6 && ipv6_link_local(src))
		return link || from_pod_is_host(dst);
	if (v6 ? addr_is_zero(src) : !addr_v4(src))
		return link;
	return from_pod_behind(ctx, src);
}

/*
 * What a container says on its link, to the host or to all: neighbour discovery, multicast, broadcast. The stack
 * forwards none of it, but a tunnel's socket takes what is to its port.
 */
EC_CALL enum verdict from_pod_on_bridge(struct __sk_buff *ctx, struct pkt *pkt)
{
	if (!from_pod_on_link(ctx, pkt))
		return -DROP_SPOOFED_SOURCE;
	if (pkt_is_icmp(pkt->family, pkt->tuple.proto))
		return icmp_check_link(ctx, pkt);
	return tunnel_guard(ctx, pkt) ?: VERDICT_STACK;
}

/* Whether the pod may send the packet, wherever it goes. */
EC_INLINE enum verdict from_pod_check(struct __sk_buff *ctx, const struct device *dev, struct scratch *s,
				      enum family family)
{
	enum verdict verdict = ip_parse_arrived(ctx, s, family);
	bool bridge = path_is_bridge(dev->pod_mac);
	struct pkt *pkt = &s->pkt;

	if (bridge && ctx->pkt_type == EC_PACKET_OTHERHOST)
		return VERDICT_STACK; /* a copy for who captures, which the stack drops */
	if (verdict)
		return verdict;
	if (bridge && ctx->pkt_type != EC_PACKET_HOST)
		return from_pod_on_bridge(ctx, pkt);
	if (!offload_right(ctx, pkt))
		return -DROP_BAD_OFFLOAD;
	if (family == FAMILY_IPV6 && (ipv6_of_link(&pkt->tuple.dst) || ipv6_link_local(&pkt->tuple.src)))
		return bridge ? from_pod_on_bridge(ctx, pkt) : nd_answer(ctx, dev, pkt);
	if (!from_pod_has(ctx, dev, family, &pkt->tuple.src))
		return -DROP_SPOOFED_SOURCE;
	if (!pkt_is_icmp(family, pkt->tuple.proto))
		return VERDICT_GO_ON;
	verdict = icmp_check(ctx, END_SOURCE);
	/* Neighbour discovery between a container and an address of the host. */
	return bridge && verdict == -DROP_LINK_SCOPE && from_pod_is_host(&pkt->tuple.dst) ? VERDICT_STACK : verdict;
}

/* What the pod sends to a Service, or as the backend of a client outside. */
EC_INLINE enum verdict from_pod_services(struct __sk_buff *ctx, const struct config *config, struct scratch *s,
					 struct device *dev)
{
	if (!cfg.services)
		return VERDICT_GO_ON;
	s->owner.ifindex = ctx->ifindex;
	return outside_of_pod(ctx, s, dev) ?: frontend_stage(ctx, config, s, dev);
}

EC_INLINE enum verdict from_pod_ip(struct __sk_buff *ctx, struct device *dev, enum family family)
{
	struct config *config = config_get();
	struct scratch *s = scratch_new(DIRECTION_FROM_POD);
	enum verdict verdict;
	struct path *path;

	if (!config || !s)
		return -DROP_INVALID;
	verdict = from_pod_check(ctx, dev, s, family) ?: from_pod_services(ctx, config, s, dev);
	if (verdict)
		return verdict;
	if (service_is_itself(s))
		return from_pod_to_itself(ctx, s);
	if (path_is_ours(config, family, &s->pkt.tuple.dst))
		return config->flags & CONFIG_POD_CIDR_TO_STACK ? VERDICT_STACK : from_pod_to_local(ctx, s);
	if (ip_not_routed(family, &s->pkt.tuple.dst))
		return VERDICT_STACK;
	path = path_slot(ctx->ifindex, &s->pkt);
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
	/* Each family has code of its own, compiled from the same source. */
	switch (ip_family(ctx)) {
	case FAMILY_IPV4:
		return from_pod_ip(ctx, dev, FAMILY_IPV4);
	case FAMILY_IPV6:
		return from_pod_ip(ctx, dev, FAMILY_IPV6);
	default:
		if (path_is_bridge(dev->pod_mac))
			return VERDICT_STACK;
		return ctx->protocol == bpf_htons(ETH_P_ARP) ? arp_answer(ctx, dev) : -DROP_NOT_IP;
	}
}

SEC("tc")
int ec_from_pod(struct __sk_buff *ctx)
{
	return answer_or_finish(ctx, DIRECTION_FROM_POD, from_pod(ctx));
}
