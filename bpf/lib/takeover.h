/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Taking over from netfilter (nf_translates): a flow to a Service that its rules have
 * translated before this node's programs did goes on to the same backend, as a pair in our
 * tables. Netfilter's entry then expires, so that both directions pass it by. What it has
 * masqueraded besides stays with it, since the backend knows the flow by another address.
 */
#ifndef EC_LIB_TAKEOVER_H
#define EC_LIB_TAKEOVER_H

#include "bpf/lib/nf.h"
#include "bpf/lib/open.h"

/* How many slots of a set are searched for the flow's backend; beyond, it goes on without a number. */
#define TAKEOVER_SLOTS 4096

/* include/uapi/linux/netfilter/nf_conntrack_common.h */
enum {
	TAKEOVER_ANSWERED = 2,    /* IPS_SEEN_REPLY */
	TAKEOVER_TRANSLATED = 32, /* IPS_DST_NAT */
	TAKEOVER_OF_OPENER = 0,   /* IP_CT_DIR_ORIGINAL */
	TAKEOVER_OF_REPLIES = 1,  /* IP_CT_DIR_REPLY */
};

/* What netfilter does with the packet. */
struct takeover {
	struct addr backend;
	struct addr source; /* what the packet's source becomes */
	__be16 port;
	__be16 sport;
	bool answered;
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

/* Reads what netfilter does with a packet that it translates to a backend; false: there is no such entry. */
EC_CALL bool takeover_read(struct __sk_buff *ctx, struct scratch *s, struct takeover *t)
{
	struct nf_options options = {.netns_id = -1, .l4proto = s->pkt.tuple.proto};
	struct nf_conn *ct = nf_lookup(ctx, s, &s->pkt.tuple, false, &options);
	const struct nf_conntrack_tuple *replies;
	unsigned long status = 0;

	if (!ct)
		return false;
	bpf_core_read(&status, sizeof(status), &ct->status);
	replies = &ct->tuplehash[TAKEOVER_OF_REPLIES].tuple;
	takeover_copy(&t->backend, &replies->src.u3, s->pkt.family);
	takeover_copy(&t->source, &replies->dst.u3, s->pkt.family);
	bpf_core_read(&t->port, sizeof(t->port), &replies->src.u.all);
	bpf_core_read(&t->sport, sizeof(t->sport), &replies->dst.u.all);
	t->answered = status & TAKEOVER_ANSWERED;
	bpf_ct_release(ct);
	return (status & TAKEOVER_TRANSLATED) && options.dir == TAKEOVER_OF_OPENER;
}

/* Has netfilter forget the flow of the packet. */
EC_CALL void takeover_end(struct __sk_buff *ctx, struct scratch *s)
{
	struct nf_options options = {.netns_id = -1, .l4proto = s->pkt.tuple.proto};
	struct nf_conn *ct = nf_lookup(ctx, s, &s->pkt.tuple, false, &options);

	if (!ct)
		return;
	bpf_ct_change_timeout(ct, 0);
	bpf_ct_release(ct);
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
	s->owner.flags = FLOW_SERVICE | (search.flags & BACKEND_ON_NODE ? FLOW_ON_NODE : 0);
	return search.found;
}

/*
 * A packet to a frontend, of no flow of ours. If netfilter translates its flow, which can
 * go on here, that leads to the target in the scratch record (open_is_taken_over); else it
 * stays netfilter's, by the stack: so does all that a client outside has there, but for a
 * SYN. One after replies opens another connection, which an entry of the last one must not
 * meet; and datagrams leave a backend that serves no more.
 */
EC_CALL enum verdict takeover_flow(struct __sk_buff *ctx, struct scratch *s, const struct service *frontend)
{
	struct takeover flow;

	if (!takeover_asks(&s->pkt) || !takeover_read(ctx, s, &flow))
		return VERDICT_GO_ON;
	if (!s->owner.ifindex)
		return tcp_is_opening(&s->pkt) ? VERDICT_GO_ON : VERDICT_STACK;
	if (tcp_is_opening(&s->pkt) && flow.answered) {
		takeover_end(ctx, s);
		return VERDICT_GO_ON;
	}
	if (!addr_equal(&flow.source, &s->pkt.tuple.src))
		return VERDICT_STACK;
	if (!takeover_target(s, frontend, &flow) && s->pkt.tuple.proto == IPPROTO_UDP) {
		takeover_end(ctx, s);
		return VERDICT_GO_ON;
	}
	s->target.taken_over = true;
	return VERDICT_GO_ON;
}

#endif
