/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The stage frontend, the first of a pod's packet: one to a Service becomes one to a
 * backend before anything else looks at it (service.h). What comes from outside meets it
 * as well (outside.h). Whose packet it is, the owner in the scratch record says.
 */
#ifndef EC_LIB_FRONTEND_H
#define EC_LIB_FRONTEND_H

#include "bpf/lib/affinity.h"
#include "bpf/lib/asked.h"
#include "bpf/lib/backend.h"
#include "bpf/lib/echo.h"
#include "bpf/lib/hostport.h"
#include "bpf/lib/open.h"
#include "bpf/lib/service.h"
#include "bpf/lib/takeover.h"
#include "bpf/lib/turn.h"
#include "bpf/lib/way.h"

/*
 * Copies the frontend that a packet without a flow goes to; false: there is none. That of a
 * host port has one backend, the target. An address of the node has sockets of the host's
 * too: a segment of no flow is theirs, or netfilter's (frontend_resume). Where a NodePort is a pod's host port as well,
 * the pod was first (pkg/endpoint).
 */
EC_CALL bool frontend_find(struct __sk_buff *ctx, struct scratch *s, struct service *copy)
{
	const struct tuple *out = &s->pkt.tuple;
	struct service_key key = {.address = out->dst, .port = out->dport, .proto = out->proto};
	__u32 flags = s->service.flags;
	bool opens = open_allowed(&s->pkt);

	if ((flags & SERVICE_OWN) && !opens && !nf_translates())
		return false;
	if (frontend_copy(&key, copy))
		return flags & FRONTEND_THERE;
	if (opens && hostport_may_be(flags) && hostport_find(ctx, s)) {
		*copy = (struct service){.set = SET_HOST_PORT};
		return true;
	}
	key.address = addr_any_like(&out->dst);
	return (flags & SERVICE_NODE) && frontend_copy(&key, copy);
}

/* For later steps, SCTP has no ports. */
EC_INLINE void frontend_forget_ports(struct pkt *pkt)
{
	if (pkt->tuple.proto != IPPROTO_SCTP)
		return;
	pkt->tuple.sport = 0;
	pkt->tuple.dport = 0;
}

/* Turns the packet into that of its flow, of which this is the forward half. */
EC_INLINE enum verdict frontend_translate(struct __sk_buff *ctx, struct scratch *s, struct snat_entry *flow)
{
	nat_note(flow, &s->pkt, true);
	s->service.pod = flow->pod;
	nat_set_other_key(&s->service.turns, &s->pkt.tuple, flow);
	return service_turn_into(ctx, s);
}

/* Prepares a flow for open_flow, to the target, on behalf of the owner. */
EC_INLINE enum verdict frontend_prepare(struct __sk_buff *ctx, struct scratch *s)
{
	const struct tuple *out = &s->pkt.tuple;

	s->service.opens = true;
	if (open_is_taken_over(s))
		return VERDICT_GO_ON;
	if (!s->owner.ifindex)
		return way_source(ctx, s);
	/* With its own address a pod would not take the packet that it has sent. */
	s->owner.address = addr_equal(&s->target.address, &out->src) ? out->dst : out->src;
	s->target.masqueraded = false;
	return VERDICT_GO_ON;
}

/* The backend that the client keeps of a set (affinity.h), made the target; false: it keeps none. */
EC_INLINE bool frontend_keeps(struct scratch *s, const struct service *frontend, __u32 seconds, bool local)
{
	__u32 number = affinity_find(s, frontend->set, seconds, local);

	return number && backend_take(&s->target, number, frontend->set, BACKEND_SERVING);
}

/* A flow that netfilter has translated until now keeps its backend, or stays netfilter's. */
EC_INLINE enum verdict frontend_take_over(struct __sk_buff *ctx, struct scratch *s, const struct service *frontend)
{
	enum verdict verdict;

	s->target.taken_over = false;
	if (frontend->set == SET_HOST_PORT)
		return takeover_answers(ctx, s) ? VERDICT_STACK : VERDICT_GO_ON;
	if (!nf_translates())
		return VERDICT_GO_ON;
	verdict = takeover_flow(ctx, s, frontend);
	/* Asked here: on the chain of calls below, each word of the stack counts. */
	return !verdict && s->target.taken_over && !s->owner.ifindex && !way_goes_on(ctx, s) ? VERDICT_STACK : verdict;
}

