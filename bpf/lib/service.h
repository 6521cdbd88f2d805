/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The stage service, on the node of a pod that sends to a Service: the packet becomes one
 * to a backend before anything else looks at it, and a reply is translated back as the
 * last step before it enters the pod.
 *
 * A flow is a pair of halves in the tables of masquerading (nat.h), with FLOW_SERVICE.
 * There the forward key is the tuple as the pod sends it, and the reverse key the tuple as
 * the backend sees it.
 */
#ifndef EC_LIB_SERVICE_H
#define EC_LIB_SERVICE_H

#include "bpf/lib/backend.h"
#include "bpf/lib/errors.h"
#include "bpf/lib/open.h"
#include "bpf/lib/rewrite.h"

/* In service_walk's frontend, above enum service_flags: a Service has the packet's destination. */
#define SERVICE_FRONTEND (1U << 31)

/* What becomes of a packet whose flow is known. */
enum service_turn {
	SERVICE_GOES_ON,
	SERVICE_ANEW, /* its backend serves no more, and another is chosen */
	SERVICE_GONE, /* its backend is gone, and TCP has to be told */
};

/* Makes the packet that of the tuple in the scratch record, and remembers what the pod has sent. */
EC_INLINE enum verdict service_turn_into(struct __sk_buff *ctx, struct scratch *s)
{
	s->service.sent = s->pkt.tuple;
	s->service.translated = true;
	return rewrite_tuple(ctx);
}

/* Gives the packet back what the pod has sent, for an answer that quotes it. */
EC_INLINE enum verdict service_undo(struct __sk_buff *ctx, struct scratch *s)
{
	if (!cfg.services || !s->service.translated)
		return VERDICT_GO_ON;
	s->service.translated = false;
	s->service.turns = s->service.sent;
	return rewrite_tuple(ctx);
}

/*
 * Reads the ports for the holder of fragments, also those of SCTP, which no other step
 * needs. The packet must not have been rewritten yet.
 */
EC_INLINE enum verdict service_ports(struct __sk_buff *ctx, struct pkt *pkt, __u32 holder)
{
	if (pkt->tuple.proto == IPPROTO_SCTP && pkt->fragment != FRAGMENT_LATER &&
	    !pkt_load_l4(ctx, pkt, &pkt->tuple.sport, 2 * sizeof(pkt->tuple.sport)))
		return -DROP_INVALID;
	return pkt_flow(ctx, pkt, holder);
}

/* Whether flows of the packet's protocol are translated; none of ICMP is a Service's. */
EC_INLINE bool service_has_ports(const struct pkt *pkt)
{
	return pkt->tuple.proto == IPPROTO_TCP || pkt->tuple.proto == IPPROTO_UDP || pkt->tuple.proto == IPPROTO_SCTP;
}

/* For later steps, SCTP has no ports. */
EC_INLINE void service_forget_ports(struct pkt *pkt)
{
	if (pkt->tuple.proto != IPPROTO_SCTP)
		return;
	pkt->tuple.sport = 0;
	pkt->tuple.dport = 0;
}

/* The live reverse half with this key, renewed, if it is of a flow of this pod to a Service; NULL: there is none. */
EC_INLINE struct snat_entry *service_reverse(const struct tuple *reverse_key, __u32 ifindex)
{
	struct snat_entry *e = bpf_map_lookup_elem(&snat_reverse, reverse_key);
	enum flow_seen seen;

	if (!e || !nat_is_service(e) || e->ifindex != ifindex)
		return NULL;
	seen = flow_touch(&e->last_seen);
	if (seen == FLOW_DUE)
		nat_restore_forward(reverse_key, e);
	return seen == FLOW_GONE ? NULL : e;
}

/* Translates a packet that answers a flow of the pod, whose reverse half has the scratch record's key. */
EC_INLINE enum verdict service_reply(struct __sk_buff *ctx, struct scratch *s, struct snat_entry *reverse)
{
	struct tuple *turns = &s->service.turns;

	nat_note(reverse, &s->pkt, false);
	nat_set_other_key(turns, &s->key, reverse);
	*turns = tuple_reversed(turns);
	return VERDICT_GO_ON;
}

