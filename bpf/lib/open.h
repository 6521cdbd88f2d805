/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Opening a flow that is masqueraded, or to a Service: choosing a port, and inserting both halves. */
#ifndef EC_LIB_OPEN_H
#define EC_LIB_OPEN_H

#include "bpf/lib/count.h"
#include "bpf/lib/hostport.h"
#include "bpf/lib/nat.h"
#include "bpf/lib/nf.h"
#include "bpf/lib/quota.h"
#include "bpf/lib/socket.h"

/*
 * How many ports are tried before a new flow is refused. With nine tenths of them in
 * use, one flow in 10^46 finds none.
 */
#define OPEN_TRIES 1024

/* How many of them are below 1024 for a flow that begins there. Servers that want such a port refuse another. */
#define OPEN_TRIES_PRIVILEGED 64

/*
 * The same for a flow to a Service. It shares its ports with flows of the same client alone,
 * which has no quota of them: one that has used them up must not make each packet dear.
 */
#define OPEN_TRIES_SERVICE 128

/* The result of trying a port. */
enum open_try {
	OPEN_IN_USE, /* it is another flow's or a socket's */
	OPEN_TAKEN,  /* the reverse half was inserted */
	OPEN_FOUND,  /* the reverse half of this very flow is there already */
};

/* Whether the flow to open is one to a Service that netfilter has translated until now (takeover.h). */
EC_INLINE bool open_is_taken_over(const struct scratch *s)
{
	return nf_translates() && nat_to_service(&s->owner) && s->target.taken_over;
}

/* Whether the flow to open takes a port of the node's. One to a Service mostly uses one of its client's. */
EC_INLINE bool open_masquerades(const struct scratch *s)
{
	return !nat_to_service(&s->owner) || s->target.masqueraded;
}

/* Whether a Service answers on the port of every address of the node. */
EC_CALL bool open_has_node_port(const struct tuple *reverse_key)
{
	struct service_key key = {
		.address = addr_any_like(&reverse_key->src),
		.port = reverse_key->sport,
		.proto = reverse_key->proto,
	};

	return bpf_map_lookup_elem(&services, &key);
}

/* Whether the packet's source is a Service's, on all addresses of the node or that one, or a host port. */
EC_CALL bool open_is_from_service(const struct tuple *t)
{
	struct service_key key = {.address = t->src, .port = t->sport, .proto = t->proto};

	return bpf_map_lookup_elem(&services, &key) || open_has_node_port(t) || hostport_is_source(t);
}

/*
 * Whether the port of this node is the tunnel's, where no packet is taken for an answer, a Service's or a host port:
 * then no flow may take it.
 */
EC_INLINE bool open_is_claimed(const struct tuple *reverse_key)
{
	if (reverse_key->proto == IPPROTO_UDP && reverse_key->sport == bpf_htons(cfg.tunnel_port))
		return true;
	return cfg.services && open_is_from_service(reverse_key);
}

/* Whether the flow to open is a socket's of the host that keeps its port, although a Service answers there. */
EC_INLINE bool open_is_noted(const struct scratch *s, const struct tuple *reverse_key)
{
	return cfg.services && (s->owner.flags & FLOW_HOST) && !nat_to_service(&s->owner) &&
	       reverse_key->sport == s->pkt.tuple.sport;
}

/* Whether a client outside has opened a flow of the same tuple straight to the backend, a pod of this node. */
EC_CALL bool open_is_recorded(const struct scratch *s, const struct tuple *reverse_key)
{
	struct tuple replies = tuple_reversed(reverse_key);

	return !s->owner.ifindex && bpf_map_lookup_elem(&conntrack, &replies);
}

/*
 * Whether replies to the port belong to another flow: of a socket, or one that netfilter has translated. Of a flow to a
 * Service, to one of the same pod straight to the backend.
 */
EC_INLINE bool open_port_is_others(struct __sk_buff *ctx, struct scratch *s, const struct tuple *reverse_key)
{
	if (open_is_taken_over(s) || open_is_noted(s, reverse_key))
		return false;
	if (nf_holds_port(ctx, s, reverse_key))
		return true;
	if (!open_masquerades(s))
		return bpf_map_lookup_elem(&snat, reverse_key) || open_is_recorded(s, reverse_key) ||
		       socket_is_connected(ctx, s, reverse_key);
	return open_is_claimed(reverse_key) || socket_has_port(ctx, s, reverse_key);
}

