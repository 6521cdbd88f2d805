/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The stage frontend, the first of a pod's packet: one to a Service becomes one to a
 * backend before anything else looks at it (service.h).
 */
#ifndef EC_LIB_FRONTEND_H
#define EC_LIB_FRONTEND_H

#include "bpf/lib/affinity.h"
#include "bpf/lib/backend.h"
#include "bpf/lib/echo.h"
#include "bpf/lib/open.h"
#include "bpf/lib/service.h"
#include "bpf/lib/takeover.h"

/* In service_walk's frontend, above enum service_flags: a Service has the packet's destination. */
#define FRONTEND_THERE (1U << 31)

/* What becomes of a packet whose flow is known. */
enum frontend_turn {
	FRONTEND_GOES_ON,
	FRONTEND_ANEW, /* its backend serves no more, and another is chosen */
	FRONTEND_GONE, /* its backend is gone, and TCP has to be told */
};

/* The entry of an address that some Service has; NULL: none has it. */
EC_INLINE struct service *frontend_at(const struct addr *address)
{
	struct service_key key = {.address = *address};

	return bpf_map_lookup_elem(&services, &key);
}

/*
 * Copies the frontend that a packet goes to; false: there is none. The entry may be
 * deleted meanwhile and its memory be another's at once, so it is looked up again.
 */
EC_CALL bool frontend_find(const struct tuple *out, struct service *copy)
{
	struct service_key key = {.address = out->dst, .port = out->dport, .proto = out->proto};
	struct service *found = bpf_map_lookup_elem(&services, &key);

	for (int i = 0; i < 2 && found; i++) {
		*copy = *(volatile struct service *)found;
		if (bpf_map_lookup_elem(&services, &key) == found)
			return true;
		found = bpf_map_lookup_elem(&services, &key);
	}
	return false;
}

/* For later steps, SCTP has no ports. */
EC_INLINE void frontend_forget_ports(struct pkt *pkt)
{
	if (pkt->tuple.proto != IPPROTO_SCTP)
		return;
	pkt->tuple.sport = 0;
	pkt->tuple.dport = 0;
}

/* Whether a TCP flow's backend is known to be gone, and not only not to serve. */
EC_CALL bool frontend_backend_gone(const struct snat_entry *flow, const struct backend *b)
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

/* Whether a SYN begins another connection: the last is closed, or none was answered and the backend serves no more. */
EC_CALL bool frontend_syn_anew(struct scratch *s, const struct snat_entry *flow, bool serves)
{
	struct snat_entry *reverse;
	__u8 answered;

	nat_set_other_key(&s->key, &s->pkt.tuple, flow);
	reverse = bpf_map_lookup_elem(&snat_reverse, &s->key);
	answered = reverse ? reverse->state : 0;
	return answered ? tcp_opens_anew(flow->state, answered, true) : !serves || (flow->state & FLOW_RESET);
}

/* Whether a known flow may go on to its backend. One past its Service has none. */
EC_INLINE enum frontend_turn frontend_judge(struct scratch *s, const struct snat_entry *flow)
{
	__u8 proto = s->pkt.tuple.proto;
	const struct backend *b;
	bool serves;

	if (!flow->set)
		return FRONTEND_GOES_ON;
	b = backend_get(flow->backend);
	serves = b && backend_serves(b, flow->set, flow->generation) && !(flow->flags & FLOW_DEAD);
	if (proto == IPPROTO_TCP && tcp_is_opening(&s->pkt) && frontend_syn_anew(s, flow, serves))
		return FRONTEND_ANEW;
	if (serves)
		return FRONTEND_GOES_ON;
	if (proto == IPPROTO_UDP)
		return FRONTEND_ANEW;
	if (!frontend_backend_gone(flow, b))
		return FRONTEND_GOES_ON;
	/* A SYN is of another connection: this one cannot go on. */
	return proto == IPPROTO_SCTP || tcp_is_opening(&s->pkt) ? FRONTEND_ANEW : FRONTEND_GONE;
}

/* Turns the packet into that of its flow, of which this is the forward half. */
EC_INLINE enum verdict frontend_translate(struct __sk_buff *ctx, struct scratch *s, struct snat_entry *flow)
{
	nat_note(flow, &s->pkt, true);
	nat_set_other_key(&s->service.turns, &s->pkt.tuple, flow);
	return service_turn_into(ctx, s);
}

