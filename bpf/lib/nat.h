/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Masquerading, and flows to Services: the tables of pairs. The reverse half of a pair is
 * inserted first (open.h), so that a port is taken before it is used; reap.h removes both
 * together.
 */
#ifndef EC_LIB_NAT_H
#define EC_LIB_NAT_H

#include "bpf/lib/flow.h"
#include "bpf/lib/path.h"
#include "bpf/lib/ports.h"
#include "bpf/lib/scratch.h"

/* Writes the key of the reverse half of a tuple on its way out, whose source becomes address and port. */
EC_INLINE void nat_set_reverse_key(struct tuple *key, const struct tuple *out, const struct addr *address, __be16 port)
{
	key->src = *address;
	key->dst = out->dst;
	key->sport = port;
	key->dport = out->dport;
	key->proto = out->proto;
	__builtin_memset(key->pad, 0, sizeof(key->pad));
}

EC_INLINE struct tuple nat_reverse_key(const struct tuple *out, const struct addr *address, __be16 port)
{
	struct tuple key;

	nat_set_reverse_key(&key, out, address, port);
	return key;
}

/*
 * Whether a half is of a flow to a Service. Only where an entry is judged or removed do the flags alone decide: what is
 * left of such flows when Services have been turned off is still removed in pairs.
 */
EC_INLINE bool nat_is_service(const struct snat_entry *half)
{
	return cfg.services && (half->flags & FLOW_SERVICE);
}

/* Whether the owner opens a flow to a Service. */
EC_INLINE bool nat_to_service(const struct owner *owner)
{
	return cfg.services && (owner->flags & FLOW_SERVICE);
}

/* Writes the key of a half's other half; key is the half's own. */
EC_INLINE void nat_set_other_key(struct tuple *other, const struct tuple *key, const struct snat_entry *half)
{
	bool both = half->flags & FLOW_SERVICE;

	other->src = half->to_address;
	other->dst = both ? half->far_address : key->dst;
	other->sport = half->to_port;
	other->dport = both ? half->far_port : key->dport;
	other->proto = key->proto;
	__builtin_memset(other->pad, 0, sizeof(other->pad));
}

/* Whether a half's far side becomes that of the other half's key. Where it has none of its own, both have the same. */
EC_INLINE bool nat_far_is(const struct snat_entry *half, const struct tuple *other)
{
	return !(half->flags & FLOW_SERVICE) ||
	       (half->far_port == other->dport && addr_equal(&half->far_address, &other->dst));
}

/* Whether a reverse half belongs to this flow: to the tuple as the pod sends it, and to its generation. */
EC_INLINE bool nat_names(const struct snat_entry *reverse, const struct tuple *out, __u32 ifindex)
{
	return reverse->ifindex == ifindex && reverse->to_port == out->sport &&
	       addr_equal(&reverse->to_address, &out->src) && nat_far_is(reverse, out);
}

/* Whether a forward half belongs to the reverse half with this key. */
EC_INLINE bool nat_leads_to(const struct snat_entry *forward, const struct tuple *reverse_key, __u32 ifindex)
{
	return forward->ifindex == ifindex && forward->to_port == reverse_key->sport &&
	       addr_equal(&forward->to_address, &reverse_key->src) && nat_far_is(forward, reverse_key);
}

/* The first port that no server is assigned (RFC 6335, section 6), in host order. */
#define NAT_DYNAMIC_PORTS 49152

EC_INLINE bool nat_port_in_range(__be16 port)
{
	__u32 p = bpf_ntohs(port);

#pragma unroll
	for (int i = 0; i < SNAT_PORT_RANGES; i++) {
		if (p - cfg.snat_ports[i].first < cfg.snat_ports[i].count)
			return true;
	}
	return false;
}

/* Whether a flow may have the port. The node's own packets have mostly one that no flow has ever got. */
EC_INLINE bool nat_port_may_be_held(__u8 proto, __be16 port)
{
	return bpf_ntohs(port) - cfg.snat_held.first < cfg.snat_held.count || ports_was_given(proto, port);
}

/* A random port of the ranges, in host order; 0 if they have none. */
EC_INLINE __u32 nat_random_port(void)
{
	__u32 n = bpf_get_prandom_u32() % ports_total();

#pragma unroll
	for (int i = 0; i < SNAT_PORT_RANGES; i++) {
		if (n < cfg.snat_ports[i].count)
			return cfg.snat_ports[i].first + n;
		n -= cfg.snat_ports[i].count;
	}
	return 0;
}

