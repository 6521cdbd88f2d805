/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Tells who asks a Service that the packet gets no further, as the host that has
 * the Service's address would: a RST, port unreachable, or time exceeded. Tells a pod
 * that its packet is not masqueraded, as a router would: host unreachable.
 */
#ifndef EC_LIB_REFUSE_H
#define EC_LIB_REFUSE_H

#include "bpf/lib/answer.h"
#include "bpf/lib/reset.h"
#include "bpf/lib/service.h"

/* Codes of unreachable (RFC 792, RFC 4443). */
enum {
	REFUSE_PORT_IPV4 = 3,
	REFUSE_PORT_IPV6 = 4,
	REFUSE_HOST_IPV4 = 1,
	REFUSE_ADDRESS_IPV6 = 3,
};

/*
 * Whether the drop is that of a packet for which there is no room among those that are masqueraded, or whose protocol
 * never is. Pods are told (RFC 6888, section 3, REQ-8); clients outside are not, whom anybody can pretend to be.
 */
EC_INLINE bool refuse_masquerade(enum verdict verdict)
{
	switch ((int)verdict) {
	case -DROP_UNKNOWN_PROTOCOL:
	case -DROP_SNAT_EXHAUSTED:
	case -DROP_SNAT_LIMIT:
	case -DROP_SNAT_FULL:
	case -DROP_PORT_LIMIT:
		return true;
	default:
		return false;
	}
}

/* Whether the sender is told of the drop. */
EC_INLINE bool refuse_answers(enum verdict verdict)
{
	switch ((int)verdict) {
	case -DROP_NO_BACKEND:
	case -DROP_NO_SERVICE_PORT:
	case -DROP_BACKEND_GONE:
	case -DROP_SERVICE_TTL:
		return cfg.services;
	default:
		return false;
	}
}

/* A host that refuses a datagram has put it together before: one answer is enough, to the first fragment. */
EC_INLINE bool refuse_port(struct __sk_buff *ctx, struct scratch *s)
{
	const struct pkt *pkt = &s->pkt;

	if (pkt->fragment == FRAGMENT_LATER)
		return false;
	if (pkt->tuple.proto == IPPROTO_TCP)
		return pkt_l4(ctx, &s->pkt) && !(pkt->tcp_flags & TCP_RST) && reset_turn(ctx, s);
	if (pkt->family == FAMILY_IPV6)
		answer_set_error(s, ICMPV6_UNREACHABLE, REFUSE_PORT_IPV6, 0);
	else
		answer_set_error(s, ICMP_DEST_UNREACH, REFUSE_PORT_IPV4, 0);
	return answer_error(ctx, s, &pkt->tuple.dst);
}

EC_INLINE bool refuse_hop(struct __sk_buff *ctx, struct scratch *s)
{
	answer_set_error(s, s->pkt.family == FAMILY_IPV6 ? ICMPV6_TIME_EXCEEDED : ICMP_TIME_EXCEEDED, 0, 0);
	return answer_error(ctx, s, &s->pkt.tuple.dst);
}

/* Tells the pod that owns the packet, as the router on its way. Returns a TC action. */
EC_GLOBAL int refuse_unreachable(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();
	const struct addr *from;
	struct device *dev;

	if (!s || !s->owner.ifindex)
		return EC_ACT_SHOT;
	from = answer_router(s);
	dev = answer_to(s, answer_burst(s));
	if (!from || !dev || service_undo(ctx, s))
		return EC_ACT_SHOT;
	if (s->pkt.family == FAMILY_IPV6)
		answer_set_error(s, ICMPV6_UNREACHABLE, REFUSE_ADDRESS_IPV6, 0);
	else
		answer_set_error(s, ICMP_DEST_UNREACH, REFUSE_HOST_IPV4, 0);
	return answer_error(ctx, s, from) ? answer_send(ctx, s, dev) : EC_ACT_SHOT;
}

/*
 * Answers the owner in the scratch record, from the address to which it has sent the
 * packet that is dropped for this reason. Returns a TC action.
 */
EC_GLOBAL int refuse_answer(struct __sk_buff *ctx, enum drop_reason reason)
{
	struct scratch *s = scratch_get();
	struct device *dev;
	bool told;

	if (!s || !cfg.services)
		return EC_ACT_SHOT;
	dev = answer_to(s, answer_burst(s));
	if (!dev || service_undo(ctx, s))
		return EC_ACT_SHOT;
	told = reason == DROP_SERVICE_TTL ? refuse_hop(ctx, s) : refuse_port(ctx, s);
	return told ? answer_send(ctx, s, dev) : EC_ACT_SHOT;
}

#endif
