/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Beside netfilter's NAT (cfg.netfilter_nat): flows that the rules of kube-proxy,
 * portmap or others translate to pods must pass netfilter in both directions. Where rules
 * only masquerade others' packets, all that matters is which ports that takes. Netfilter's
 * connection table knows which flows those are, and programs can look up TCP and UDP
 * there (bpf_skb_ct_lookup of the module nf_conntrack, Linux 5.18).
 */
#ifndef EC_LIB_NF_H
#define EC_LIB_NF_H

#include "bpf/lib/flow.h"
#include "bpf/lib/icmp.h"
#include "bpf/lib/ip.h"

/* The kernel's record of a connection, as far as it is read (takeover.h). */
union nf_inet_addr {
	__u32 all[4];
} __attribute__((preserve_access_index));

union nf_conntrack_man_proto {
	__be16 all;
} __attribute__((preserve_access_index));

struct nf_conntrack_man {
	union nf_inet_addr u3;
	union nf_conntrack_man_proto u;
} __attribute__((preserve_access_index));

struct nf_conntrack_tuple {
	struct nf_conntrack_man src;
	struct {
		union nf_inet_addr u3;
		union {
			__be16 all;
		} u;
	} dst;
} __attribute__((preserve_access_index));

struct nf_conntrack_tuple_hash {
	struct nf_conntrack_tuple tuple;
} __attribute__((preserve_access_index));

/* What one side of a TCP connection has sent and acknowledged. */
struct ip_ct_tcp_state {
	__u32 td_end;
	__u32 td_maxack;
} __attribute__((preserve_access_index));

struct ip_ct_tcp {
	struct ip_ct_tcp_state seen[2];
	__u8 state;
} __attribute__((preserve_access_index));

union nf_conntrack_proto {
	struct ip_ct_tcp tcp;
} __attribute__((preserve_access_index));

struct nf_conn {
	struct nf_conntrack_tuple_hash tuplehash[2]; /* by direction: the opener's, and that of the replies */
	unsigned long status;
	union nf_conntrack_proto proto;
} __attribute__((preserve_access_index));

/* struct bpf_ct_opts in the version that every kernel takes; netns_id -1 is the packet's namespace. */
struct nf_options {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u8 reserved[2];
};
_Static_assert(sizeof(struct nf_options) == 12, "the length tells the kernel which version it is");

extern struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *ctx, struct bpf_sock_tuple *tuple, __u32 tuple_size,
					 struct nf_options *options, __u32 options_size) __ksym __weak;
extern void bpf_ct_release(struct nf_conn *ct) __ksym __weak;
extern int bpf_ct_change_timeout(struct nf_conn *ct, __u32 timeout) __ksym __weak;

/*
 * Whether pods' packets may be translated. A constant: where it is false, the verifier removes the code that depends on
 * it.
 */
EC_INLINE bool nf_translates(void)
{
	return cfg.netfilter_nat == NETFILTER_TRANSLATES;
}

/*
 * Netfilter's record of a TCP or UDP flow, by a tuple or by that of its replies, which is to be released; NULL: none.
 */
EC_INLINE struct nf_conn *nf_lookup(struct __sk_buff *ctx, struct scratch *s, const struct tuple *t, bool of_replies,
				    struct nf_options *options)
{
	struct bpf_sock_tuple *lookup = (void *)&s->lookup;

	/* The kernel wants a length that the verifier knows. */
	return ip_set_lookup(s, t, of_replies) == sizeof(s->lookup.v6)
		       ? bpf_skb_ct_lookup(ctx, lookup, sizeof(s->lookup.v6), options, sizeof(*options))
		       : bpf_skb_ct_lookup(ctx, lookup, sizeof(s->lookup.v4), options, sizeof(*options));
}

/*
 * Whether netfilter knows a TCP or UDP flow by a tuple, or by that of its replies. If
 * the lookup fails for another reason than that there is none, it may.
 */
EC_CALL bool nf_knows(struct __sk_buff *ctx, struct scratch *s, const struct tuple *t, bool of_replies)
{
	struct nf_options options = {.netns_id = -1, .l4proto = t->proto};
	struct nf_conn *ct = nf_lookup(ctx, s, t, of_replies, &options);

	if (!ct)
		return options.error != -EC_ENOENT;
	bpf_ct_release(ct);
	return true;
}