/* The first port that needs no privilege. */
#define NAT_UNPRIVILEGED_PORTS 1024

/* Whether a flow that begins with the port, in host order, is to get one that needs a privilege as well. */
EC_INLINE bool nat_is_privileged(__u8 proto, __u32 port)
{
	return cfg.snat_privileged.count && (proto == IPPROTO_TCP || proto == IPPROTO_UDP) && port &&
	       port < NAT_UNPRIVILEGED_PORTS;
}

/*
 * A random port for such a flow of a pod or, with 0, of the node, in host order. A pod has half of them, each another
 * one, so that it can't take all of them, and the node those above.
 */
EC_INLINE __u32 nat_random_privileged_port(__u32 ifindex)
{
	__u32 first = cfg.snat_privileged.first, count = cfg.snat_privileged.count, random = bpf_get_prandom_u32();

	/* The factor is a prime, so pods with neighbouring numbers begin far apart. */
	if (ifindex)
		return first + (ifindex * 61 + random % ((count + 1) / 2)) % count;
	return first + count + random % (NAT_UNPRIVILEGED_PORTS - first - count);
}

/*
 * Takes a pair off the counts, that of a client with this address. ifindex and flags are
 * either half's, read before it was deleted, since its memory may hold another flow at once.
 */
EC_INLINE void nat_uncount(const struct tuple *reverse_key, const struct addr *client, __u32 ifindex, __u8 flags)
{
	__u32 holder = holder_of(ifindex, flags, client);
	struct holding held = ports_pairs(holder);

	flow_release(USAGE_SNAT, &held);
	if (flags & FLOW_COUNTED)
		ports_release(reverse_key, holder);
}

/*
 * Removes a pair whose forward half was claimed; the scratch record's pair becomes that.
 * Only the one that deletes the forward half takes the pair off the counts.
 */
EC_GLOBAL int nat_remove(const struct tuple *out, const struct snat_entry *forward)
{
	struct scratch *s = scratch_get();
	struct snat_entry *reverse;
	struct pair *pair;
	__u32 ifindex;
	__u8 flags;

	if (!s || !out || !forward)
		return 0;
	ifindex = *(volatile __u32 *)&forward->ifindex;
	flags = *(volatile __u8 *)&forward->flags;
	pair = &s->pair;
	pair->forward_key = *out;
	nat_set_other_key(&pair->reverse_key, out, forward);
	reverse = bpf_map_lookup_elem(&snat_reverse, &pair->reverse_key);
	if (reverse && nat_names(reverse, out, ifindex) && flow_claim(&reverse->last_seen, reverse->last_seen))
		bpf_map_delete_elem(&snat_reverse, &pair->reverse_key);
	if (!bpf_map_delete_elem(&snat, &pair->forward_key))
		nat_uncount(&pair->reverse_key, &pair->forward_key.src, ifindex, flags);
	return 0;
}

/* Fills in a half that is missing: it leads to the other half's key. */
EC_INLINE void nat_fill_missing(struct snat_entry *e, const struct tuple *other_key, const struct snat_entry *other)
{
	*e = (struct snat_entry){
		.to_address = other_key->src,
		.to_port = other_key->sport,
		.flags = other->flags,
		.ifindex = other->ifindex,
		.last_seen = bpf_ktime_get_coarse_ns(),
	};
	if (!(other->flags & FLOW_SERVICE))
		return;
	e->far_address = other_key->dst;
	e->far_port = other_key->dport;
	e->set = other->set;
	e->backend = other->backend;
	e->generation = other->generation;
	e->pod = other->pod;
}

/*
 * Restores the reverse half if it is missing or a tombstone. False: its port is now
 * another flow's, and this flow cannot go on.
 */
EC_GLOBAL bool nat_restore_reverse(const struct tuple *out, const struct snat_entry *forward)
{
	struct scratch *s = scratch_get();
	struct snat_entry *there;
	struct tuple *key;

	if (!s || !out || !forward)
		return false;
	key = &s->pair.reverse_key;
	nat_set_other_key(key, out, forward);
	there = bpf_map_lookup_elem(&snat_reverse, key);
	if (there && !nat_names(there, out, forward->ifindex))
		return false;
	if (there && flow_is_live(&there->last_seen))
		return true;
	nat_fill_missing(&s->entry, out, forward);
	/* If there is no room the flow goes on, and this is tried again in a second. */
	return bpf_map_update_elem(&snat_reverse, key, &s->entry, there ? BPF_ANY : BPF_NOEXIST) != -EC_EEXIST;
}

