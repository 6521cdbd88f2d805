/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Who asks a Service: whether it may have the packet's source, and what it gets. */
#ifndef EC_LIB_ASKED_H
#define EC_LIB_ASKED_H

#include "bpf/lib/arrive.h"
#include "bpf/lib/nat.h"
#include "bpf/lib/open.h"

/*
 * Whether who asks may have the packet's source, which no Service does. Those of pods, and of what comes through the
 * tunnel, have been judged.
 */
EC_GLOBAL enum verdict asked_judge_source(struct __sk_buff *ctx)
{
	const struct config *config = config_get();
	struct scratch *s = scratch_get();
	struct destination *from;
	const struct addr *src;

	if (!s || !config)
		return -DROP_INVALID;
	if (s->direction != DIRECTION_FROM_UPLINK && s->direction != DIRECTION_TO_UPLINK)
		return VERDICT_GO_ON;
	src = &s->pkt.tuple.src;
	from = path_destination(src);
	if (from && from->kind == DESTINATION_SERVICE)
		return -DROP_SPOOFED_SOURCE;
	if (s->direction == DIRECTION_TO_UPLINK)
		return VERDICT_GO_ON;
	return arrive_judge_source(ctx, &s->pkt, from, arrive_kind(config, s->pkt.family, src, from));
}

/*
 * Whether what answers the packet would be served as a question again: a Service has its source, port included, or it
 * is another node's NodePort. Two that answer each other would do so for ever.
 */
EC_CALL bool asked_by_service(const struct scratch *s)
{
	const struct tuple *t = &s->pkt.tuple;
	struct service_key key = {.address = t->src, .port = t->sport, .proto = t->proto};
	struct destination *from;

	if (s->direction != DIRECTION_FROM_UPLINK)
		return false;
	if (bpf_map_lookup_elem(&services, &key))
		return true;
	from = path_destination(&t->src);
	return from && from->kind == DESTINATION_NODE && open_has_node_port(t);
}

/*
 * Whether a datagram belongs to an exchange that is not the Service's: a socket of the host's has sent it, or is
 * connected to who has; the pod that has sent it answers a client outside; or it goes to a pod or another node. Those
 * have the address, and may have asked: whoever asks a Service there gets it from that node.
 */
EC_CALL bool asked_has_begun(struct __sk_buff *ctx, struct scratch *s)
{
	const struct tuple *t = &s->pkt.tuple;
	struct destination *to = path_destination(&t->dst);
	const struct conntrack_entry *recorded;

	if (to && to->kind == DESTINATION_HOST)
		return t->proto == IPPROTO_UDP && socket_expects(ctx, s, t);
	if (s->direction == DIRECTION_FROM_UPLINK)
		return false;
	if (to && (to->kind == DESTINATION_NODE || to->kind == DESTINATION_POD_CIDR || to->kind == DESTINATION_LOCAL))
		return true;
	if (s->direction == DIRECTION_TO_UPLINK)
		return t->proto == IPPROTO_UDP && socket_has_port(ctx, s, t);
	recorded = bpf_map_lookup_elem(&conntrack, t);
	return recorded && recorded->ifindex == s->owner.ifindex;
}

/*
 * Whether the packet belongs to an exchange that is not the Service's. A Service may be given somebody else's address,
 * unless that is a ClusterIP: what pods and hosts have there goes on, and only what begins is for the Service.
 */
EC_INLINE bool asked_goes_past(struct __sk_buff *ctx, struct scratch *s)
{
	if (s->service.flags & SERVICE_CLUSTER_IP)
		return false;
	if (s->pkt.tuple.proto != IPPROTO_TCP)
		return asked_has_begun(ctx, s);
	return !tcp_is_opening(&s->pkt) &&
	       (s->direction != DIRECTION_FROM_UPLINK || nat_address_held(&s->pkt.tuple.dst));
}

/*
 * Whether the packet asks a ClusterIP in the name of another node or its pods. Those have asked at home already, where
 * it was translated: so anybody may have sent this.
 */
EC_CALL bool asked_away_from_home(const struct scratch *s)
{
	struct destination *from;

	if (s->direction != DIRECTION_FROM_UPLINK || !(s->service.flags & SERVICE_CLUSTER_IP))
		return false;
	from = path_destination(&s->pkt.tuple.src);
	return from && (from->kind == DESTINATION_POD_CIDR || from->kind == DESTINATION_NODE);
}

/* Whether the frontend is for the packet's source. */
EC_CALL bool asked_admits(const struct scratch *s, const struct service *frontend)
{
	struct source_range_key key = {
		.prefix_len = 8 * (sizeof(key) - sizeof(key.prefix_len)),
		.set = frontend->set,
		.source = s->pkt.tuple.src,
	};

	return !(frontend->flags & SERVICE_RANGES) || bpf_map_lookup_elem(&source_range, &key);
}

/*
 * Whether only this node's endpoints count: by the internal policy or, for all but the node's own pods and processes,
 * the external one. Other nodes' pods ask a NodePort of this node from outside.
 */
EC_CALL bool asked_is_local(const struct scratch *s, const struct service *frontend)
{
	if (frontend->flags & SERVICE_LOCAL)
		return true;
	return (frontend->flags & SERVICE_EXTERNAL_LOCAL) && !s->owner.ifindex && s->direction != DIRECTION_TO_UPLINK;
}

/*
 * Whether a datagram answers the host, which has sent from a port on which a Service answers (ec_to_uplink). Those of a
 * known client are that Service's. The stack judges its source; one that cannot be there renews no flow.
 */
EC_CALL bool asked_answers_host(struct __sk_buff *ctx, struct scratch *s)
{
	struct snat_entry *half;

	if (s->owner.ifindex || s->pkt.tuple.proto != IPPROTO_UDP)
		return false;
	s->key = tuple_reversed(&s->pkt.tuple);
	half = nat_peek_reverse(&s->key);
	if (!half || nat_is_service(half))
		return false;
	if (!asked_judge_source(ctx) && nat_lookup_reverse(&s->key) == half)
		nat_note(half, &s->pkt, false);
	return true;
}

#endif