/* A segment of no flow of ours, to an address of the node. What netfilter does not translate is a socket's. */
EC_INLINE enum verdict frontend_resume(struct __sk_buff *ctx, struct scratch *s, const struct service *frontend)
{
	enum verdict verdict = asked_judge_source(ctx) ? VERDICT_GO_ON : frontend_take_over(ctx, s, frontend);

	return verdict || !open_is_taken_over(s) ? verdict : frontend_prepare(ctx, s);
}

/*
 * A packet that may open no flow. Of a client outside it is the next program's while flow tables are being moved: one
 * of another build has its flow.
 */
EC_CALL enum verdict frontend_of_none(struct scratch *s)
{
	const struct config *config = config_get();

	s->owner.address = s->pkt.tuple.src;
	return !s->owner.ifindex && config && (config->flags & CONFIG_FLOWS_MOVE) ? VERDICT_STACK : -DROP_NO_MAPPING;
}

/* Chooses the backend of a new flow. */
EC_INLINE enum verdict frontend_choose(struct scratch *s, const struct service *frontend)
{
	__u32 number = frontend->set, seconds;
	struct service_set *set = bpf_map_lookup_elem(&sets, &number);
	enum verdict verdict = VERDICT_GO_ON;
	bool local;

	if (!open_allowed(&s->pkt))
		return frontend_of_none(s);
	if (number == SET_HOST_PORT) {
		s->owner.flags = s->target.flags;
		return VERDICT_GO_ON;
	}
	if (!set || !number)
		return -DROP_NO_BACKEND;
	seconds = set->affinity;
	local = asked_is_local(s, frontend);
	if (!seconds || !frontend_keeps(s, frontend, seconds, local))
		verdict = backend_choose(&s->target, number, set, local);
	if (!verdict)
		s->owner.flags = s->target.flags;
	return verdict;
}

/*
 * Whether what no Service has is refused; known: it had one until now, and kube-proxy has none for it. The node answers
 * for its own addresses.
 */
EC_INLINE bool frontend_is_refused(const struct scratch *s, bool known)
{
	if (s->service.flags & (SERVICE_CLUSTER_IP | SERVICE_OWN))
		return s->service.flags & SERVICE_CLUSTER_IP;
	return known && !config_yields(config_get(), s->pkt.family);
}

/* A packet without a flow, to a frontend. known: it had one until now. */
EC_CALL enum verdict frontend_open(struct __sk_buff *ctx, struct scratch *s, bool known)
{
	struct service frontend;
	enum verdict verdict;

	if (!frontend_find(ctx, s, &frontend))
		return frontend_is_refused(s, known) ? asked_judge_source(ctx) ?: -DROP_NO_SERVICE_PORT : VERDICT_GO_ON;
	if ((s->service.flags & SERVICE_OWN) && !open_allowed(&s->pkt))
		return frontend_resume(ctx, s, &frontend);
	if (asked_answers_host(ctx, s))
		return VERDICT_STACK;
	verdict = asked_judge_source(ctx);
	if (!verdict && (asked_by_service(s) || asked_away_from_home(s)))
		verdict = -DROP_SPOOFED_SOURCE;
	if (!verdict && !asked_admits(s, &frontend))
		verdict = -DROP_SOURCE_RANGE;
	if (!verdict)
		verdict = frontend_take_over(ctx, s, &frontend);
	if (verdict || open_is_taken_over(s))
		return verdict ?: frontend_prepare(ctx, s);
	if (asked_goes_past(ctx, s))
		return VERDICT_GO_ON;
	return frontend_choose(s, &frontend) ?: frontend_prepare(ctx, s);
}

/* Whether the packet has arrived for others, to whom the stack sends it or does not. */
EC_INLINE bool frontend_passes_on(const struct scratch *s)
{
	struct destination *to;

	if (s->direction != DIRECTION_FROM_UPLINK && s->direction != DIRECTION_FROM_TUNNEL)
		return false;
	to = path_destination(&s->pkt.tuple.dst);
	return !to || to->kind != DESTINATION_HOST;
}