/* Fills in a half of a new pair in the scratch record: it leads to the other half's key. */
EC_INLINE void open_fill(struct scratch *s, const struct tuple *other_key)
{
	struct snat_entry *e = &s->entry;

	__builtin_memset(e, 0, sizeof(*e));
	e->to_address = other_key->src;
	e->to_port = other_key->sport;
	e->flags = s->owner.flags;
	e->ifindex = s->owner.ifindex;
	e->last_seen = bpf_ktime_get_coarse_ns();
	nat_note_recent(e, s->pkt.tuple.proto, e->last_seen);
	if (!nat_to_service(&s->owner))
		return;
	e->far_address = other_key->dst;
	e->far_port = other_key->dport;
	e->set = s->target.set;
	e->backend = s->target.backend;
	e->generation = s->target.generation;
	e->pod = s->target.pod;
}

/* Writes the key of the new pair's reverse half, with this port. */
EC_INLINE void open_set_key(struct scratch *s, __be16 port)
{
	nat_set_reverse_key(&s->key, &s->pkt.tuple, &s->owner.address, port);
	if (!nat_to_service(&s->owner))
		return;
	s->key.dst = s->target.address;
	s->key.dport = s->target.port;
}

/* Whether a reverse half is of the flow to open, and not of one that goes straight to the same far end. */
EC_INLINE bool open_is_own(const struct scratch *s, const struct snat_entry *reverse)
{
	return nat_names(reverse, &s->pkt.tuple, s->owner.ifindex) &&
	       nat_is_service(reverse) == nat_to_service(&s->owner);
}

/* Inserts the reverse half of a new flow, whose key is in the scratch record; returns what open_try_port does. */
EC_GLOBAL int open_take_port(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();
	int ret;

	if (!s)
		return -DROP_INVALID;
	if (open_port_is_others(ctx, s, &s->key))
		return OPEN_IN_USE;
	/* Before the first packet leaves, or its answer would not be looked for. */
	if (open_masquerades(s) && !open_is_taken_over(s) && !open_is_noted(s, &s->key))
		ports_give(s->key.proto, s->key.sport);
	open_fill(s, &s->pkt.tuple);
	ret = flow_insert(&snat_reverse, &s->key, &s->entry);
	if (ret == -EC_EEXIST)
		return OPEN_IN_USE;
	return ret ? flow_refusal(ret, USAGE_SNAT) : OPEN_TAKEN;
}

/*
 * Takes a port for a new flow by inserting its reverse half. Returns an enum open_try,
 * or a negated drop reason.
 */
EC_INLINE int open_try_port(struct __sk_buff *ctx, struct scratch *s, __be16 port)
{
	struct snat_entry *there;

	open_set_key(s, port);
	there = bpf_map_lookup_elem(&snat_reverse, &s->key);
	if (there && open_is_own(s, there) && flow_touch(&there->last_seen) != FLOW_GONE)
		return OPEN_FOUND;
	if (there && !room_reclaim_port(there, ROOM_PORT))
		return OPEN_IN_USE;
	return open_take_port(ctx);
}

/*
 * Inserts the forward half for the reverse half that was just taken or found, whose key
 * is in the scratch record. 1: the pair is new, and the caller's to count; 0: it
 * existed; else a negated drop reason. Unless the pair is new, a reverse half that was
 * taken is removed again.
 */
EC_CALL int open_complete(struct scratch *s, bool taken)
{
	struct snat_entry *there;
	int ret;

	open_fill(s, &s->key);
	ret = flow_insert(&snat, &s->pkt.tuple, &s->entry);
	if (!ret)
		return taken;
	/*
	 * Another CPU opened the same flow: its pair serves both, and may use this very
	 * reverse half. A tombstone is no pair: it is removed, and taken off the counts.
	 */
	there = bpf_map_lookup_elem(&snat, &s->pkt.tuple);
	if (there && !flow_is_live(&there->last_seen))
		nat_end(&s->pkt.tuple, there);
	else if (taken && there && nat_leads_to(there, &s->key, s->owner.ifindex))
		return 1;
	if (taken)
		bpf_map_delete_elem(&snat_reverse, &s->key);
	return ret == -EC_EEXIST ? 0 : flow_refusal(ret, USAGE_SNAT);
}

/* A search for a port. */
struct open_search {
	struct __sk_buff *ctx;
	struct scratch *scratch;
	int result; /* of the last try */
	__be16 port;
	bool privileged; /* the flow begins below 1024 */
};

