//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * tc ingress of the tunnel device: what other nodes send through the tunnel, whichever
 * way packets get to them. Only a known node's packets pass, from its own pods and
 * addresses, to this node's. Nothing else belongs on the device, so the rest is
 * dropped and not left to the stack.
 */
#include "bpf/lib/arrive.h"
#include "bpf/lib/finish.h"
#include "bpf/lib/fwd.h"
#include "bpf/lib/ip.h"
#include "bpf/lib/outside.h"
#include "bpf/lib/tunnel.h"

/*
 * Whether the source, of which from is the entry, belongs to the node that has sent the outer packet, in our network.
 */
EC_CALL enum verdict from_tunnel_judge_source(struct __sk_buff *ctx, const struct destination *from)
{
	struct destination *node;
	enum verdict verdict;
	struct addr sender;

	verdict = tunnel_sender(ctx, &sender);
	if (verdict)
		return verdict;
	/* Only a POD_CIDR and a NODE have a node. */
	if (from && (addr_equal(&from->node, &sender) || addr_equal(&from->alias, &sender)))
		return VERDICT_GO_ON;
	node = path_destination(&sender);
	return node && node->kind == DESTINATION_NODE ? -DROP_TUNNEL_SOURCE : -DROP_TUNNEL_NODE;
}

/* A packet whose destination is no pod: the host's, or nobody's. No node sends to another's tunnel port this way. */
EC_INLINE enum verdict from_tunnel_to_node(struct __sk_buff *ctx, const struct config *config, struct scratch *s)
{
	struct pkt *pkt = &s->pkt;
	const struct addr *address = &pkt->tuple.dst;
	enum verdict verdict;
	struct destination *to;

	if (path_is_ours(config, pkt->family, address))
		return -DROP_NO_ENDPOINT;
	to = path_destination(address);
	if (!to || to->kind != DESTINATION_HOST || ip_martian(pkt->family, address))
		return -DROP_TUNNEL_DESTINATION;
	verdict = tunnel_guard(ctx, pkt);
	if (cfg.services && !verdict)
		verdict = outside_arrive(ctx, s);
	return verdict ?: VERDICT_STACK;
}

EC_INLINE enum verdict from_tunnel_ip(struct __sk_buff *ctx)
{
	struct config *config = config_get();
	struct scratch *s = scratch_new(DIRECTION_FROM_TUNNEL);
	struct destination *from;
	enum verdict verdict;
	struct endpoint *ep;

	if (!config || !s)
		return -DROP_INVALID;
	verdict = ip_parse_arrived(ctx, s, ip_family(ctx));
	if (verdict)
		return verdict;
	from = path_destination(&s->pkt.tuple.src);
	verdict = from_tunnel_judge_source(ctx, from) ?: arrive_check_icmp(ctx, &s->pkt);
	if (verdict)
		return verdict;
	ep = path_endpoint(&s->pkt.tuple.dst);
	if (!ep)
		return from_tunnel_to_node(ctx, config, s);
	return arrive_judge(ctx, config, s, ep, from) ?: fwd_to_pod(ctx, s, ep);
}

EC_INLINE enum verdict from_tunnel(struct __sk_buff *ctx)
{
	/* The inner Ethernet address is any: to the kernel the packet is another host's. */
	if (bpf_skb_change_type(ctx, EC_PACKET_HOST))
		return -DROP_WRITE_FAILED;
	if (tunnel_answers(ctx))
		return VERDICT_STACK;
	return tunnel_carries(ctx) ?: from_tunnel_ip(ctx);
}

SEC("tc")
int ec_from_tunnel(struct __sk_buff *ctx)
{
	enum verdict verdict = from_tunnel(ctx);

	return cfg.services ? answer_or_finish(ctx, DIRECTION_FROM_TUNNEL, verdict)
			    : finish(ctx, DIRECTION_FROM_TUNNEL, verdict);
}
