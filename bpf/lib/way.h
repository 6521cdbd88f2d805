/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The way of a packet that the stack must not see, since it has an address of the node, or a
 * Service's, as its source: the stack would take it for a martian. And where a client
 * outside seems to come from. The ways are those of pods' packets (path.h), but what keeps a
 * packet from leaving is decided here.
 */
#ifndef EC_LIB_WAY_H
#define EC_LIB_WAY_H

#include "bpf/lib/arrive.h"
#include "bpf/lib/path.h"
#include "bpf/lib/scratch.h"

/* A way's key among cached paths, in place of the interface that the packet comes from: no path of a pod's has it. */
#define WAY_FROM(ctx) (~(ctx)->ifindex)

/*
 * By the kernel's routing table, whether or not the neighbour resolves: redirection queues and asks as the stack does.
 */
EC_INLINE enum verdict way_by_route(struct __sk_buff *ctx, const struct pkt *pkt, const struct addr *to, struct path *p)
{
	enum verdict verdict = path_route(ctx, pkt, to, p);

	return (!verdict || p->unresolved) && path_leaves(pkt, to, p) ? VERDICT_GO_ON : -DROP_SERVICE_ROUTE;
}

/*
 * Finds a way and caches it. A host is reached by the node's own routes, as from the node itself: what has an address
 * of the node does not arrive where its own tunnel leads. Where rules decide on routes that programs cannot ask about,
 * the kernel's answer without them has to do.
 */
EC_CALL enum verdict way_search(struct __sk_buff *ctx, const struct config *config, const struct pkt *pkt,
				struct path *p)
{
	struct destination *to = path_destination(&pkt->tuple.dst);
	enum verdict verdict = VERDICT_GO_ON;

	path_begin(p, to);
	/* Where a policy of the host's may apply, it must not leave unencrypted. */
	if (p->kind == DESTINATION_SERVICE || p->kind == DESTINATION_LOCAL ||
	    (to && (to->flags & DESTINATION_TO_STACK)))
		return -DROP_SERVICE_ROUTE;
	if (to && p->kind == DESTINATION_POD_CIDR)
		verdict = to->flags & DESTINATION_BY_TUNNEL ? path_by_tunnel(ctx, config, to, p)
							    : path_by_uplink(ctx, pkt, to, p);
	else if (p->kind != DESTINATION_HOST)
		verdict = way_by_route(ctx, pkt, &pkt->tuple.dst, p);
	if (verdict)
		return -DROP_SERVICE_ROUTE;
	/* The world has one allowance of these, as a pod has. */
	if (p->unresolved && path_ask(0, WAY_FROM(ctx), pkt, p) < 0)
		return -DROP_NEIGHBOUR_LIMIT;
	path_keep(p, WAY_FROM(ctx), pkt);
	p->source = pkt->tuple.src;
	return VERDICT_GO_ON;
}

/* Whether the slot holds the packet's way. Rules may depend on its source, which is not its interface's. */
EC_INLINE bool way_holds(const struct path *p, const struct __sk_buff *ctx, const struct pkt *pkt)
{
	return path_holds(p, WAY_FROM(ctx), pkt) && addr_equal(&p->source, &pkt->tuple.src);
}

/* The way of the packet; p is its slot. */
EC_INLINE enum verdict way_find(struct __sk_buff *ctx, const struct config *config, const struct pkt *pkt,
				struct path *p)
{
	return way_holds(p, ctx, pkt) ? VERDICT_GO_ON : way_search(ctx, config, pkt, p);
}

/*
 * Whether the packet, which has come from there, may go to this port of what is of this kind. With this node's address
 * another node, or this one, would take it for what the tunnel carries. The host's stack judges what it gets by itself;
 * past it, what a policy wants encrypted may have come as it is.
 */
EC_CALL enum verdict way_judge(const struct scratch *s, const struct addr *from, enum destination_kind kind,
			       __be16 port)
{
	const struct pkt *pkt = &s->pkt;

	if (kind != DESTINATION_LOCAL && pkt->tuple.proto == IPPROTO_UDP && port == bpf_htons(cfg.tunnel_port))
		return -DROP_TUNNEL_PORT;
	if (kind == DESTINATION_HOST)
		return VERDICT_GO_ON;
	if (s->direction != DIRECTION_TO_UPLINK && arrive_under_policy(from))
		return -DROP_IPSEC_POLICY;
	if (pkt->options)
		return -DROP_SERVICE_OPTIONS;
	return pkt->ttl <= 1 ? -DROP_SERVICE_TTL : VERDICT_GO_ON;
}