/* What is about to enter a pod that has opened flows to Services. */
EC_GLOBAL enum verdict service_enter(struct __sk_buff *ctx, __u32 ifindex)
{
	struct scratch *s = scratch_get();
	struct snat_entry *reverse;
	struct pkt *pkt;

	if (!s)
		return -DROP_INVALID;
	if (!cfg.services)
		return VERDICT_GO_ON;
	pkt = &s->pkt;
	/* What has been rewritten has its ports. The holder of later fragments is the pod. */
	if (!pkt->rewrite && service_ports(ctx, pkt, ifindex))
		return VERDICT_GO_ON;
	if (!service_has_ports(pkt))
		return VERDICT_GO_ON;
	s->key = tuple_reversed(&pkt->tuple);
	if (pkt->rewrite == END_DESTINATION)
		s->key.src = pkt->rewrite_to;
	reverse = service_reverse(&s->key, ifindex);
	if (!reverse)
		return VERDICT_GO_ON;
	return rewrite_settle(ctx, pkt) ?: service_reply(ctx, s, reverse) ?: rewrite_tuple(ctx);
}

/*
 * What is about to enter a pod: as the Service's, if it answers a flow of the pod to a
 * Service. What has been translated on its way to a backend is no such answer.
 */
EC_INLINE enum verdict service_back(struct __sk_buff *ctx, struct scratch *s, const struct endpoint *ep)
{
	struct device *dev;

	if (!cfg.services || s->service.translated)
		return VERDICT_GO_ON;
	dev = flow_owner(ep->ifindex);
	if (!dev || !(dev->flags & DEVICE_CLIENT))
		return VERDICT_GO_ON;
	if (!pkt_is_icmp(s->pkt.family, s->pkt.tuple.proto))
		return service_enter(ctx, ep->ifindex);
	return pkt_l4(ctx, &s->pkt) && s->pkt.l4 == L4_ICMP_ERROR && errors_back(ctx, ep->ifindex)
		       ? errors_translate(ctx)
		       : VERDICT_GO_ON;
}

/* Whether a TCP flow's backend is known to be gone, and not only not to serve. */
EC_CALL bool service_backend_gone(const struct snat_entry *flow, const struct backend *b)
{
	struct destination *to;

	if (flow->flags & FLOW_DEAD)
		return true;
	if (!(flow->flags & FLOW_ON_NODE) || (b && b->generation == flow->generation))
		return false;
	to = path_destination(&flow->far_address);
	return !to || (to->kind != DESTINATION_HOST && to->kind != DESTINATION_LOCAL &&
		       to->kind != DESTINATION_POD_CIDR && to->kind != DESTINATION_NODE);
}

/* Whether a SYN begins another connection: the last one is closed, or none was answered and the backend serves no more.
 */
EC_CALL bool service_syn_anew(struct scratch *s, const struct snat_entry *flow, bool serves)
{
	struct snat_entry *reverse;
	__u8 answered;

	nat_set_other_key(&s->key, &s->pkt.tuple, flow);
	reverse = bpf_map_lookup_elem(&snat_reverse, &s->key);
	answered = reverse ? reverse->state : 0;
	return answered ? tcp_opens_anew(flow->state, answered, true) : !serves || (flow->state & FLOW_RESET);
}

/* Whether a known flow may go on to its backend. One past its Service has none. */
EC_INLINE enum service_turn service_judge(struct scratch *s, const struct snat_entry *flow)
{
	__u8 proto = s->pkt.tuple.proto;
	const struct backend *b;
	bool serves;

	if (!flow->set)
		return SERVICE_GOES_ON;
	b = backend_get(flow->backend);
	serves = b && backend_serves(b, flow->generation) && !(flow->flags & FLOW_DEAD);
	if (proto == IPPROTO_TCP && tcp_is_opening(&s->pkt) && service_syn_anew(s, flow, serves))
		return SERVICE_ANEW;
	if (serves)
		return SERVICE_GOES_ON;
	if (proto == IPPROTO_TCP)
		return service_backend_gone(flow, b) ? SERVICE_GONE : SERVICE_GOES_ON;
	if (proto == IPPROTO_SCTP)
		return service_backend_gone(flow, b) ? SERVICE_ANEW : SERVICE_GOES_ON;
	return SERVICE_ANEW;
}

/* Turns the packet into that of its flow, of which this is the forward half. */
EC_INLINE enum verdict service_translate(struct __sk_buff *ctx, struct scratch *s, struct snat_entry *flow)
{
	nat_note(flow, &s->pkt, true);
	nat_set_other_key(&s->service.turns, &s->pkt.tuple, flow);
	return service_turn_into(ctx, s);
}

