/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Whether a known flow to a Service goes on to its backend, now that another packet has come. */
#ifndef EC_LIB_TURN_H
#define EC_LIB_TURN_H

#include "bpf/lib/backend.h"
#include "bpf/lib/hostport.h"
#include "bpf/lib/nat.h"

/* What becomes of a packet whose flow is known. */
enum turn {
	TURN_GOES_ON,
	TURN_ANEW, /* another backend is chosen */
	TURN_GONE, /* its backend is gone, and TCP has to be told */
};

/* Whether the backend of a flow serves or, where there is nothing to begin, answers. */
EC_INLINE bool turn_serves(const struct snat_entry *flow, const struct backend *b, __u8 proto)
{
	if (flow->flags & FLOW_DEAD)
		return false;
	if (flow->set == SET_HOST_PORT)
		return hostport_serves(flow);
	return b &&
	       backend_is(b, flow->set, flow->generation, proto == IPPROTO_UDP ? BACKEND_GOES_ON : BACKEND_SERVING);
}

/* Whether a TCP flow's backend, which does not serve, is known to be gone. A host port's is. */
EC_CALL bool turn_backend_gone(const struct snat_entry *flow, const struct backend *b)
{
	struct destination *to;

	if ((flow->flags & FLOW_DEAD) || flow->set == SET_HOST_PORT)
		return true;
	if (!(flow->flags & FLOW_ON_NODE) || (b && b->generation == flow->generation))
		return false;
	to = path_destination(&flow->far_address);
	return !to || (to->kind != DESTINATION_HOST && to->kind != DESTINATION_LOCAL &&
		       to->kind != DESTINATION_POD_CIDR && to->kind != DESTINATION_NODE);
}

/*
 * Whether a SYN begins another connection: the last is closed, or none was answered and the backend serves no more.
 * What a client outside has sent anybody may have: while its backend serves, only that closes one that it has accepted.
 * A SYN after another end goes to the same backend.
 */
EC_CALL bool turn_syn_anew(struct scratch *s, const struct snat_entry *flow, bool serves)
{
	struct snat_entry *reverse;
	__u8 answered;

	nat_set_other_key(&s->key, &s->pkt.tuple, flow);
	reverse = bpf_map_lookup_elem(&snat_reverse, &s->key);
	answered = reverse ? reverse->state : 0;
	if (!answered)
		return !serves || (flow->state & FLOW_RESET);
	if (!s->owner.ifindex && serves && (answered & (FLOW_SYN | FLOW_ACK)))
		return answered & FLOW_FIN;
	return tcp_opens_anew(flow->state, answered, s->owner.ifindex);
}

/* Whether a known flow may go on to its backend. One past its Service has none. */
EC_INLINE enum turn turn_judge(struct scratch *s, const struct snat_entry *flow)
{
	__u8 proto = s->pkt.tuple.proto;
	const struct backend *b;
	bool serves;

	if (!flow->set)
		return TURN_GOES_ON;
	b = backend_get(flow->backend);
	serves = turn_serves(flow, b, proto);
	if (proto == IPPROTO_TCP && tcp_is_opening(&s->pkt) && turn_syn_anew(s, flow, serves))
		return TURN_ANEW;
	if (serves)
		return TURN_GOES_ON;
	if (proto == IPPROTO_UDP)
		return TURN_ANEW;
	if (!turn_backend_gone(flow, b))
		return TURN_GOES_ON;
	/* A SYN is of another connection: this one cannot go on. */
	return proto == IPPROTO_SCTP || tcp_is_opening(&s->pkt) ? TURN_ANEW : TURN_GONE;
}

#endif
