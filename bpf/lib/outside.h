/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Services for those who are no pod of this node. Their packets meet the stage of pods
 * (frontend.h) where they arrive or, sent by the host's stack past every hook, where they
 * leave. All their flows have one owner, 0: the world.
 *
 * A backend on this node sees the client, and what it answers is translated where it
 * passes: in ec_from_pod, or on its way out of the stack. To any other backend the client is
 * this node, on a port of its own, and the answer comes back here. What has been translated
 * mostly has a source that the stack would take for a martian, so it takes a way of its own
 * (way.h), or none.
 */
#ifndef EC_LIB_OUTSIDE_H
#define EC_LIB_OUTSIDE_H

#include "bpf/lib/frontend.h"
#include "bpf/lib/fwd.h"
#include "bpf/lib/tunnel.h"

/*
 * Whether the packet may answer a flow of the world's, which the scratch record knows. What arrives answers one that
 * has a port of the node's: one of its own, unless netfilter has chosen it.
 */
EC_INLINE bool outside_may_answer(const struct scratch *s)
{
	const struct tuple *t = &s->pkt.tuple;

	if (!service_has_ports(&s->pkt))
		return false;
	if (s->direction != DIRECTION_FROM_UPLINK && s->direction != DIRECTION_FROM_TUNNEL)
		return true;
	return t->proto == IPPROTO_SCTP || nat_port_may_be_held(t->proto, t->dport) ||
	       (s->service.device & DEVICE_ANY_PORT);
}

/* What a backend sends to a client outside becomes the Service's: an answer, or an error about a question. */
EC_GLOBAL enum verdict outside_back(struct __sk_buff *ctx, __u32 holder)
{
	struct scratch *s = scratch_get();
	struct snat_entry *reverse;
	enum verdict verdict;

	if (!s)
		return -DROP_INVALID;
	if (!cfg.services)
		return VERDICT_GO_ON;
	s->owner.ifindex = 0;
	s->service.answers_host = false;
	if (s->pkt.l4 == L4_ICMP_ERROR)
		return frontend_error(ctx, s);
	if (service_ports(ctx, &s->pkt, holder) || !outside_may_answer(s))
		return VERDICT_GO_ON;
	s->key = tuple_reversed(&s->pkt.tuple);
	reverse = errors_half(&snat_reverse, &s->key, 0);
	/* Who has the address of an earlier pod does not speak for it. */
	if (reverse && reverse->pod && s->direction == DIRECTION_FROM_POD && reverse->pod != ctx->ifindex)
		reverse = NULL;
	verdict = reverse ? asked_judge_source(ctx) : VERDICT_GO_ON;
	if (verdict)
		return verdict;
	if (!reverse || !nat_renew_reverse(&s->key, reverse)) {
		frontend_forget_ports(&s->pkt);
		return VERDICT_GO_ON;
	}
	s->service.answers_host = reverse->flags & FLOW_HOST;
	service_reply(s, reverse);
	return service_turn_into(ctx, s);
}

/* Into a backend. What the stack was sending out of an uplink cannot pass the pod's link by. */
EC_INLINE enum verdict outside_to_pod(struct __sk_buff *ctx, struct scratch *s, const struct endpoint *ep)
{
	enum verdict verdict = way_judge(s, &s->service.sent.src, DESTINATION_LOCAL, s->pkt.tuple.dport);
	__u32 ifindex = ep->ifindex;

	if (verdict)
		return verdict;
	flow_note(flow_owner(ifindex), DEVICE_BACKEND);
	if (s->direction != DIRECTION_TO_UPLINK)
		return fwd_to_pod(ctx, s, ep);
	verdict = ip_hop(ctx, &s->pkt, ep->pod_mac);
	if (verdict)
		return verdict;
	bpf_redirect(ifindex, 0);
	return VERDICT_DELIVERED;
}

/* To a backend of the host's stack, which has the packet only where it comes from outside. */
EC_INLINE enum verdict outside_to_host(struct __sk_buff *ctx, const struct scratch *s)
{
	if (s->direction == DIRECTION_TO_UPLINK || s->direction == DIRECTION_FROM_POD)
		return -DROP_SERVICE_ROUTE;
	flow_note(flow_world(), DEVICE_BACKEND);
	ctx->mark |= cfg.mark;
	return VERDICT_STACK;
}

/*
 * An answer to what the host's stack has sent. It gets it by the uplink that leads to the Service's address, where it
 * expects it. One to the tunnel's port would be taken for a packet of the node that has the source's address.
 */
EC_INLINE enum verdict outside_answer_host(struct __sk_buff *ctx, struct scratch *s, struct path *p)
{
	enum verdict verdict;

	if (tunnel_is_outer(&s->pkt))
		return -DROP_TUNNEL_PORT;
	ctx->mark |= cfg.mark;
	if (s->direction == DIRECTION_FROM_UPLINK)
		return VERDICT_STACK;
	path_begin(p, NULL);
	verdict = way_by_route(ctx, &s->pkt, &s->pkt.tuple.src, p);
	if (verdict)
		return verdict;
	bpf_redirect(p->ifindex, BPF_F_INGRESS);
	return VERDICT_DELIVERED;
}

/*
 * Whether the packet fits its way. What does not fit the tunnel may leave in fragments of the outer packet, which the
 * kernel makes over IPv4.
 */