/* Prepares a flow for open_flow, to the target, on behalf of the pod. */
EC_INLINE void service_prepare(struct __sk_buff *ctx, struct scratch *s)
{
	const struct tuple *out = &s->pkt.tuple;

	/* With its own address a pod would not take the packet that it has sent. */
	s->owner.address = addr_equal(&s->target.address, &out->src) ? out->dst : out->src;
	s->owner.ifindex = ctx->ifindex;
	s->owner.direction = DIRECTION_FROM_POD;
	s->service.opens = true;
}

/* A packet without a flow, to a frontend. known: it had one until now. */
EC_CALL enum verdict service_open(struct __sk_buff *ctx, struct scratch *s, bool known)
{
	struct service frontend;
	enum verdict verdict;

	if (!backend_frontend(&s->pkt.tuple, &frontend))
		return known || (s->service.frontend & SERVICE_CLUSTER_IP) ? -DROP_NO_SERVICE_PORT : VERDICT_GO_ON;
	if (!open_allowed(&s->pkt)) {
		s->owner.address = s->pkt.tuple.src;
		return -DROP_NO_MAPPING;
	}
	verdict = backend_choose(s, &frontend);
	if (verdict)
		return verdict;
	service_prepare(ctx, s);
	return VERDICT_GO_ON;
}

/*
 * A packet that goes straight to an address that may be a backend's: if a flow of the pod
 * to a Service has its tuple already, it gets another port, or the backend would take the
 * two for one.
 */
EC_CALL enum verdict service_beside(struct __sk_buff *ctx, struct scratch *s)
{
	const struct tuple *out = &s->pkt.tuple;
	struct snat_entry *there;

	if (!open_allowed(&s->pkt) || out->proto == IPPROTO_SCTP)
		return VERDICT_GO_ON;
	there = nat_peek_reverse(out);
	if (!there || !nat_is_service(there) || there->ifindex != ctx->ifindex)
		return VERDICT_GO_ON;
	__builtin_memset(&s->target, 0, sizeof(s->target));
	s->target.address = out->dst;
	s->target.port = out->dport;
	s->owner.flags = FLOW_SERVICE;
	service_prepare(ctx, s);
	return VERDICT_GO_ON;
}

/* What a pod that is its own backend sends to the Service's address, where its request seems to come from. */
EC_CALL enum verdict service_to_itself(struct __sk_buff *ctx, struct scratch *s)
{
	struct snat_entry *reverse;

	if (!(s->service.device & DEVICE_ITSELF))
		return VERDICT_GO_ON;
	s->key = tuple_reversed(&s->pkt.tuple);
	reverse = service_reverse(&s->key, ctx->ifindex);
	if (!reverse)
		return VERDICT_GO_ON;
	service_reply(ctx, s, reverse);
	return service_turn_into(ctx, s);
}

/* A packet whose flow is not known, or has just ended. */
EC_INLINE enum verdict service_unknown(struct __sk_buff *ctx, struct scratch *s, bool known)
{
	enum verdict verdict = service_to_itself(ctx, s);

	if (verdict || s->service.translated)
		return verdict;
	return (s->service.frontend || known) ? service_open(ctx, s, known) : service_beside(ctx, s);
}

/* Finds the packet's flow. */
EC_INLINE enum verdict service_of_flow(struct __sk_buff *ctx, struct scratch *s)
{
	struct snat_entry *flow;
	enum verdict verdict = nat_find(&s->pkt.tuple, ctx->ifindex, &flow);
	bool known = flow;

	if (verdict)
		return verdict;
	if (flow && !nat_is_service(flow)) {
		/* A masqueraded flow that is older than the Service ends with its connection. */
		if (!s->service.frontend || !open_allowed(&s->pkt))
			return VERDICT_GO_ON;
		nat_end(&s->pkt.tuple, flow);
		known = false;
	} else if (flow) {
		switch (service_judge(s, flow)) {
		case SERVICE_GOES_ON:
			return service_translate(ctx, s, flow);
		case SERVICE_GONE:
			return -DROP_BACKEND_GONE;
		default:
			nat_end(&s->pkt.tuple, flow);
		}
	}
	return service_unknown(ctx, s, known);
}