/* Whether netfilter takes the packet although it has seen nothing of its flow. Else it is invalid there. */
EC_INLINE bool nf_may_open(const struct pkt *pkt)
{
	if (pkt_is_icmp(pkt->family, pkt->tuple.proto))
		return pkt_is_echo(pkt->family, pkt->icmp_type);
	return pkt->tuple.proto == IPPROTO_UDP || tcp_is_opening(pkt);
}

/*
 * Whether what netfilter knows a reply by is left of a flow to a Service that has been taken over from it (takeover.h):
 * a packet that it was just seeing then has renewed its entry. Else it has seen the flow as it is now.
 */
EC_INLINE bool nf_lags(struct __sk_buff *ctx, struct scratch *s)
{
	struct snat_entry *half;

	if (!cfg.services)
		return false;
	s->key = tuple_reversed(&s->pkt.tuple);
	half = bpf_map_lookup_elem(&snat_reverse, &s->key);
	return half && (half->flags & FLOW_SERVICE) && flow_is_live(&half->last_seen) &&
	       !nf_knows(ctx, s, &s->key, false);
}

/*
 * A packet that may open a flow is looked up by the tuple of its replies as well: if it
 * goes straight to a backend from a port that already talks to the backend through its
 * Service, it would get that flow's replies, and netfilter must move it to another port.
 * What we have translated has a port of its own.
 */
EC_INLINE bool nf_knows_flow(struct __sk_buff *ctx, struct scratch *s)
{
	const struct pkt *pkt = &s->pkt;

	if (nf_knows(ctx, s, &pkt->tuple, false) && !nf_lags(ctx, s))
		return true;
	return nf_may_open(pkt) && !(cfg.services && s->service.translated) && nf_knows(ctx, s, &pkt->tuple, true);
}

/* An error takes the way of the flow that it quotes, which came from the other side. Nothing translates pings. */
EC_INLINE bool nf_knows_icmp(struct __sk_buff *ctx, struct scratch *s)
{
	const struct tuple *inner = &s->inner.tuple;

	if (s->pkt.l4 != L4_ICMP_ERROR)
		return false;
	return !s->inner.known || (!pkt_is_icmp(s->pkt.family, inner->proto) && nf_knows(ctx, s, inner, true));
}

/*
 * Between two pods: the stack's, if netfilter knows the flow. Netfilter translates it,
 * or has seen it walk the stack in one direction: if the other direction bypassed it,
 * the usual rules against invalid packets would drop the flow. Fragments and other
 * protocols are always the stack's.
 */
EC_GLOBAL enum verdict nf_ask(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();
	bool known = true;

	if (!nf_translates())
		return VERDICT_GO_ON;
	if (!s || s->pkt.fragment != FRAGMENT_NONE || !pkt_l4(ctx, &s->pkt))
		return VERDICT_STACK;
	if (pkt_is_icmp(s->pkt.family, s->pkt.tuple.proto))
		known = nf_knows_icmp(ctx, s);
	else if (s->pkt.l4 == L4_FLOW)
		known = nf_knows_flow(ctx, s);
	return known ? VERDICT_STACK : VERDICT_GO_ON;
}

/*
 * Whether a packet between a pod and a far end of this kind may bypass netfilter. With
 * the world it may, as far as this goes: there its flow's FLOW_VIA_STACK decides.
 */
EC_INLINE enum verdict nf_judge(struct __sk_buff *ctx, __u8 family, enum destination_kind kind)
{
	if (!nf_translates())
		return VERDICT_GO_ON;
	switch (kind) {
	case DESTINATION_LOCAL:
	case DESTINATION_POD_CIDR:
		return nf_ask(ctx);
	case DESTINATION_WORLD:
		return ip_masqueraded(family) ? VERDICT_GO_ON : VERDICT_STACK;
	default:
		return VERDICT_STACK;
	}
}

/* The flags of a flow that the world opens. */
EC_INLINE __u8 nf_flags(void)
{
	return nf_translates() ? FLOW_VIA_STACK : 0;
}

/* Whether netfilter has a flow with these replies, such as one that it masquerades to the same port. */
EC_INLINE bool nf_holds_port(struct __sk_buff *ctx, struct scratch *s, const struct tuple *reverse_key)
{
	__u8 proto = reverse_key->proto;

	return cfg.netfilter_nat && (proto == IPPROTO_TCP || proto == IPPROTO_UDP) &&
	       nf_knows(ctx, s, reverse_key, true);
}

#endif
