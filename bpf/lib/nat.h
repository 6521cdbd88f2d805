/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Masquerading: the table of flow pairs, the choice of a port, and the
 * rewriting of packets. A pair is made reverse half first, so that a port is
 * taken before it is used, and removed both halves together by ec_collect.
 */
#ifndef EC_LIB_NAT_H
#define EC_LIB_NAT_H

#include "bpf/lib/count.h"
#include "bpf/lib/flow.h"

/* Tries at a free port before a new flow is refused. */
#define NAT_TRIES 16

/* What became of a try. */
enum nat_try {
	NAT_IN_USE,
	NAT_TAKEN,
	NAT_FOUND,
};

/* What a flow is masqueraded for. */
struct nat_owner {
	struct addr address; /* that the source becomes */
	__u32 ifindex;       /* the pod's generation, 0 for the node itself */
	__u32 flags;         /* enum snat_flags */
	enum direction direction;
};

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
 * Whether a socket of the node would get the replies. TCP finds TIME_WAIT
 * sockets as well; ICMP identifiers have no sockets to ask for.
 */
EC_INLINE bool nat_port_has_socket(struct __sk_buff *ctx, const struct tuple *reverse)
{
	struct bpf_sock_tuple t = {};
	struct bpf_sock *sk = NULL;

	t.ipv4.saddr = addr_v4(&reverse->dst);
	t.ipv4.daddr = addr_v4(&reverse->src);
	t.ipv4.sport = reverse->dport;
	t.ipv4.dport = reverse->sport;
	if (reverse->proto == IPPROTO_TCP)
		sk = bpf_skc_lookup_tcp(ctx, &t, sizeof(t.ipv4), BPF_F_CURRENT_NETNS, 0);
	else if (reverse->proto == IPPROTO_UDP)
		sk = bpf_sk_lookup_udp(ctx, &t, sizeof(t.ipv4), BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	bpf_sk_release(sk);
	return true;
}

/* Removes a pair whose forward half was claimed, and takes it off its owner's count. */
EC_CALL void nat_remove(const struct tuple *out, const struct snat_entry *forward)
{
	struct tuple key = nat_reverse_key(out, &forward->to_address, forward->to_port);
	struct snat_entry *reverse = bpf_map_lookup_elem(&snat_reverse, &key);
	struct device *dev = flow_owner(forward->ifindex);

	if (reverse && nat_names(reverse, out, forward->ifindex) && flow_claim(&reverse->last_seen, reverse->last_seen))
		bpf_map_delete_elem(&snat_reverse, &key);
	bpf_map_delete_elem(&snat, out);
	flow_release(USAGE_SNAT, dev ? &dev->snat_flows : NULL);
}

/*
 * Puts the reverse half back where it is missing. False: its port has gone to
 * another flow, and this one cannot go on.
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

	if (there)
		return nat_names(there, out, forward->ifindex);
	return !bpf_map_update_elem(&snat_reverse, &key, &reverse, BPF_NOEXIST);
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

/* What is looked at once a second: whether the flow can go on as it is. */
EC_INLINE bool nat_renew(const struct tuple *out, const struct snat_entry *forward)
{
	return nat_address_held(&forward->to_address) && nat_restore_reverse(out, forward);
}

/* A live forward half of this owner, renewed; NULL: none. */
EC_INLINE struct snat_entry *nat_lookup(const struct tuple *out, __u32 ifindex)
{
	struct snat_entry *e = bpf_map_lookup_elem(&snat, out);
	enum flow_seen seen;

	if (!e)
		return NULL;
	seen = flow_touch(&e->last_seen);
	if (seen == FLOW_GONE)
		return NULL;
	if (e->ifindex == ifindex && (seen == FLOW_FRESH || nat_renew(out, e)))
		return e;
	if (flow_claim(&e->last_seen, e->last_seen))
		nat_remove(out, e);
	return NULL;
}

/* A live reverse half, renewed; NULL: none. The key is the world's tuple, on its way out. */
EC_INLINE struct snat_entry *nat_lookup_reverse(const struct tuple *world)
{
	struct snat_entry *e = bpf_map_lookup_elem(&snat_reverse, world);
	enum flow_seen seen;

	if (!e)
		return NULL;
	seen = flow_touch(&e->last_seen);
	if (seen == FLOW_RENEWED)
		nat_restore_forward(world, e);
	return seen == FLOW_GONE ? NULL : e;
}

/* A SYN may open the tuple's connection anew; a valid RST closes it. Both are rare. */
EC_CALL void nat_note_turn(struct snat_entry *own, struct snat_entry *peer, const struct pkt *pkt)
{
	if (!peer)
		return;
	if (flow_is_opening(pkt) && flow_opens_anew(own->state, peer->state)) {
		own->state = 0;
		peer->state = 0;
	}
	if ((pkt->tcp_flags & TCP_RST) && flow_reset_valid(pkt, own->state, own->seq_end, peer->ack, peer->seq_end))
		own->state |= FLOW_RESET;
}

/* Notes a packet in its direction's half; peer_map and peer_key name the other half. */
EC_INLINE void nat_note(struct snat_entry *own, void *peer_map, const struct tuple *peer_key, const struct pkt *pkt)
{
	__u8 bits;

	if (flow_is_tcp_segment(pkt) && (pkt->tcp_flags & (TCP_RST | TCP_SYN)))
		nat_note_turn(own, bpf_map_lookup_elem(peer_map, peer_key), pkt);
	flow_note_edges(pkt, own->state, &own->seq_end, &own->ack);
	bits = own->state | flow_bits(pkt);
	if (bits != own->state)
		own->state = bits;
}

EC_INLINE void nat_note_out(struct snat_entry *e, const struct pkt *pkt)
{
	struct tuple world = nat_reverse_key(&pkt->tuple, &e->to_address, e->to_port);

	nat_note(e, &snat_reverse, &world, pkt);
}

EC_INLINE void nat_note_in(struct snat_entry *e, const struct tuple *world, const struct pkt *pkt)
{
	struct tuple pod = nat_reverse_key(world, &e->to_address, e->to_port);

	nat_note(e, &snat, &pod, pkt);
}

/*
 * Takes a port for a new flow by inserting its reverse half. NAT_FOUND: the
 * half is there already and names this very flow; else a negated drop reason.
 */
EC_INLINE int nat_try_port(struct __sk_buff *ctx, const struct pkt *pkt, const struct nat_owner *owner, __be16 port)
{
	struct tuple key = nat_reverse_key(&pkt->tuple, &owner->address, port);
	struct snat_entry reverse = {
		.to_address = pkt->tuple.src,
		.to_port = pkt->tuple.sport,
		.flags = owner->flags,
		.ifindex = owner->ifindex,
		.last_seen = bpf_ktime_get_coarse_ns(),
	};
	struct snat_entry *there = bpf_map_lookup_elem(&snat_reverse, &key);
	int ret;

	if (there && nat_names(there, &pkt->tuple, owner->ifindex) && flow_touch(&there->last_seen) != FLOW_GONE)
		return NAT_FOUND;
	if (there)
		return NAT_IN_USE;
	if (nat_port_has_socket(ctx, &key))
		return NAT_IN_USE;
	ret = bpf_map_update_elem(&snat_reverse, &key, &reverse, BPF_NOEXIST);
	if (ret == -EC_EEXIST)
		return NAT_IN_USE;
	return ret ? -DROP_SNAT_FULL : NAT_TAKEN;
}

/*
 * Inserts the forward half behind a reverse half that was just taken or found.
 * 1: the pair is new, and the caller's to count; 0: it was there; else a negated
 * drop reason. A reverse half that was taken in vain is gone again.
 */
EC_CALL int nat_complete(const struct pkt *pkt, const struct nat_owner *owner, __be16 port, bool taken)
{
	struct tuple key = nat_reverse_key(&pkt->tuple, &owner->address, port);
	struct snat_entry forward = {
		.to_address = owner->address,
		.to_port = port,
		.flags = owner->flags,
		.ifindex = owner->ifindex,
		.last_seen = bpf_ktime_get_coarse_ns(),
	};
	int ret = bpf_map_update_elem(&snat, &pkt->tuple, &forward, BPF_NOEXIST);
	struct snat_entry *there;

	if (!ret)
		return taken;
	/* Another CPU opened the same flow: its pair serves both, and may stand on this very reverse half. */
	there = bpf_map_lookup_elem(&snat, &pkt->tuple);
	if (taken && there && nat_leads_to(there, &key, owner->ifindex))
		return 1;
	if (taken)
		bpf_map_delete_elem(&snat_reverse, &key);
	return ret == -EC_EEXIST ? 0 : -DROP_SNAT_FULL;
}

/* A random port of the range, in host order. */
EC_INLINE __u32 nat_random_port(void)
{
	return cfg.snat_port_low + bpf_get_prandom_u32() % (cfg.snat_port_high - cfg.snat_port_low + 1);
}

/* The search for a port, as far as it has come. */
struct nat_search {
	struct __sk_buff *ctx;
	const struct pkt *pkt;
	const struct nat_owner *owner;
	__u32 retried;
	int result; /* of the last try */
	__be16 port;
};

/* One try: 1 ends the search. */
static long nat_search_step(__u32 i, struct nat_search *s)
{
	s->result = nat_try_port(s->ctx, s->pkt, s->owner, s->port);
	if (s->result != NAT_IN_USE)
		return 1;
	s->retried++;
	s->port = bpf_htons(nat_random_port());
	return 0;
}

/* Chooses a port and makes the pair; returns as nat_complete does. */
EC_INLINE int nat_allocate(struct __sk_buff *ctx, const struct pkt *pkt, const struct nat_owner *owner)
{
	struct nat_search s = {.ctx = ctx, .pkt = pkt, .owner = owner, .port = pkt->tuple.sport};

	/* The node's own flow is here because its port is a pod's. */
	if (!nat_port_in_range(s.port) || (owner->flags & SNAT_HOST))
		s.port = bpf_htons(nat_random_port());
	bpf_loop(NAT_TRIES, nat_search_step, &s, 0);
	if (s.retried)
		count_traffic(owner->direction, TRAFFIC_SNAT_RETRIED, s.retried, 0);
	if (s.result == NAT_IN_USE)
		return -DROP_SNAT_EXHAUSTED;
	return s.result < 0 ? s.result : nat_complete(pkt, owner, s.port, s.result == NAT_TAKEN);
}

/*
 * Finds the flow of a packet that may not open one by its reverse half, and
 * restores the forward half. Only a half that kept the pod's own port can be
 * found. 0, or a negated drop reason.
 */
EC_CALL int nat_adopt(const struct pkt *pkt, const struct nat_owner *owner)
{
	struct tuple key = nat_reverse_key(&pkt->tuple, &owner->address, pkt->tuple.sport);
	struct snat_entry *there = bpf_map_lookup_elem(&snat_reverse, &key);

	if (!there || !nat_names(there, &pkt->tuple, owner->ifindex) || flow_touch(&there->last_seen) == FLOW_GONE)
		return -DROP_NO_MAPPING;
	nat_restore_forward(&key, there);
	return 0;
}

/* Whether a packet without a flow may open one. */
EC_INLINE bool nat_opens(const struct pkt *pkt)
{
	if (pkt->tuple.proto == IPPROTO_TCP)
		return flow_is_opening(pkt);
	return pkt->tuple.proto != IPPROTO_ICMP || pkt->icmp_type == ICMP_ECHO;
}

/*
 * Opens a masqueraded flow for a packet that belongs to none; the pair stands in
 * the table afterwards. 0, or a negated drop reason.
 */
EC_CALL int nat_open(struct __sk_buff *ctx, const struct pkt *pkt, const struct nat_owner *owner)
{
	struct device *dev = flow_owner(owner->ifindex);
	__u32 *held = dev ? &dev->snat_flows : NULL;
	int ret;

	if (addr_is_zero(&owner->address))
		return -DROP_NO_SNAT_ADDRESS;
	if (!nat_opens(pkt))
		return nat_adopt(pkt, owner);
	ret = flow_reserve(USAGE_SNAT, cfg.snat_entries, held, DROP_SNAT_FULL, DROP_SNAT_LIMIT);
	if (ret < 0)
		return ret;
	ret = nat_allocate(ctx, pkt, owner);
	if (ret <= 0) {
		flow_release(USAGE_SNAT, held);
		return ret;
	}
	count_traffic(owner->direction, TRAFFIC_SNAT_ALLOCATED, 1, 0);
	return 0;
}

#endif
