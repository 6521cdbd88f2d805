/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Services. What a pod sends to one becomes a packet to a backend on its own node, before
 * anything else looks at it (frontend.h), and a reply is translated back as the last step
 * before it enters the pod. What clients outside send is translated where it arrives
 * (outside.h).
 *
 * A flow is a pair of halves in the tables of masquerading (nat.h), with FLOW_SERVICE.
 * There the forward key is the tuple as the client sends it, and the reverse key the tuple
 * as the backend sees it.
 */
#ifndef EC_LIB_SERVICE_H
#define EC_LIB_SERVICE_H

#include "bpf/lib/errors.h"
#include "bpf/lib/hostport.h"
#include "bpf/lib/nat.h"
#include "bpf/lib/rewrite.h"

/* Above enum service_flags: there is an entry of the address. */
#define FRONTEND_THERE (1U << 31)

/*
 * What an address is to Services: enum service_flags and FRONTEND_THERE; 0: nothing. Agents before host ports wrote
 * NODE alone.
 */
EC_INLINE __u32 frontend_flags(const struct addr *address)
{
	struct service_key key = {.address = *address};
	struct service *found = bpf_map_lookup_elem(&services, &key);

	if (!found)
		return 0;
	return found->flags | FRONTEND_THERE | (found->flags & SERVICE_NODE ? SERVICE_OWN : 0);
}

/*
 * What an address with these flags (frontend_flags) is to what begins: where kube-proxy has that, no Service's, but the
 * node's own, on which pods have their host ports all the same.
 */
EC_INLINE __u32 frontend_serves(__u8 family, __u32 flags)
{
	if (!flags || !config_yields(config_get(), family))
		return flags;
	return hostport_may_be(flags) ? SERVICE_OWN : 0;
}

/*
 * Copies the frontend with this key; false: there is none. The entry may be deleted
 * meanwhile and its memory be another's at once, so it is looked up again.
 */
EC_CALL bool frontend_copy(const struct service_key *key, struct service *copy)
{
	struct service *found = bpf_map_lookup_elem(&services, key);

	for (int i = 0; i < 2 && found; i++) {
		*copy = *(volatile struct service *)found;
		if (bpf_map_lookup_elem(&services, key) == found)
			return true;
		found = bpf_map_lookup_elem(&services, key);
	}
	return false;
}

/* Makes the packet that of the tuple in the scratch record, and remembers what its sender has sent. */
EC_INLINE enum verdict service_turn_into(struct __sk_buff *ctx, struct scratch *s)
{
	s->service.sent = s->pkt.tuple;
	s->service.translated = true;
	return rewrite_tuple(ctx);
}

/* Whether the packet is no longer what its sender has sent. */
EC_INLINE bool service_has_translated(const struct scratch *s)
{
	return cfg.services && s->service.translated;
}

/* Gives the packet back what its sender has sent, for an answer that quotes it. Nothing answers an error. */
EC_INLINE enum verdict service_undo(struct __sk_buff *ctx, struct scratch *s)
{
	if (!service_has_translated(s))
		return VERDICT_GO_ON;
	if (s->pkt.l4 == L4_ICMP_ERROR)
		return -DROP_INVALID;
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

/* The live reverse half with this key, renewed, if it is of a flow of this pod to a Service; NULL: there is none. */
EC_INLINE struct snat_entry *service_reverse(const struct tuple *reverse_key, __u32 ifindex)
{
	struct snat_entry *e = errors_half(&snat_reverse, reverse_key, ifindex);

	return e && nat_renew_reverse(reverse_key, e) ? e : NULL;
}

/*
 * Notes a packet that answers a flow of the pod, whose reverse half has the scratch record's key, and says what it
 * becomes.
 */
EC_INLINE void service_reply(struct scratch *s, struct snat_entry *reverse)
{
	struct tuple *turns = &s->service.turns;

	nat_note(reverse, &s->pkt, false);
	nat_set_other_key(turns, &s->key, reverse);
	*turns = tuple_reversed(turns);
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
	if (rewrite_settle(ctx, pkt))
		return -DROP_WRITE_FAILED;
	service_reply(s, reverse);
	return rewrite_tuple(ctx);
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

/* The pod that has the packet's destination; NULL: none, or not the one that its flow has led to. */
EC_INLINE struct endpoint *service_endpoint(const struct scratch *s)
{
	struct endpoint *ep = path_endpoint(&s->pkt.tuple.dst);

	return ep && cfg.services && s->service.pod && s->service.pod != ep->ifindex ? NULL : ep;
}

/* Whether the pod is its own backend: the packet has a source that the stack would take for a martian. */
EC_INLINE bool service_is_itself(const struct scratch *s)
{
	return cfg.services && s->service.translated && !addr_equal(&s->pkt.tuple.src, &s->service.sent.src);
}

/*
 * A backend of this node that is no pod's any more. Its flow ends, so that the next packet chooses another; a
 * connection is reset. What else is dropped has the other reason.
 */
EC_CALL enum verdict service_unreached(struct scratch *s, enum drop_reason otherwise)
{
	struct snat_entry *flow;

	if (!cfg.services || !s->service.translated || s->pkt.l4 == L4_ICMP_ERROR)
		return -otherwise;
	flow = nat_peek(&s->service.sent, s->owner.ifindex);
	if (!flow || !flow->set)
		return -otherwise;
	nat_end(&s->service.sent, flow);
	return s->pkt.tuple.proto == IPPROTO_TCP ? -DROP_BACKEND_GONE : -otherwise;
}

#endif