/* Prepares a flow for open_flow, to the target, on behalf of the pod. */
EC_INLINE void frontend_prepare(struct __sk_buff *ctx, struct scratch *s)
{
	const struct tuple *out = &s->pkt.tuple;

	/* With its own address a pod would not take the packet that it has sent. */
	s->owner.address = addr_equal(&s->target.address, &out->src) ? out->dst : out->src;
	s->owner.ifindex = ctx->ifindex;
	s->owner.direction = DIRECTION_FROM_POD;
	s->service.opens = true;
}

/* The backend that the pod keeps of a set (affinity.h), made the target; false: it keeps none. */
EC_INLINE bool frontend_keeps(struct scratch *s, const struct service *frontend, __u32 seconds)
{
	__u32 number = affinity_find(s, frontend->set, seconds, frontend->flags & SERVICE_LOCAL);

	return number && backend_take(s, number, frontend->set);
}

/* A flow that netfilter has translated until now keeps its backend, or stays netfilter's. */
EC_INLINE enum verdict frontend_take_over(struct __sk_buff *ctx, struct scratch *s, const struct service *frontend)
{
	if (!nf_translates())
		return VERDICT_GO_ON;
	s->target.taken_over = false;
	return takeover_flow(ctx, s, frontend);
}

/* Chooses the backend of a new flow. */
EC_INLINE enum verdict frontend_choose(struct scratch *s, const struct service *frontend)
{
	__u32 number = frontend->set, seconds;
	struct service_set *set = bpf_map_lookup_elem(&sets, &number);
	enum verdict verdict = VERDICT_GO_ON;

	if (!open_allowed(&s->pkt)) {
		s->owner.address = s->pkt.tuple.src;
		return -DROP_NO_MAPPING;
	}
	if (!set || !number)
		return -DROP_NO_BACKEND;
	seconds = set->affinity;
	if (!seconds || !frontend_keeps(s, frontend, seconds))
		verdict = backend_choose(s, frontend, set);
	if (!verdict && seconds)
		affinity_keep(s);
	return verdict;
}

/* A packet without a flow, to a frontend. known: it had one until now. */
EC_CALL enum verdict frontend_open(struct __sk_buff *ctx, struct scratch *s, bool known)
{
	struct service frontend;
	enum verdict verdict;

	if (!frontend_find(&s->pkt.tuple, &frontend))
		return known || (s->service.frontend & SERVICE_CLUSTER_IP) ? -DROP_NO_SERVICE_PORT : VERDICT_GO_ON;
	verdict = frontend_take_over(ctx, s, &frontend);
	if (!verdict && !open_is_taken_over(s))
		verdict = frontend_choose(s, &frontend);
	if (!verdict)
		frontend_prepare(ctx, s);
	return verdict;
}

/*
 * A packet that goes straight to an address that may be a backend's: if a flow of the pod
 * to a Service has its tuple already, it gets another port, or the backend would take the
 * two for one.
 */
EC_CALL enum verdict frontend_beside(struct __sk_buff *ctx, struct scratch *s)
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
	frontend_prepare(ctx, s);
	return VERDICT_GO_ON;
}

/* What a pod that is its own backend sends to the Service's address, where its request seems to come from. */
EC_CALL enum verdict frontend_to_itself(struct __sk_buff *ctx, struct scratch *s)
{
	struct snat_entry *reverse;

	if (!(s->service.device & DEVICE_ITSELF))
		return VERDICT_GO_ON;
	s->key = tuple_reversed(&s->pkt.tuple);
	reverse = service_reverse(&s->key, ctx->ifindex);
	if (!reverse)
		return VERDICT_GO_ON;
	service_reply(s, reverse);
	return service_turn_into(ctx, s);
}

/* A packet whose flow is not known, or has just ended. */
EC_INLINE enum verdict frontend_unknown(struct __sk_buff *ctx, struct scratch *s, bool known)
{
	enum verdict verdict = frontend_to_itself(ctx, s);

	if (verdict || s->service.translated)
		return verdict;
	return (s->service.frontend || known) ? frontend_open(ctx, s, known) : frontend_beside(ctx, s);
}

/* Whether a Service takes, or refuses, what a masqueraded flow to its address begins with. Other ports are the world's.
 */
EC_INLINE bool frontend_claims(const struct scratch *s)
{
	struct service frontend;

	if (!s->service.frontend || !open_allowed(&s->pkt))
		return false;
	return (s->service.frontend & SERVICE_CLUSTER_IP) || frontend_find(&s->pkt.tuple, &frontend);
}

