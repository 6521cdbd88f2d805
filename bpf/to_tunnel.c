//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * tc egress of the tunnel device: what goes to other nodes through the tunnel. What
 * our programs send there has its key; what the host's stack sends gets it here.
 */
#include "bpf/lib/count.h"
#include "bpf/lib/outside.h"
#include "bpf/lib/path.h"
#include "bpf/lib/scratch.h"
#include "bpf/lib/too_big.h"
#include "bpf/lib/tunnel.h"

EC_INLINE enum verdict to_tunnel(struct __sk_buff *ctx)
{
	struct config *config = config_get();
	struct destination *to;
	enum verdict verdict;
	struct endpoint *ep;
	struct scratch *s;
	__u32 mtu;

	if (ctx->mark & cfg.mark)
		return VERDICT_STACK;
	verdict = tunnel_carries(ctx);
	if (verdict)
		return verdict;
	s = scratch_new(DIRECTION_TO_TUNNEL);
	if (!s || !config)
		return -DROP_INVALID;
	verdict = ip_parse(ctx, s, ip_family(ctx));
	if (verdict)
		return verdict;
	/* The far end takes it for the pod's, since it comes from the pod's node. */
	ep = path_endpoint(&s->pkt.tuple.src);
	if (ep && path_foreign(ctx, ep))
		return -DROP_SPOOFED_SOURCE;
	to = path_destination(&s->pkt.tuple.dst);
	/* The way to a podCIDR may change a moment before the host's route does. The far end takes either. */
	if (!to || !(to->kind == DESTINATION_POD_CIDR || to->flags & DESTINATION_BY_TUNNEL))
		return -DROP_NODE_OFF_LINK;
	/* The stack judges by the agent's route, which does not say what has been learnt. */
	mtu = to->flags & DESTINATION_BY_TUNNEL ? path_tunnel_mtu(ctx, config, to) : to->mtu;
	if (mtu < to->mtu && offload_exceeds(ctx, &s->pkt, mtu))
		return too_big_refuse(s, ep ? ep->ifindex : 0, mtu);
	if (cfg.services && !ep) {
		verdict = outside_of_host(ctx, s, flow_world());
		if (verdict)
			return verdict;
	}
	return tunnel_encap(ctx, s->pkt.tos, &to->node, to->mac) ?: VERDICT_STACK;
}

SEC("tc")
int ec_to_tunnel(struct __sk_buff *ctx)
{
	enum verdict verdict = to_tunnel(ctx);

	if (verdict != -DROP_TOO_BIG)
		return finish(ctx, DIRECTION_TO_TUNNEL, verdict);
	count_drop(ctx, DIRECTION_TO_TUNNEL, DROP_TOO_BIG);
	return too_big_return(ctx);
}