EC_INLINE enum verdict outside_fits(struct __sk_buff *ctx, struct scratch *s, const struct path *p)
{
	__u32 mtu;

	if (!offload_exceeds(ctx, &s->pkt, p->mtu))
		return VERDICT_GO_ON;
	mtu = too_big_mtu(ctx, p);
	if (!mtu || !offload_exceeds(ctx, &s->pkt, mtu))
		return VERDICT_GO_ON;
	if (p->tunnel && addr_is_v4(&p->node) && too_big_may_fragment(ctx, &s->pkt))
		return VERDICT_GO_ON;
	return too_big_refuse(s, s->owner.ifindex, mtu);
}

/* Sends what has been translated to where it goes now. If that is refused, its owner is told. */
EC_GLOBAL enum verdict outside_send(struct __sk_buff *ctx)
{
	const struct config *config = config_get();
	struct scratch *s = scratch_get();
	enum verdict verdict;
	struct endpoint *ep;
	struct path *p;

	if (!s || !config || !cfg.services)
		return -DROP_INVALID;
	p = path_slot(WAY_FROM(ctx), &s->pkt);
	if (!p)
		return -DROP_INVALID;
	if (s->service.answers_host)
		return outside_answer_host(ctx, s, p);
	ep = service_endpoint(s);
	if (ep)
		return outside_to_pod(ctx, s, ep);
	if (s->service.pod || path_is_ours(config, s->pkt.family, &s->pkt.tuple.dst))
		return service_unreached(s, DROP_SERVICE_ROUTE);
	verdict = way_find(ctx, config, &s->pkt, p) ?: way_judge(s, &s->service.sent.src, p->kind, s->pkt.tuple.dport);
	if (verdict)
		return verdict;
	if (p->kind == DESTINATION_HOST)
		return outside_to_host(ctx, s);
	return outside_fits(ctx, s, p) ?: fwd_along(ctx, &s->pkt, p);
}

/* What a pod sends that has been the backend of a client outside, if it answers one. */
EC_INLINE enum verdict outside_of_pod(struct __sk_buff *ctx, struct scratch *s, const struct device *dev)
{
	enum verdict verdict;

	if (!cfg.services || !(dev->flags & DEVICE_BACKEND))
		return VERDICT_GO_ON;
	verdict = outside_back(ctx, ctx->ifindex);
	s->owner.ifindex = ctx->ifindex;
	return verdict || !s->service.translated ? verdict : outside_send(ctx);
}

/* What arrives for no pod: to a Service, or of one's backend, or neither. */
EC_INLINE enum verdict outside_arrive(struct __sk_buff *ctx, struct scratch *s)
{
	struct device *world = flow_world();
	enum verdict verdict;

	if (!world)
		return VERDICT_GO_ON;
	s->service.device = world->flags;
	verdict = outside_back(ctx, FRAGMENTS_WORLD);
	if (!verdict && !s->service.translated)
		verdict = frontend_walk(ctx, s, world, frontend_flags(&s->pkt.tuple.dst));
	return verdict || !s->service.translated ? verdict : outside_send(ctx);
}

/* What the host's stack answers to a client outside. It leaves the way it has. */
EC_INLINE enum verdict outside_of_host(struct __sk_buff *ctx, struct scratch *s, const struct device *world)
{
	return world && (world->flags & DEVICE_BACKEND) ? outside_back(ctx, FRAGMENTS_NODE) : VERDICT_GO_ON;
}

/* Whether the packet has come in by an uplink. */
EC_INLINE bool outside_passes(const struct __sk_buff *ctx)
{
	struct uplink_key key = {.ifindex = ctx->ingress_ifindex};

	return ctx->ingress_ifindex && bpf_map_lookup_elem(&uplinks, &key);
}

/*
 * Whether nothing that is no Service's may leave to the address: it can only be one's or, of what has come by an
 * uplink, is one that routers send here. They would send it here again, until its TTL ran out. flags are those of the
 * frontend that is there (frontend_flags).
 */
EC_CALL bool outside_keeps(const struct __sk_buff *ctx, const struct addr *address, __u32 flags)
{
	struct destination *to;

	if (flags & SERVICE_CLUSTER_IP)
		return true;
	to = path_destination(address);
	/* It is there, whoever claims it. */
	if (to && (to->kind == DESTINATION_POD_CIDR || to->kind == DESTINATION_NODE))
		return false;
	if (flags && !(flags & SERVICE_OWN) && outside_passes(ctx))
		return true;
	return to && to->kind == DESTINATION_SERVICE;
}

/*
 * What the host's stack sends to a Service, past every hook. Nothing leaves the node with such a destination. It would
 * not take an answer from an address of its own; nor does it send anything there, but for sockets bound to another
 * link.
 */
EC_INLINE enum verdict outside_caught(struct __sk_buff *ctx, struct scratch *s, struct device *world)
{
	__u32 flags = frontend_flags(&s->pkt.tuple.dst);
	enum verdict verdict;

	if (!world || (flags && nat_address_held(&s->pkt.tuple.dst)))
		return VERDICT_GO_ON;
	s->service.answers_host = false;
	verdict = frontend_walk(ctx, s, world, flags);
	if (verdict || s->service.translated)
		return verdict ?: outside_send(ctx);
	return outside_keeps(ctx, &s->pkt.tuple.dst, flags) ? -DROP_NO_SERVICE : VERDICT_GO_ON;
}

#endif