EC_INLINE __be16 open_random_port(const struct open_search *s, __u32 try)
{
	if (s->privileged && try < OPEN_TRIES_PRIVILEGED)
		return bpf_htons(nat_random_privileged_port(s->scratch->owner.ifindex));
	return bpf_htons(nat_random_port());
}

/* One try: 1 ends the search. */
static long open_search_step(__u32 i, struct open_search *s)
{
	s->result = open_try_port(s->ctx, s->scratch, s->port);
	if (s->result != OPEN_IN_USE)
		return 1;
	s->port = open_random_port(s, i + 1);
	return 0;
}

/*
 * Whether a flow begins with the sender's own port. A flow of the node itself is here because a pod has its port, or to
 * keep it from a Service (open_is_noted); one straight to a backend because the Service's flow has it. To a backend in
 * the world, a flow is masqueraded as if the pod had opened it straight, and so leaves the pod's own port to one that
 * does.
 */
EC_INLINE bool open_keeps_port(const struct scratch *s, const struct owner *owner)
{
	if (!open_masquerades(s) && !owner->ifindex)
		return s->target.set;
	if (!open_masquerades(s))
		return s->target.set && ((owner->flags & FLOW_ON_NODE) || !ip_masqueraded(s->pkt.family));
	if (owner->flags & FLOW_HOST)
		return !nat_to_service(owner) && cfg.services && open_is_from_service(&s->pkt.tuple);
	/* Of lower ports a pod that chose one could hold that of a server to be, and get what far ends send there. */
	return bpf_ntohs(s->pkt.tuple.sport) >= NAT_DYNAMIC_PORTS && nat_port_in_range(s->pkt.tuple.sport);
}

/*
 * Whether the flow begins with the port of one that has given way: the far end takes this SYN there and maybe no other.
 * A late answer to a datagram must not get to another one.
 */
EC_INLINE bool open_takes_spare(const struct scratch *s)
{
	return (s->owner.flags & FLOW_COUNTED) && s->spare.found && s->pkt.tuple.proto == IPPROTO_TCP;
}

/*
 * Where what a search has come to is remembered (quota.h): of the node's ports, for all who need one towards the same
 * destination; the scratch record has the key.
 */
EC_INLINE __u32 open_cell(const struct scratch *s)
{
	return ports_cell(ports_destination(&s->key), open_masquerades(s) ? 0 : s->owner.ifindex);
}

/*
 * How many ports are tried. That of SCTP is covered by a checksum that programs cannot change. Where many tries have
 * just found none, one is enough: mostly the packet's.
 */
EC_INLINE __u32 open_tries(struct scratch *s)
{
	if (nat_to_service(&s->owner) && (open_is_taken_over(s) || s->pkt.tuple.proto == IPPROTO_SCTP))
		return 1;
	open_set_key(s, 0);
	if (quota_refused(open_cell(s), false))
		return 1;
	return open_masquerades(s) ? OPEN_TRIES : OPEN_TRIES_SERVICE;
}

/* Chooses a port and inserts the pair; returns what open_complete does. */
EC_INLINE int open_allocate(struct __sk_buff *ctx, struct scratch *scratch)
{
	struct open_search s = {.ctx = ctx, .scratch = scratch, .port = scratch->pkt.tuple.sport};
	const struct owner *owner = &scratch->owner;
	__u32 tries = open_tries(scratch);
	long tried;

	/* This node cannot know the privileges of clients outside. */
	s.privileged = open_masquerades(scratch) && !holder_is_outside(owner->ifindex, owner->flags) &&
		       nat_is_privileged(scratch->pkt.tuple.proto, bpf_ntohs(scratch->pkt.tuple.sport));

	if (open_is_taken_over(scratch))
		s.port = scratch->target.sport;
	else if (open_takes_spare(scratch))
		s.port = scratch->spare.port;
	else if (scratch->pkt.tuple.proto != IPPROTO_SCTP && !open_keeps_port(scratch, owner))
		s.port = open_random_port(&s, 0);
	tried = bpf_loop(tries, open_search_step, &s, 0) - (s.result != OPEN_IN_USE);
	if (tried > 0)
		count_traffic(scratch->direction, TRAFFIC_SNAT_RETRIED, tried, 0);
	if (s.result == OPEN_IN_USE) {
		if (tries > 1)
			quota_refused(open_cell(scratch), true);
		return -DROP_SNAT_EXHAUSTED;
	}
	return s.result < 0 ? s.result : open_complete(scratch, s.result == OPEN_TAKEN);
}