/*
 * A packet that goes straight to an address that may be a backend's: if a flow of the owner
 * to a Service has its tuple already, it gets another port, or the backend would take the
 * two for one.
 */
EC_CALL enum verdict frontend_beside(struct __sk_buff *ctx, struct scratch *s)
{
	const struct tuple *out = &s->pkt.tuple;
	struct snat_entry *there;

	if (!(s->service.device & DEVICE_CLIENT) || !open_allowed(&s->pkt) || out->proto == IPPROTO_SCTP)
		return VERDICT_GO_ON;
	there = nat_peek_reverse(out);
	if (!there || !nat_is_service(there) || there->ifindex != s->owner.ifindex || frontend_passes_on(s))
		return VERDICT_GO_ON;
	__builtin_memset(&s->target, 0, sizeof(s->target));
	s->target.address = out->dst;
	s->target.port = out->dport;
	s->owner.flags = FLOW_SERVICE;
	return asked_judge_source(ctx) ?: frontend_prepare(ctx, s);
}

/* What a pod that is its own backend sends to the Service's address, where its request seems to come from. */
EC_CALL enum verdict frontend_to_itself(struct __sk_buff *ctx, struct scratch *s)
{
	struct snat_entry *reverse;

	if (!(s->service.device & DEVICE_ITSELF))
		return VERDICT_GO_ON;
	s->key = tuple_reversed(&s->pkt.tuple);
	reverse = service_reverse(&s->key, s->owner.ifindex);
	if (!reverse)
		return VERDICT_GO_ON;
	service_reply(s, reverse);
	return service_turn_into(ctx, s);
}

/* A packet whose flow is not known, or has just ended. */
EC_INLINE enum verdict frontend_unknown(struct __sk_buff *ctx, struct scratch *s, bool known)
{
	enum verdict verdict = frontend_to_itself(ctx, s);

	if (!verdict && !s->service.translated && (s->service.flags || known))
		verdict = frontend_open(ctx, s, known);
	/* The address of a Service may be a backend's as well, on another port. */
	return verdict || s->service.translated || s->service.opens ? verdict : frontend_beside(ctx, s);
}

/*
 * Whether a Service takes, or refuses, what a masqueraded flow to its address begins with. Other ports are the world's.
 */
EC_INLINE bool frontend_claims(struct __sk_buff *ctx, struct scratch *s)
{
	struct service frontend;

	if (!s->service.flags || !open_allowed(&s->pkt))
		return false;
	return (s->service.flags & SERVICE_CLUSTER_IP) || frontend_find(ctx, s, &frontend);
}

/*
 * The entry of the packet's tuple among flows. Who has opened none to a Service has none to the node's own addresses,
 * to which nothing is masqueraded.
 */
EC_INLINE struct snat_entry *frontend_entry(const struct scratch *s)
{
	if ((s->service.flags & SERVICE_OWN) && !(s->service.device & DEVICE_CLIENT))
		return NULL;
	return bpf_map_lookup_elem(&snat, &s->pkt.tuple);
}