/*
 * Restores the forward half if it is missing. Returns 0 or the kernel's error, -EEXIST
 * when it is there.
 */
EC_CALL int nat_restore_forward(const struct tuple *reverse_key, const struct snat_entry *reverse)
{
	struct scratch *s = scratch_get();

	if (!s)
		return -EC_EEXIST;
	nat_set_other_key(&s->pair.forward_key, reverse_key, reverse);
	nat_fill_missing(&s->entry, reverse_key, reverse);
	return bpf_map_update_elem(&snat, &s->pair.forward_key, &s->entry, BPF_NOEXIST);
}

/* Whether the node still has the address, without which no reply arrives. */
EC_CALL bool nat_address_held(const struct addr *address)
{
	struct destination *d = path_destination(address);

	return d && d->kind == DESTINATION_HOST;
}

/*
 * Removes a pair that cannot go on: its pod is gone, or its port is now another
 * flow's.
 */
EC_INLINE void nat_end(const struct tuple *out, struct snat_entry *forward)
{
	if (flow_take(&forward->last_seen))
		nat_remove(out, forward);
}

/* The live forward half of this owner, which stays as it is; NULL: none. */
EC_INLINE struct snat_entry *nat_peek(const struct tuple *out, __u32 ifindex)
{
	struct snat_entry *e = bpf_map_lookup_elem(&snat, out);

	return e && flow_is_live(&e->last_seen) && e->ifindex == ifindex ? e : NULL;
}

/* Whether a masqueraded flow goes on from its address. */
enum nat_source {
	NAT_SOURCE_HELD,  /* it does */
	NAT_SOURCE_LOST,  /* the node has lost the address, which may come back */
	NAT_SOURCE_MOVED, /* new flows have another: the node has lost this one, or it is another uplink's */
};

/*
 * Judges the address of a masqueraded flow. One that its uplink has as well as that of new flows is kept, and so is one
 * that no uplink has.
 */
EC_CALL int nat_source(const struct snat_entry *forward)
{
	struct destination *d = path_destination(&forward->to_address);
	bool held = d && d->kind == DESTINATION_HOST;
	struct scratch *s = scratch_get();

	if (!s || !s->owner.uplink || addr_is_zero(&s->owner.address) ||
	    addr_equal(&forward->to_address, &s->owner.address))
		return held ? NAT_SOURCE_HELD : NAT_SOURCE_LOST;
	return held && (!d->ifindex || d->ifindex == s->owner.uplink) ? NAT_SOURCE_HELD : NAT_SOURCE_MOVED;
}

/*
 * Once a second: checks that the flow can go on, and renews it. An address that the
 * node has lost may come back, so the pair stays, unrenewed, and its packets are dropped
 * until then, unless new flows have another address: then it ends.
 */
EC_INLINE enum verdict nat_renew(const struct tuple *out, __u32 ifindex, struct snat_entry *forward,
				 struct snat_entry **found)
{
	int source = nat_is_service(forward) ? NAT_SOURCE_HELD : nat_source(forward);

	if (source == NAT_SOURCE_LOST)
		return -DROP_NO_SNAT_ADDRESS;
	if (source == NAT_SOURCE_MOVED) {
		nat_end(out, forward);
		return VERDICT_GO_ON;
	}
	switch (flow_touch(&forward->last_seen)) {
	case FLOW_GONE:
		break;
	case FLOW_FRESH:
		/* Another CPU has just renewed it, or has removed it, and its memory is another flow's. */
		*found = nat_peek(out, ifindex);
		break;
	default:
		if (nat_restore_reverse(out, forward))
			*found = forward;
		else
			nat_end(out, forward);
	}
	return VERDICT_GO_ON;
}

/* The unit of nat_recent, about a millisecond. */
#define NAT_RECENT_SHIFT 20

/* Notes when the opener has last sent a datagram: last_seen is up to a second old, and a question takes less. */
EC_INLINE void nat_note_recent(struct snat_entry *forward, __u8 proto, __u64 now)
{
	__u32 recent = now >> NAT_RECENT_SHIFT;

	if (proto == IPPROTO_UDP && forward->seq_end != recent)
		forward->seq_end = recent;
}

/* When the opener of a pair has last sent, as far as it is noted. */
EC_INLINE __u32 nat_recent(const struct snat_entry *forward, __u8 proto)
{
	return proto == IPPROTO_UDP ? forward->seq_end : forward->last_seen >> NAT_RECENT_SHIFT;
}

