/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Masquerading: the table of flow pairs. A pair is made reverse half first
 * (open.h), so that a port is taken before it is used, and removed both halves
 * together by ec_collect.
 */
#ifndef EC_LIB_NAT_H
#define EC_LIB_NAT_H

#include "bpf/lib/flow.h"
#include "bpf/lib/ports.h"
#include "bpf/lib/scratch.h"

/* The key of the reverse half, for a tuple on its way out and what it becomes. */
EC_INLINE struct tuple nat_reverse_key(const struct tuple *out, const struct addr *address, __be16 port)
{
	struct tuple key = {
		.src = *address,
		.dst = out->dst,
		.sport = port,
		.dport = out->dport,
		.proto = out->proto,
	};

	return key;
}

/* The same, written where it is needed, for the sake of the stack. */
EC_INLINE void nat_set_reverse_key(struct tuple *key, const struct tuple *out, const struct addr *address, __be16 port)
{
	key->src = *address;
	key->dst = out->dst;
	key->sport = port;
	key->dport = out->dport;
	key->proto = out->proto;
	__builtin_memset(key->pad, 0, sizeof(key->pad));
}

/* Whether a reverse half names this very flow. */
EC_INLINE bool nat_names(const struct snat_entry *reverse, const struct tuple *out, __u32 ifindex)
{
	return reverse->ifindex == ifindex && reverse->to_port == out->sport &&
	       addr_equal(&reverse->to_address, &out->src);
}

/* Whether a forward half leads to this reverse half's key. */
EC_INLINE bool nat_leads_to(const struct snat_entry *forward, const struct tuple *world, __u32 ifindex)
{
	return forward->ifindex == ifindex && forward->to_port == world->sport &&
	       addr_equal(&forward->to_address, &world->src);
}

EC_INLINE bool nat_port_in_range(__be16 port)
{
	__u32 p = bpf_ntohs(port);

	return p >= cfg.snat_port_low && p <= cfg.snat_port_high;
}

/*
 * Takes a pair off the counts, by the reverse half's key and what either half said
 * before it was deleted: a deleted entry's memory may be another flow's at once.
 */
EC_INLINE void nat_uncount(const struct tuple *world, __u32 ifindex, __u8 flags)
{
	struct device *dev = flow_owner(ifindex);

	flow_release(USAGE_SNAT, dev ? &dev->snat_flows : NULL);
	if (flags & SNAT_COUNTED)
		ports_release(world, ifindex);
}

/*
 * Removes a pair whose forward half was claimed. Who deletes the forward half, and
 * nobody else, takes the pair off its owner's count.
 */
EC_CALL void nat_remove(const struct tuple *out, const struct snat_entry *forward)
{
	struct tuple key = nat_reverse_key(out, &forward->to_address, forward->to_port);
	struct snat_entry *reverse = bpf_map_lookup_elem(&snat_reverse, &key);
	__u32 ifindex = *(volatile __u32 *)&forward->ifindex;
	__u8 flags = *(volatile __u8 *)&forward->flags;

	if (reverse && nat_names(reverse, out, ifindex) && flow_claim(&reverse->last_seen, reverse->last_seen))
		bpf_map_delete_elem(&snat_reverse, &key);
	if (!bpf_map_delete_elem(&snat, out))
		nat_uncount(&key, ifindex, flags);
}

/*
 * Puts the reverse half back where it is missing, or only a tombstone. False: its
 * port has gone to another flow, and this one cannot go on.
 */
EC_CALL bool nat_restore_reverse(const struct tuple *out, const struct snat_entry *forward)
{
	struct tuple key = nat_reverse_key(out, &forward->to_address, forward->to_port);
	struct snat_entry reverse = {
		.to_address = out->src,
		.to_port = out->sport,
		.flags = forward->flags,
		.ifindex = forward->ifindex,
		.last_seen = bpf_ktime_get_coarse_ns(),
	};
	struct snat_entry *there = bpf_map_lookup_elem(&snat_reverse, &key);

	if (there && !nat_names(there, out, forward->ifindex))
		return false;
	if (there && flow_stands(&there->last_seen))
		return true;
	/* Without room it is tried again in a second, and the flow goes on. */
	return bpf_map_update_elem(&snat_reverse, &key, &reverse, there ? BPF_ANY : BPF_NOEXIST) != -EC_EEXIST;
}

/*
 * Puts the forward half back where it is missing; world is the reverse half's
 * key. 0, or the kernel's error: -EEXIST when it is there.
 */
EC_CALL int nat_restore_forward(const struct tuple *world, const struct snat_entry *reverse)
{
	struct tuple key = {
		.src = reverse->to_address,
		.dst = world->dst,
		.sport = reverse->to_port,
		.dport = world->dport,
		.proto = world->proto,
	};
	struct snat_entry forward = {
		.to_address = world->src,
		.to_port = world->sport,
		.flags = reverse->flags,
		.ifindex = reverse->ifindex,
		.last_seen = bpf_ktime_get_coarse_ns(),
	};

	return bpf_map_update_elem(&snat, &key, &forward, BPF_NOEXIST);
}

/* Whether the node still has the address: without it no reply comes back. */
EC_CALL bool nat_address_held(const struct addr *address)
{
	struct destination_key key = {.prefix_len = 128, .prefix = *address};
	struct destination *d = bpf_map_lookup_elem(&destinations, &key);

	return d && d->kind == DESTINATION_HOST;
}