/*
 * For a packet that may not open a flow: finds the reverse half of one, and restores
 * the forward half. Only a flow that kept the pod's own port can be found.
 */
EC_CALL enum verdict open_adopt(struct scratch *s)
{
	const struct tuple *out = &s->pkt.tuple;
	struct snat_entry *there;

	s->key = nat_reverse_key(out, &s->owner.address, out->sport);
	there = bpf_map_lookup_elem(&snat_reverse, &s->key);
	if (!there || !nat_names(there, out, s->owner.ifindex) || flow_touch(&there->last_seen) == FLOW_GONE)
		return -DROP_NO_MAPPING;
	nat_restore_forward(&s->key, there);
	return VERDICT_GO_ON;
}

/* Whether a packet without a flow may open one. */
EC_INLINE bool open_allowed(const struct pkt *pkt)
{
	if (pkt->tuple.proto == IPPROTO_TCP)
		return tcp_is_opening(pkt);
	return !pkt_is_icmp(pkt->family, pkt->tuple.proto) || pkt_is_echo(pkt->family, pkt->icmp_type);
}

/* Counts a port of the node's for its holder, if the flow takes one. */
EC_INLINE enum verdict open_count_port(struct scratch *s)
{
	enum verdict verdict;

	/* One that netfilter has chosen may be none of the range. */
	if (!open_masquerades(s) || (open_is_taken_over(s) && !nat_port_in_range(s->target.sport)))
		return VERDICT_GO_ON;
	open_set_key(s, 0);
	verdict = quota_reserve(s);
	if (!verdict)
		s->owner.flags |= FLOW_COUNTED;
	return verdict;
}

/* Counts a pair for its holder. */
EC_INLINE enum verdict open_count_pair(struct scratch *s)
{
	struct holding held = ports_pairs(room_holder(s));
	struct usage *u = flow_usage(USAGE_SNAT);
	enum verdict verdict;

	if (!u)
		return -DROP_SNAT_FULL;
	if (quota_pair_refused(s, NULL))
		return -DROP_SNAT_LIMIT;
	verdict = room_reserve(u, USAGE_SNAT, &held);
	if (verdict == -DROP_SNAT_LIMIT)
		quota_pair_refused(s, u);
	return verdict;
}

/* Notes a pair that is new. */
EC_INLINE enum verdict open_note(struct scratch *s)
{
	struct usage *u = flow_usage(USAGE_SNAT);

	if (u)
		journal_note(u, USAGE_SNAT, &s->pkt.tuple);
	if (s->owner.flags & FLOW_COUNTED)
		count_traffic(s->direction, TRAFFIC_SNAT_ALLOCATED, 1, 0);
	return VERDICT_GO_ON;
}

/* Takes what was counted for a pair that was not made off the counts. */
EC_INLINE void open_uncount(struct scratch *s)
{
	struct holding held = ports_pairs(room_holder(s));

	if (s->owner.flags & FLOW_COUNTED)
		ports_release(&s->key, room_holder(s));
	flow_release(USAGE_SNAT, &held);
}

/*
 * Counts a pair for its holder, and inserts it. What the counts are in is looked up before and after: on the chain of
 * calls between, each word of the stack counts.
 */
EC_INLINE enum verdict open_pair(struct __sk_buff *ctx, struct scratch *s)
{
	enum verdict verdict = open_count_pair(s);
	int made;

	if (verdict)
		return verdict;
	made = open_count_port(s) ?: open_allocate(ctx, s);
	if (made > 0)
		return open_note(s);
	open_uncount(s);
	return made;
}

/*
 * Opens a flow for a packet that belongs to none, on behalf of the owner in the scratch
 * record: masqueraded or, with FLOW_SERVICE, to the target there. VERDICT_GO_ON: its pair is in the tables.
 */
EC_GLOBAL enum verdict open_flow(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();

	if (!s)
		return -DROP_INVALID;
	if (addr_is_zero(&s->owner.address))
		return -DROP_NO_SNAT_ADDRESS;
	if (!open_allowed(&s->pkt) && !open_is_taken_over(s))
		return open_adopt(s);
	return open_pair(ctx, s);
}

#endif
