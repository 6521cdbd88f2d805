//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * tc egress of a pod's host-side veth: what the host's stack sends to the pod, such as
 * replies of its own sockets, what it forwards, and its ICMP errors. What belongs to a
 * flow of the pod to a Service is translated back; all else passes as it is. What other
 * programs deliver to the pod does not come this way.
 */
#include "bpf/lib/count.h"
#include "bpf/lib/ip.h"
#include "bpf/lib/path.h"
#include "bpf/lib/service.h"

EC_INLINE enum verdict to_pod(struct __sk_buff *ctx)
{
	enum family family = ip_family(ctx);
	struct endpoint *ep;
	struct scratch *s;

	if (family == FAMILIES || pkt_in_vlan(ctx))
		return VERDICT_STACK;
	s = scratch_new(DIRECTION_TO_POD);
	if (!s || ip_parse(ctx, s, family))
		return VERDICT_STACK;
	ep = path_endpoint(&s->pkt.tuple.dst);
	if (!ep || ep->ifindex != ctx->ifindex)
		return VERDICT_STACK;
	return service_back(ctx, s, ep) ?: rewrite_finish(ctx, &s->pkt) ?: VERDICT_STACK;
}

SEC("tc")
int ec_to_pod(struct __sk_buff *ctx)
{
	return cfg.services ? finish(ctx, DIRECTION_TO_POD, to_pod(ctx)) : EC_ACT_UNSPEC;
}