/* Finds the packet's flow, which who cannot have sent it neither renews nor learns of. */
EC_INLINE enum verdict frontend_of_flow(struct __sk_buff *ctx, struct scratch *s)
{
	struct snat_entry *flow = frontend_entry(s);
	enum verdict verdict = VERDICT_GO_ON;
	bool known;

	if (flow)
		verdict = asked_judge_source(ctx) ?: nat_use(&s->pkt.tuple, s->owner.ifindex, flow, &flow);
	if (verdict)
		return verdict;
	known = flow;
	if (flow && !nat_is_service(flow)) {
		/* A masqueraded flow that is older than the Service ends with its connection. */
		if (!frontend_claims(ctx, s))
			return VERDICT_GO_ON;
		nat_end(&s->pkt.tuple, flow);
		known = false;
	} else if (flow) {
		switch (turn_judge(s, flow)) {
		case TURN_GOES_ON:
			return frontend_translate(ctx, s, flow);
		case TURN_GONE:
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
	enum verdict verdict = VERDICT_GO_ON;

	if (s->service.flags & (SERVICE_ANSWERS | SERVICE_CLUSTER_IP))
		verdict = asked_judge_source(ctx);
	/* The node answers for its own addresses. */
	if (!verdict && (s->service.flags & (SERVICE_ANSWERS | SERVICE_OWN)) == SERVICE_ANSWERS)
		verdict = echo_answer(ctx, s);
	if (verdict)
		return verdict;
	return s->service.flags & SERVICE_CLUSTER_IP ? -DROP_NO_SERVICE_PORT : VERDICT_GO_ON;
}

/* Whose fragments those of the packet are (frag.h). */
EC_INLINE __u32 frontend_holder(const struct scratch *s)
{
	if (s->owner.ifindex)
		return s->owner.ifindex;
	return s->direction == DIRECTION_TO_UPLINK ? FRAGMENTS_NODE : FRAGMENTS_WORLD;
}

/*
 * A packet to a frontend, or of an owner that has opened flows to Services: translated, or
 * left as it is, or refused. opens says that open_flow is next.
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
	verdict = service_ports(ctx, &s->pkt, frontend_holder(s));
	/* The node's own addresses get what is no Service's, too. */
	if (verdict)
		return s->service.flags && !(s->service.flags & SERVICE_OWN) ? verdict : VERDICT_GO_ON;
	if (!service_has_ports(&s->pkt))
		return frontend_without_ports(ctx, s);
	verdict = frontend_of_flow(ctx, s);
	if (!s->service.translated && !s->service.opens && !verdict)
		frontend_forget_ports(&s->pkt);
	return verdict;
}

/* The packet's source keeps the target of the flow that has been opened. What has been refused pushes out no record. */
EC_CALL void frontend_keep(const struct scratch *s)
{
	__u32 number = s->target.set;
	struct service_set *set = bpf_map_lookup_elem(&sets, &number);

	if (number && set && set->affinity)
		affinity_keep(s);
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
	verdict = nat_find(&s->pkt.tuple, s->owner.ifindex, &flow);
	if (verdict)
		return verdict;
	if (!flow || !nat_is_service(flow))
		return -DROP_NO_MAPPING;
	if (open_is_taken_over(s))
		takeover_done(ctx, s, flow);
	else
		frontend_keep(s);
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

/* An error, of which a flow to a Service is known. If a pod is its own backend, so is the error's source another. */
EC_INLINE enum verdict frontend_error(struct __sk_buff *ctx, struct scratch *s)
{
	enum verdict verdict;

	/* Of redirects and pieces of errors the stack knows what they are worth. Pods send none. */
	if (s->pkt.fragment != FRAGMENT_NONE || icmp_is_redirect(s->pkt.family, s->pkt.icmp_type) ||
	    !errors_forward(ctx))
		return VERDICT_GO_ON;
	verdict = asked_judge_source(ctx);
	if (verdict)
		return verdict;
	errors_heed(ctx, s, s->owner.ifindex);
	s->service.sent = s->pkt.tuple;
	s->service.translated = true;
	return errors_translate(ctx);
}

/*
 * The stage, for a packet of the owner in the scratch record, of which dev is the entry, to a frontend with these
 * flags.
 */
EC_INLINE enum verdict frontend_walk(struct __sk_buff *ctx, struct scratch *s, struct device *dev, __u32 flags)
{
	enum verdict verdict;

	flags = frontend_serves(s->pkt.family, flags);
	if (!flags && !(dev->flags & DEVICE_CLIENT))
		return VERDICT_GO_ON;
	s->service.flags = flags;
	s->service.device = dev->flags;
	if (s->pkt.l4 == L4_ICMP_ERROR)
		return frontend_error(ctx, s);
	verdict = frontend_leave(ctx);
	if (!verdict && s->service.opens)
		verdict = frontend_begin(ctx, s);
	if (s->service.translated)
		flow_note(dev, DEVICE_CLIENT | (s->owner.ifindex && service_is_itself(s) ? DEVICE_ITSELF : 0));
	return verdict;
}

/* The stage for what a pod sends. Nothing in this node's podCIDR is a frontend. */
EC_INLINE enum verdict frontend_stage(struct __sk_buff *ctx, const struct config *config, struct scratch *s,
				      struct device *dev)
{
	const struct addr *to = &s->pkt.tuple.dst;

	return frontend_walk(ctx, s, dev, path_is_ours(config, s->pkt.family, to) ? 0 : frontend_flags(to));
}

#endif
