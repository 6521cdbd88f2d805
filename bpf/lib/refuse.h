/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Tells who asks a Service that the packet gets no further, as the host that has
 * the Service's address would: a RST, port unreachable, or time exceeded.
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
};

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
