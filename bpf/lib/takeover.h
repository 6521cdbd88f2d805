/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Taking over from netfilter (nf_translates): a flow to a Service that its rules have
 * translated before this node's programs did goes on to the same backend, as a pair in our
 * tables. Netfilter's entry then ends, so that both directions pass it by. What it has
 * masqueraded besides keeps the address and port that it has chosen, if the flow is a
 * client's outside; a pod's stays with it, since its answers find no pod otherwise.
 */
#ifndef EC_LIB_TAKEOVER_H
#define EC_LIB_TAKEOVER_H

#include "bpf/lib/nf.h"
#include "bpf/lib/open.h"

/* How many slots of a set are searched for the flow's backend; beyond, it goes on without a number. */
#define TAKEOVER_SLOTS 4096

/* include/uapi/linux/netfilter/nf_conntrack_common.h and nf_conntrack_tcp.h */
enum {
	TAKEOVER_ANSWERED = 2,    /* IPS_SEEN_REPLY */
	TAKEOVER_ASSURED = 4,     /* IPS_ASSURED */
	TAKEOVER_TRANSLATED = 32, /* IPS_DST_NAT */
	TAKEOVER_OF_OPENER = 0,   /* IP_CT_DIR_ORIGINAL */
	TAKEOVER_OF_REPLIES = 1,  /* IP_CT_DIR_REPLY */
	TAKEOVER_ESTABLISHED = 3, /* TCP_CONNTRACK_ESTABLISHED; what is above is closing */
};

/* What netfilter does with the packet. */
struct takeover {
	struct addr backend;
	struct addr source; /* what the packet's source becomes */
	__be16 port;
	__be16 sport;
	bool answered;
	bool closing; /* a connection of which a FIN or RST has been seen */
	bool replies; /* the packet answers what it translates */
};

/* Whether netfilter can have an entry for the packet that programs can ask for. */
EC_INLINE bool takeover_asks(const struct pkt *pkt)
{
	return (pkt->tuple.proto == IPPROTO_TCP || pkt->tuple.proto == IPPROTO_UDP) && pkt->fragment == FRAGMENT_NONE;
}

/* Copies an address of netfilter's, which has those of IPv4 in the first of four words. */
EC_INLINE void takeover_copy(struct addr *to, const union nf_inet_addr *from, __u8 family)
{
	struct addr copy = {};

	bpf_core_read(&copy, sizeof(copy), from);
	if (family == FAMILY_IPV6)
		*to = copy;
	else
		addr_set_v4(to, *(const __be32 *)&copy);
}

/* Reads what netfilter does with a packet whose flow it translates to a backend; false: there is no such entry. */
EC_CALL bool takeover_read(struct __sk_buff *ctx, struct scratch *s, struct takeover *t)
{
	struct nf_options options = {.netns_id = -1, .l4proto = s->pkt.tuple.proto};
	struct nf_conn *ct = nf_lookup(ctx, s, &s->pkt.tuple, false, &options);
	const struct nf_conntrack_tuple *replies;
	unsigned long status = 0;
	__u8 state = 0;

	if (!ct)
		return false;
	bpf_core_read(&status, sizeof(status), &ct->status);
	bpf_core_read(&state, sizeof(state), &ct->proto.tcp.state);
	replies = &ct->tuplehash[TAKEOVER_OF_REPLIES].tuple;
	takeover_copy(&t->backend, &replies->src.u3, s->pkt.family);
	takeover_copy(&t->source, &replies->dst.u3, s->pkt.family);
	bpf_core_read(&t->port, sizeof(t->port), &replies->src.u.all);
	bpf_core_read(&t->sport, sizeof(t->sport), &replies->dst.u.all);
	t->answered = status & TAKEOVER_ANSWERED;
	t->closing = s->pkt.tuple.proto == IPPROTO_TCP && state > TAKEOVER_ESTABLISHED;
	t->replies = options.dir != TAKEOVER_OF_OPENER;
	bpf_ct_release(ct);
	return status & TAKEOVER_TRANSLATED;
}

/* Whether a datagram of the stack's answers a flow that netfilter translates: that has made it come from a Service. */
EC_CALL bool takeover_is_answer(struct __sk_buff *ctx, struct scratch *s)
{
	struct nf_options options = {.netns_id = -1, .l4proto = s->pkt.tuple.proto};
	struct nf_conn *ct = nf_translates() ? nf_lookup(ctx, s, &s->pkt.tuple, true, &options) : NULL;
	unsigned long status = 0;

	if (!ct)
		return false;
	bpf_core_read(&status, sizeof(status), &ct->status);
	bpf_ct_release(ct);
	return (status & TAKEOVER_TRANSLATED) && options.dir == TAKEOVER_OF_OPENER;
}