/* nat_find, of a half that has been looked up. */
EC_INLINE enum verdict nat_use(const struct tuple *out, __u32 ifindex, struct snat_entry *e, struct snat_entry **found)
{
	__u64 now = bpf_ktime_get_coarse_ns();

	*found = NULL;
	if (e->ifindex != ifindex) {
		if (flow_owner_lives(e->ifindex))
			return -DROP_NO_MAPPING;
		nat_end(out, e);
		return VERDICT_GO_ON;
	}
	/* Left when Services were turned off: what it leads to would be taken for an address of the node. */
	if (!cfg.services && (e->flags & FLOW_SERVICE)) {
		nat_end(out, e);
		return VERDICT_GO_ON;
	}
	nat_note_recent(e, out->proto, now);
	switch (flow_age_of(*(volatile __u64 *)&e->last_seen, now)) {
	case FLOW_GONE:
		return VERDICT_GO_ON;
	case FLOW_FRESH:
		*found = e;
		return VERDICT_GO_ON;
	default:
		return nat_renew(out, ifindex, e, found);
	}
}

/*
 * Finds the live forward half of this owner, and renews it; NULL: there is none. A
 * packet whose flow exists but cannot be used is dropped.
 */
EC_INLINE enum verdict nat_find(const struct tuple *out, __u32 ifindex, struct snat_entry **found)
{
	struct snat_entry *e = bpf_map_lookup_elem(&snat, out);

	*found = NULL;
	return e ? nat_use(out, ifindex, e, found) : VERDICT_GO_ON;
}

/*
 * Whether the answer, which comes a second or more after the flow's first packet, shows that the flow goes on. To a
 * client outside it must not be the first answer, since anybody may have sent the question.
 */
EC_INLINE bool nat_is_stream(const struct tuple *reverse_key, const struct snat_entry *e)
{
	return reverse_key->proto == IPPROTO_UDP &&
	       ((e->state & FLOW_PACKET) || !holder_is_outside(e->ifindex, e->flags));
}

/* Renews a reverse half for a packet that answers; false: it is being removed. */
EC_INLINE bool nat_renew_reverse(const struct tuple *reverse_key, struct snat_entry *e)
{
	enum flow_seen seen = flow_touch(&e->last_seen);

	if (seen == FLOW_DUE) {
		if (nat_is_stream(reverse_key, e))
			e->state |= FLOW_STREAM;
		nat_restore_forward(reverse_key, e);
	}
	return seen != FLOW_GONE;
}

/* The live reverse half with this key, renewed; NULL: there is none. */
EC_INLINE struct snat_entry *nat_lookup_reverse(const struct tuple *reverse_key)
{
	struct snat_entry *e = bpf_map_lookup_elem(&snat_reverse, reverse_key);

	return e && nat_renew_reverse(reverse_key, e) ? e : NULL;
}

/* Whether who has opened the flow is outside, and has not proved yet that it has the address. */
EC_INLINE bool nat_unproved(const struct snat_entry *own, bool by_opener)
{
	return by_opener && !own->ifindex && !(own->state & FLOW_ACK);
}

/*
 * Notes a SYN, which may open a new connection, a FIN or RST, which may end one, an ACK
 * after a RST, or one that may be the first; own is the half of the packet's direction.
 * Returns the flow_state bits that the packet must not set.
 */
EC_GLOBAL __u8 nat_note_turn(struct snat_entry *own, const struct pkt *pkt, bool by_opener)
{
	struct tcp_side from, to;
	struct snat_entry *peer;
	struct tuple key;
	bool exact;
	__u8 doubted;

	if (!own || !pkt)
		return 0;
	key = by_opener ? pkt->tuple : tuple_reversed(&pkt->tuple);
	key.src = own->to_address;
	key.sport = own->to_port;
	if (nat_is_service(own)) {
		key.dst = own->far_address;
		key.dport = own->far_port;
	}
	peer = by_opener ? bpf_map_lookup_elem(&snat_reverse, &key) : bpf_map_lookup_elem(&snat, &key);
	if (!peer)
		return 0;
	from = (struct tcp_side){&own->state, &own->seq_end, &own->ack};
	to = (struct tcp_side){&peer->state, &peer->seq_end, &peer->ack};
	if (tcp_is_opening(pkt) && tcp_opens_anew(own->state, peer->state, by_opener && own->ifindex)) {
		own->state = 0;
		peer->state = 0;
	}
	exact = tcp_reset_exact(pkt, &from, &to, by_opener);
	tcp_note_reset(pkt, &from, &to);
	if (exact && (own->state & FLOW_RESET)) {
		own->state |= FLOW_CLOSED;
		peer->state |= FLOW_CLOSED;
	}
	doubted = tcp_doubted(pkt, &to, nat_unproved(own, by_opener));
	if (!(doubted & FLOW_FIN))
		own->state |= tcp_closes_first(pkt, &from, &to);
	return doubted;
}