/*
 * Whether what is at the target is served again where it arrives, which might lead here, each time as a new flow, until
 * the TTL runs out. What a pod has is not, nor is what a node has that is the Service's backend itself
 * (pkg/service has no frontend there).
 */
EC_CALL bool way_is_served(const struct scratch *s, enum destination_kind kind)
{
	struct service_key key = {
		.address = s->target.address,
		.port = s->target.port,
		.proto = s->pkt.tuple.proto,
	};
	struct service *there;

	if (!s->target.set || kind == DESTINATION_HOST || kind == DESTINATION_LOCAL || kind == DESTINATION_POD_CIDR)
		return false;
	there = bpf_map_lookup_elem(&services, &key);
	if (there)
		return kind != DESTINATION_NODE || there->set != s->target.set;
	key.address = addr_any_like(&s->target.address);
	return kind == DESTINATION_NODE && bpf_map_lookup_elem(&services, &key);
}

/*
 * Judges a new flow before anything of it is written, and says whom its target takes for the client: the client itself,
 * if the target is on this node and its replies pass here anyway; else the node.
 */
EC_CALL enum verdict way_source(struct __sk_buff *ctx, struct scratch *s)
{
	const struct addr *to = &s->target.address;
	const struct config *config = config_get();
	struct destination *there = path_destination(to);
	enum destination_kind kind = there ? there->kind : DESTINATION_WORLD;
	struct path *p = path_slot(WAY_FROM(ctx), &s->pkt);
	enum verdict verdict = way_judge(s, &s->pkt.tuple.src, kind, s->target.port);

	if (!verdict && way_is_served(s, kind))
		verdict = -DROP_NO_BACKEND;
	if (verdict)
		return verdict;
	s->owner.address = s->pkt.tuple.src;
	s->target.masqueraded = false;
	if (s->direction == DIRECTION_TO_UPLINK) {
		/* What the stack is sending out of an uplink cannot be given back to it. */
		if (kind == DESTINATION_HOST)
			return -DROP_NO_BACKEND;
		s->owner.flags |= FLOW_HOST;
	}
	if (path_endpoint(to) || kind == DESTINATION_HOST)
		return VERDICT_GO_ON;
	if (!config || !p)
		return -DROP_INVALID;
	s->target.masqueraded = true;
	if (kind == DESTINATION_POD_CIDR || kind == DESTINATION_NODE) {
		s->owner.address = *path_node_address(config, s->pkt.family);
		return VERDICT_GO_ON;
	}
	path_begin(p, there);
	verdict = way_by_route(ctx, &s->pkt, to, p);
	s->owner.address = p->snat_address;
	return verdict;
}

/*
 * Whether the flow of a client outside that netfilter has led to the target until now can go on past it, from the
 * source that it has chosen.
 */
EC_CALL bool way_goes_on(struct __sk_buff *ctx, struct scratch *s)
{
	const struct addr *to = &s->target.address;
	struct destination *there = path_destination(to);
	enum destination_kind kind = there ? there->kind : DESTINATION_WORLD;
	struct path *p = path_slot(WAY_FROM(ctx), &s->pkt);
	bool here = kind == DESTINATION_LOCAL || path_endpoint(to);

	if (!p || way_judge(s, &s->pkt.tuple.src, kind, s->target.port))
		return false;
	/* Elsewhere, or in a pod, only what comes from the node is answered to it. */
	if (s->target.masqueraded ? kind == DESTINATION_HOST || !nat_address_held(&s->owner.address)
				  : kind != DESTINATION_HOST && !here)
		return false;
	if (here || kind == DESTINATION_HOST)
		return true;
	if (there && (there->flags & DESTINATION_TO_STACK))
		return false;
	path_begin(p, there);
	return kind == DESTINATION_POD_CIDR || !way_by_route(ctx, &s->pkt, to, p);
}

#endif