/* What has no ports, to a frontend. */
EC_INLINE enum verdict service_without_ports(struct __sk_buff *ctx, struct scratch *s)
{
	return s->service.frontend & SERVICE_CLUSTER_IP ? -DROP_NO_SERVICE_PORT : VERDICT_GO_ON;
}

/*
 * A pod's packet to a frontend, or of a pod that has opened flows to Services:
 * translated, or left as it is, or refused. opens says that open_flow is next.
 */
EC_GLOBAL enum verdict service_leave(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();
	enum verdict verdict;

	if (!s)
		return -DROP_INVALID;
	if (!cfg.services)
		return VERDICT_GO_ON;
	s->service.opens = false;
	s->owner.ifindex = ctx->ifindex;
	verdict = service_ports(ctx, &s->pkt, ctx->ifindex);
	if (verdict)
		return s->service.frontend ? verdict : VERDICT_GO_ON;
	if (!service_has_ports(&s->pkt))
		return service_without_ports(ctx, s);
	verdict = service_of_flow(ctx, s);
	if (!s->service.translated && !s->service.opens && !verdict)
		service_forget_ports(&s->pkt);
	return verdict;
}

/* Translates the packet for whose flow a pair has just been opened. */
EC_GLOBAL enum verdict service_opened(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();
	struct snat_entry *flow;
	enum verdict verdict;

	if (!s)
		return -DROP_INVALID;
	if (!cfg.services)
		return VERDICT_GO_ON;
	verdict = nat_find(&s->pkt.tuple, ctx->ifindex, &flow);
	if (verdict)
		return verdict;
	return flow && nat_is_service(flow) ? service_translate(ctx, s, flow) : -DROP_NO_MAPPING;
}

/* Whether the pod is its own backend: the packet has a source that the stack would take for a martian. */
EC_INLINE bool service_is_itself(const struct scratch *s)
{
	return cfg.services && s->service.translated && !addr_equal(&s->pkt.tuple.src, &s->service.sent.src);
}

/*
 * A backend of this node that is no pod's any more. Its flow ends, so that the next packet chooses another; a
 * connection is reset.
 */
EC_CALL enum verdict service_unreached(struct scratch *s)
{
	struct snat_entry *flow;

	if (!cfg.services || !s->service.translated || s->pkt.l4 == L4_ICMP_ERROR)
		return -DROP_NO_ENDPOINT;
	flow = nat_peek(&s->service.sent, s->owner.ifindex);
	if (!flow || !flow->set)
		return -DROP_NO_ENDPOINT;
	nat_end(&s->service.sent, flow);
	return s->pkt.tuple.proto == IPPROTO_TCP ? -DROP_BACKEND_GONE : -DROP_NO_ENDPOINT;
}

/* Notes what the pod has, which spares lookups where it has none. */
EC_INLINE void service_note(const struct scratch *s, struct device *dev)
{
	__u32 flags = DEVICE_CLIENT | (service_is_itself(s) ? DEVICE_ITSELF : 0);

	if ((dev->flags & flags) != flags)
		__sync_fetch_and_or(&dev->flags, flags);
}

/* The stage: what the pod sends to a Service becomes a packet to a backend. Nothing in this node's podCIDR is a
 * frontend. */
EC_INLINE enum verdict service_forward(struct __sk_buff *ctx, const struct config *config, struct scratch *s,
				       struct device *dev)
{
	struct service *frontend = NULL;
	enum verdict verdict;

	if (!cfg.services)
		return VERDICT_GO_ON;
	if (!path_is_ours(config, s->pkt.family, &s->pkt.tuple.dst))
		frontend = backend_address(&s->pkt.tuple.dst);
	if (!frontend && !(dev->flags & DEVICE_CLIENT))
		return VERDICT_GO_ON;
	s->service.frontend = frontend ? frontend->flags | SERVICE_FRONTEND : 0;
	s->service.device = dev->flags;
	if (s->pkt.l4 == L4_ICMP_ERROR)
		return errors_forward(ctx) ? errors_translate(ctx) : VERDICT_GO_ON;
	verdict = service_leave(ctx);
	if (!verdict && s->service.opens)
		verdict = open_flow(ctx) ?: service_opened(ctx);
	if (s->service.translated)
		service_note(s, dev);
	return verdict;
}

#endif