/*
 * Whether neither side of a TCP pair knows its connection any more, so that its port is free: after an exact RST, or
 * when the side that closed last has been told that its FIN has come.
 */
EC_INLINE bool nat_forgotten(const struct snat_entry *forward, const struct snat_entry *reverse)
{
	if (forward->state & FLOW_CLOSED)
		return true;
	return (forward->state & reverse->state & FLOW_FIN) && !(reverse->state & (FLOW_FIRST | FLOW_RESET)) &&
	       forward->ack == reverse->seq_end;
}

/* Notes a packet in its direction's half: the forward one for what the opener sends. */
EC_INLINE void nat_note(struct snat_entry *own, const struct pkt *pkt, bool by_opener)
{
	__u8 bits = flow_bits(pkt);

	if (tcp_is_segment(pkt) && ((pkt->tcp_flags & (TCP_RST | TCP_SYN | TCP_FIN)) || (own->state & FLOW_RESET) ||
				    nat_unproved(own, by_opener)))
		bits &= ~nat_note_turn(own, pkt, by_opener);
	tcp_note_edges(pkt, own->state, &own->seq_end, &own->ack);
	bits |= own->state;
	if (bits != own->state)
		own->state = bits;
}

/*
 * Whether the far end of a TCP pair remembers the closed connection (TIME_WAIT). It takes another one from the same
 * port if that begins beyond the old end (RFC 6191).
 */
EC_INLINE bool nat_takes_syn(const struct snat_entry *forward, const struct snat_entry *reverse, __u32 seq)
{
	return (forward->state & reverse->state & FLOW_FIN) &&
	       (reverse->state & (FLOW_FIRST | FLOW_RESET)) == FLOW_FIRST && reverse->ack == forward->seq_end &&
	       (__s32)(seq - forward->seq_end) > 0;
}

/* From now on, the flow walks the stack in both directions. */
EC_CALL void nat_to_stack(const struct tuple *out, struct snat_entry *own)
{
	struct tuple key = nat_reverse_key(out, &own->to_address, own->to_port);
	struct snat_entry *reverse = bpf_map_lookup_elem(&snat_reverse, &key);

	own->flags |= FLOW_VIA_STACK;
	if (reverse)
		reverse->flags |= FLOW_VIA_STACK;
}

/* The live reverse half with this key, of any owner, which stays as it is; NULL: none. */
EC_INLINE struct snat_entry *nat_peek_reverse(const struct tuple *reverse_key)
{
	struct snat_entry *e = bpf_map_lookup_elem(&snat_reverse, reverse_key);

	return e && flow_is_live(&e->last_seen) ? e : NULL;
}

/*
 * Whether a flow to a Service makes way for one of the same client's straight to the backend: a connection that the
 * backend has ended, or that anybody may have opened, and datagrams of pods and nodes, which mostly go straight, as
 * their own nodes see to it.
 */
EC_CALL bool nat_makes_way(const struct pkt *pkt, const struct snat_entry *forward, const struct snat_entry *reverse)
{
	struct destination *from;

	if (pkt->tuple.proto == IPPROTO_TCP)
		return !(forward->state & FLOW_ACK) || (reverse->state & FLOW_FIN);
	from = path_destination(&pkt->tuple.src);
	return from && (from->kind == DESTINATION_POD_CIDR || from->kind == DESTINATION_NODE);
}

/*
 * Whether the packet, which opens a flow straight to a pod, comes from where its client already talks to that by a
 * Service: the pod could not tell the two apart.
 */
EC_CALL bool nat_beside_service(const struct pkt *pkt)
{
	struct snat_entry *reverse = nat_peek_reverse(&pkt->tuple), *forward;
	struct scratch *s = scratch_get();

	if (!s || !reverse || !nat_is_service(reverse) || reverse->ifindex)
		return false;
	nat_set_other_key(&s->key, &pkt->tuple, reverse);
	forward = nat_peek(&s->key, 0);
	if (!forward || !nat_makes_way(pkt, forward, reverse))
		return true;
	nat_end(&s->key, forward);
	return false;
}

#endif