/*
 * Whether a datagram answers what netfilter knows, such as a flow that it masquerades from a port that is a pod's host
 * port: whoever may write a Pod would have what others are told.
 */
EC_CALL bool takeover_answers(struct __sk_buff *ctx, struct scratch *s)
{
	struct nf_options options = {.netns_id = -1, .l4proto = s->pkt.tuple.proto};
	struct nf_conn *ct = NULL;

	if (cfg.netfilter_nat && s->pkt.tuple.proto == IPPROTO_UDP)
		ct = nf_lookup(ctx, s, &s->pkt.tuple, false, &options);
	if (!ct)
		return false;
	bpf_ct_release(ct);
	return options.dir != TAKEOVER_OF_OPENER;
}

/* What one side of a TCP connection has come to by what netfilter has seen of it; bits are enum flow_state. */
EC_INLINE void takeover_note(struct snat_entry *half, const struct ip_ct_tcp_state *seen, __u8 bits)
{
	bpf_core_read(&half->seq_end, sizeof(half->seq_end), &seen->td_end);
	bpf_core_read(&half->ack, sizeof(half->ack), &seen->td_maxack);
	half->state |= bits;
}

/*
 * Has the pair that has been opened, of which this is the forward half, be as old as netfilter has seen its flow get:
 * one that has been answered must not end as if it never were.
 */
EC_CALL void takeover_age(struct __sk_buff *ctx, struct scratch *s, struct snat_entry *forward)
{
	struct nf_options options = {.netns_id = -1, .l4proto = s->pkt.tuple.proto};
	struct snat_entry *reverse;
	unsigned long status = 0;
	struct nf_conn *ct;
	__u8 state = 0;

	nat_set_other_key(&s->key, &s->pkt.tuple, forward);
	reverse = bpf_map_lookup_elem(&snat_reverse, &s->key);
	ct = reverse ? nf_lookup(ctx, s, &s->pkt.tuple, false, &options) : NULL;
	if (!ct)
		return;
	bpf_core_read(&status, sizeof(status), &ct->status);
	bpf_core_read(&state, sizeof(state), &ct->proto.tcp.state);
	if ((status & TAKEOVER_ANSWERED) && s->pkt.tuple.proto == IPPROTO_TCP) {
		state = FLOW_PACKET | FLOW_SYN | (state == TAKEOVER_ESTABLISHED ? FLOW_ACK : 0);
		takeover_note(forward, &ct->proto.tcp.seen[TAKEOVER_OF_OPENER], state);
		takeover_note(reverse, &ct->proto.tcp.seen[TAKEOVER_OF_REPLIES], state);
	} else if (status & TAKEOVER_ANSWERED) {
		reverse->state |= FLOW_PACKET | (status & TAKEOVER_ASSURED ? FLOW_STREAM : 0);
	}
	bpf_ct_release(ct);
}

/* Has netfilter forget the flow of the packet: whoever looks at an entry whose time is up removes it. */
EC_CALL void takeover_end(struct __sk_buff *ctx, struct scratch *s)
{
	struct nf_options options = {.netns_id = -1, .l4proto = s->pkt.tuple.proto};
	struct nf_conn *ct = nf_lookup(ctx, s, &s->pkt.tuple, false, &options);

	if (!ct)
		return;
	bpf_ct_change_timeout(ct, 0);
	bpf_ct_release(ct);
	nf_knows(ctx, s, &s->pkt.tuple, false);
}

/* A search for the number of a backend. */
struct takeover_search {
	const struct takeover *flow;
	__u32 first;
	__u32 found;
	__u32 generation;
	__u32 flags;
	__u32 set;
};

/* One slot: 1 ends the search. */
static long takeover_search_step(__u32 i, struct takeover_search *t)
{
	__u32 at = t->first + i;
	struct slot *slot = bpf_map_lookup_elem(&slots, &at);
	const struct backend *b;
	__u32 number;

	if (!slot)
		return 1;
	number = slot->backend;
	b = bpf_map_lookup_elem(&backends, &number);
	if (!b || b->set != t->set || b->port != t->flow->port || !addr_equal(&b->address, &t->flow->backend) ||
	    !(b->flags & BACKEND_SERVING))
		return 0;
	t->found = number;
	t->generation = b->generation;
	t->flags = b->flags;
	return 1;
}