/*
 * Removes a pair that cannot go on: its pod is gone, or its port has become
 * another flow's.
 */
EC_INLINE void nat_end(const struct tuple *out, struct snat_entry *forward)
{
	if (flow_take(&forward->last_seen))
		nat_remove(out, forward);
}

/*
 * What is looked at once a second: whether the flow can go on as it is. An address
 * that the node does not have at the moment may come back, so the pair stays,
 * unrenewed, and its packets are refused until then.
 */
EC_INLINE int nat_renew(const struct tuple *out, struct snat_entry *forward, struct snat_entry **found)
{
	if (!nat_address_held(&forward->to_address))
		return -DROP_NO_SNAT_ADDRESS;
	if (flow_touch(&forward->last_seen) == FLOW_GONE)
		return 0;
	if (nat_restore_reverse(out, forward))
		*found = forward;
	else
		nat_end(out, forward);
	return 0;
}

/*
 * Finds the live forward half of this owner, renewed; NULL: there is none. 0, or a
 * negated drop reason for a packet whose flow is there and cannot be used.
 */
EC_INLINE int nat_find(const struct tuple *out, __u32 ifindex, struct snat_entry **found)
{
	struct snat_entry *e = bpf_map_lookup_elem(&snat, out);

	*found = NULL;
	if (!e)
		return 0;
	if (e->ifindex != ifindex) {
		if (flow_owner_lives(e->ifindex))
			return -DROP_NO_MAPPING;
		nat_end(out, e);
		return 0;
	}
	switch (flow_age(&e->last_seen)) {
	case FLOW_GONE:
		return 0;
	case FLOW_FRESH:
		*found = e;
		return 0;
	default:
		return nat_renew(out, e, found);
	}
}

/* A live reverse half, renewed; NULL: none. The key is the world's tuple, on its way out. */
EC_INLINE struct snat_entry *nat_lookup_reverse(const struct tuple *world)
{
	struct snat_entry *e = bpf_map_lookup_elem(&snat_reverse, world);
	enum flow_seen seen;

	if (!e)
		return NULL;
	seen = flow_touch(&e->last_seen);
	if (seen == FLOW_DUE)
		nat_restore_forward(world, e);
	return seen == FLOW_GONE ? NULL : e;
}

/*
 * A SYN may open the tuple's connection anew; a FIN may close it; a RST may, or may
 * have not. All are rare. Returns the bits that the packet does not set.
 */
EC_CALL __u8 nat_note_turn(struct snat_entry *own, struct snat_entry *peer, const struct pkt *pkt, bool by_pod)
{
	struct flow_side from = {&own->state, &own->seq_end, &own->ack};
	struct flow_side to;

	if (!peer)
		return 0;
	to = (struct flow_side){&peer->state, &peer->seq_end, &peer->ack};
	if (flow_is_opening(pkt) && flow_opens_anew(own->state, peer->state, by_pod)) {
		own->state = 0;
		peer->state = 0;
	}
	flow_note_reset(pkt, &from, &to);
	return flow_doubted(pkt, &to);
}

/* Notes a packet in its direction's half; peer_map and peer_key name the other half. */
EC_INLINE void nat_note(struct snat_entry *own, void *peer_map, const struct tuple *peer_key, const struct pkt *pkt)
{
	__u8 bits = flow_bits(pkt);

	if (flow_is_tcp_segment(pkt) && ((pkt->tcp_flags & (TCP_RST | TCP_SYN | TCP_FIN)) || (own->state & FLOW_RESET)))
		bits &= ~nat_note_turn(own, bpf_map_lookup_elem(peer_map, peer_key), pkt, peer_map == &snat_reverse);
	flow_note_edges(pkt, own->state, &own->seq_end, &own->ack);
	bits |= own->state;
	if (bits != own->state)
		own->state = bits;
}

EC_INLINE void nat_note_out(struct snat_entry *e, const struct pkt *pkt)
{
	struct tuple world = nat_reverse_key(&pkt->tuple, &e->to_address, e->to_port);

	nat_note(e, &snat_reverse, &world, pkt);
}

/* Has a flow walk the stack from now on, both ways. */
EC_CALL void nat_to_stack(const struct tuple *out, struct snat_entry *own)
{
	struct tuple key = nat_reverse_key(out, &own->to_address, own->to_port);
	struct snat_entry *reverse = bpf_map_lookup_elem(&snat_reverse, &key);

	own->flags |= SNAT_VIA_STACK;
	if (reverse)
		reverse->flags |= SNAT_VIA_STACK;
}

EC_INLINE void nat_note_in(struct snat_entry *e, const struct tuple *world, const struct pkt *pkt)
{
	struct tuple pod = nat_reverse_key(world, &e->to_address, e->to_port);

	nat_note(e, &snat, &pod, pkt);
}

/* The live forward half of this owner as it is, for an ICMP error, which must change nothing; NULL: none. */
EC_INLINE struct snat_entry *nat_peek(const struct tuple *out, __u32 ifindex)
{
	struct snat_entry *e = bpf_map_lookup_elem(&snat, out);

	return e && flow_stands(&e->last_seen) && e->ifindex == ifindex ? e : NULL;
}

/* The same for a reverse half, of whatever owner. */
EC_INLINE struct snat_entry *nat_peek_reverse(const struct tuple *world)
{
	struct snat_entry *e = bpf_map_lookup_elem(&snat_reverse, world);

	return e && flow_stands(&e->last_seen) ? e : NULL;
}

#endif