/* Finds the packet's flow. */
EC_INLINE enum verdict frontend_of_flow(struct __sk_buff *ctx, struct scratch *s)
{
	struct snat_entry *flow;
	enum verdict verdict = nat_find(&s->pkt.tuple, ctx->ifindex, &flow);
	bool known = flow;

	if (verdict)
		return verdict;
	if (flow && !nat_is_service(flow)) {
		/* A masqueraded flow that is older than the Service ends with its connection. */
		if (!frontend_claims(s))
			return VERDICT_GO_ON;
		nat_end(&s->pkt.tuple, flow);
		known = false;
	} else if (flow) {
		switch (frontend_judge(s, flow)) {
		case FRONTEND_GOES_ON:
			return frontend_translate(ctx, s, flow);
		case FRONTEND_GONE:
			/* It ends with the RST that answers this. */
			flow->state |= FLOW_RESET;
			return -DROP_BACKEND_GONE;
		default:
			nat_end(&s->pkt.tuple, flow);
		}
	}
	return frontend_unknown(ctx, s, known);
}

/* What has no ports, to a frontend: a ping, or what no Service takes. */
EC_INLINE enum verdict frontend_without_ports(struct __sk_buff *ctx, struct scratch *s)
{
	enum verdict verdict = s->service.frontend & SERVICE_ANSWERS ? echo_answer(ctx, s) : VERDICT_GO_ON;

	if (verdict)
		return verdict;
	return s->service.frontend & SERVICE_CLUSTER_IP ? -DROP_NO_SERVICE_PORT : VERDICT_GO_ON;
}

/*
 * A pod's packet to a frontend, or of a pod that has opened flows to Services:
 * translated, or left as it is, or refused. opens says that open_flow is next.
 */
EC_GLOBAL enum verdict frontend_leave(struct __sk_buff *ctx)
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
		return frontend_without_ports(ctx, s);
	verdict = frontend_of_flow(ctx, s);
	if (!s->service.translated && !s->service.opens && !verdict)
		frontend_forget_ports(&s->pkt);
	return verdict;
}

/* Translates the packet for whose flow a pair has just been opened. */
EC_GLOBAL enum verdict frontend_opened(struct __sk_buff *ctx)
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
	if (!flow || !nat_is_service(flow))
		return -DROP_NO_MAPPING;
	if (open_is_taken_over(s))
		takeover_end(ctx, s);
	return frontend_translate(ctx, s, flow);
}

/* Opens the flow that has been prepared. What there is no room for to take it over stays netfilter's. */
EC_INLINE enum verdict frontend_begin(struct __sk_buff *ctx, const struct scratch *s)
{
	enum verdict verdict = open_flow(ctx);

	if (verdict)
		return open_is_taken_over(s) ? VERDICT_STACK : verdict;
	return frontend_opened(ctx);
}

/* Notes what the pod has, which spares lookups where it has none. */
EC_INLINE void frontend_note(const struct scratch *s, struct device *dev)
{
	__u32 flags = DEVICE_CLIENT | (service_is_itself(s) ? DEVICE_ITSELF : 0);

	if ((dev->flags & flags) != flags)
		__sync_fetch_and_or(&dev->flags, flags);
}

/* A pod's error about a flow to a Service. If the pod is its own backend, so is the error's source another. */
EC_INLINE enum verdict frontend_error(struct __sk_buff *ctx, struct scratch *s)
{
	s->service.sent = s->pkt.tuple;
	s->service.translated = true;
	return errors_translate(ctx);
}

/* The stage. Nothing in this node's podCIDR is a frontend. */
EC_INLINE enum verdict frontend_stage(struct __sk_buff *ctx, const struct config *config, struct scratch *s,
				      struct device *dev)
{
	struct service *frontend = NULL;
	enum verdict verdict;

	if (!cfg.services)
		return VERDICT_GO_ON;
	if (!path_is_ours(config, s->pkt.family, &s->pkt.tuple.dst))
		frontend = frontend_at(&s->pkt.tuple.dst);
	if (!frontend && !(dev->flags & DEVICE_CLIENT))
		return VERDICT_GO_ON;
	s->service.frontend = frontend ? frontend->flags | FRONTEND_THERE : 0;
	s->service.device = dev->flags;
	if (s->pkt.l4 == L4_ICMP_ERROR)
		return errors_forward(ctx) ? frontend_error(ctx, s) : VERDICT_GO_ON;
	verdict = frontend_leave(ctx);
	if (!verdict && s->service.opens)
		verdict = frontend_begin(ctx, s);
	if (s->service.translated)
		frontend_note(s, dev);
	return verdict;
}

#endif