/* Makes the flow's backend the target; false: its set does not name it. */
EC_INLINE bool takeover_target(struct scratch *s, const struct service *frontend, const struct takeover *flow)
{
	__u32 number = frontend->set, count;
	struct service_set *set = bpf_map_lookup_elem(&sets, &number);
	struct takeover_search search = {.flow = flow, .set = number};
	__u64 block = set ? *(const volatile __u64 *)&set->block : 0;

	search.first = block >> SET_FIRST_SHIFT;
	count = (block >> SET_CLUSTER_SHIFT & SET_COUNT_MASK) + (block & SET_COUNT_MASK);
	bpf_loop(count < TAKEOVER_SLOTS ? count : TAKEOVER_SLOTS, takeover_search_step, &search, 0);
	s->target.address = flow->backend;
	s->target.port = flow->port;
	s->target.set = number;
	s->target.backend = search.found;
	s->target.generation = search.generation;
	s->target.pod = 0;
	s->target.sport = flow->sport;
	s->target.masqueraded = !addr_equal(&flow->source, &s->pkt.tuple.src);
	s->owner.address = flow->source;
	s->owner.flags = FLOW_SERVICE | (search.flags & BACKEND_ON_NODE ? FLOW_ON_NODE : 0);
	return search.found;
}

/*
 * From now on a flow that has been netfilter's is ours. Its answers may come to any port, and those of a pod at once:
 * the pod is noted as a backend before netfilter forgets the flow.
 */
EC_INLINE void takeover_done(struct __sk_buff *ctx, struct scratch *s, struct snat_entry *forward)
{
	const struct endpoint *ep = s->owner.ifindex ? NULL : path_endpoint(&s->target.address);

	if (ep)
		flow_note(flow_owner(ep->ifindex), DEVICE_BACKEND);
	if (!s->owner.ifindex && s->target.masqueraded && !nat_port_may_be_held(s->pkt.tuple.proto, s->target.sport))
		flow_note(flow_world(), DEVICE_ANY_PORT);
	takeover_age(ctx, s, forward);
	takeover_end(ctx, s);
}

/*
 * Whether the packet begins anew what netfilter has: a SYN after a FIN or RST or, of a pod, whose address it has for
 * sure, after answers.
 */
EC_INLINE bool takeover_begins(const struct scratch *s, const struct takeover *flow)
{
	return tcp_is_opening(&s->pkt) && (flow->closing || (s->owner.ifindex && flow->answered));
}

/*
 * A packet to a frontend, of no flow of ours. If netfilter translates its flow, which can
 * go on here, that leads to the target in the scratch record (open_is_taken_over); else it
 * stays netfilter's, by the stack: so does a connection that is closing, which soon ends there.
 * What begins another one must not meet an entry of the last; and datagrams and SYNs leave a
 * backend that serves no more.
 */
EC_CALL enum verdict takeover_flow(struct __sk_buff *ctx, struct scratch *s, const struct service *frontend)
{
	struct takeover flow;
	bool anew;

	if (!takeover_asks(&s->pkt) || !takeover_read(ctx, s, &flow))
		return VERDICT_GO_ON;
	if (flow.replies)
		return VERDICT_STACK;
	/*
	 * Of what the host's stack sends, it has translated all that it has an entry of. A ClusterIP that is still
	 * there has met no translation, and does not leave.
	 */
	if (s->direction == DIRECTION_TO_UPLINK && !tcp_is_opening(&s->pkt))
		return s->service.flags & SERVICE_CLUSTER_IP ? -DROP_NO_SERVICE : VERDICT_STACK;
	if (s->direction == DIRECTION_TO_UPLINK)
		return VERDICT_GO_ON;
	anew = takeover_begins(s, &flow);
	if (!anew && (flow.closing || (s->owner.ifindex && !addr_equal(&flow.source, &s->pkt.tuple.src))))
		return VERDICT_STACK;
	if (anew || (!takeover_target(s, frontend, &flow) && open_allowed(&s->pkt))) {
		takeover_end(ctx, s);
		return VERDICT_GO_ON;
	}
	s->target.taken_over = true;
	return VERDICT_GO_ON;
}

#endif
