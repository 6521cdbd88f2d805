/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Beside netfilter's NAT (cfg.netfilter_nat): flows to other addresses that
 * kube-proxy, portmap or anyone's rules translate to pods must meet netfilter in
 * both directions. Its connection table knows which flows those are; the kernel
 * lets programs ask (bpf_skb_ct_lookup, Linux 5.18, of the module nf_conntrack),
 * for TCP and UDP.
 */
#ifndef EC_LIB_NF_H
#define EC_LIB_NF_H

#include "bpf/lib/flow.h"
#include "bpf/lib/icmp.h"

/* The kernel's record of a connection, of which nothing is read here: that there is one is enough. */
struct nf_conn {
	unsigned long status;
} __attribute__((preserve_access_index));

/* struct bpf_ct_opts as every kernel takes it; netns_id -1 is the packet's own. */
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

/*
 * Whether netfilter knows a TCP or UDP flow by the tuple of either direction. An
 * error is no answer: what may be known is netfilter's.
 */
EC_CALL bool nf_knows(struct __sk_buff *ctx, struct tuple_v4 *tuple, __u8 proto)
{
	struct nf_options options = {.netns_id = -1, .l4proto = proto};
	struct nf_conn *ct;

	ct = bpf_skb_ct_lookup(ctx, (void *)tuple, sizeof(*tuple), &options, sizeof(options));
	if (!ct)
		return options.error != -EC_ENOENT;
	bpf_ct_release(ct);
	return true;
}

EC_INLINE bool nf_knows_own(struct __sk_buff *ctx, const struct tuple *tuple)
{
	struct tuple_v4 own = tuple_to_v4(tuple);

	return nf_knows(ctx, &own, tuple->proto);
}

EC_INLINE bool nf_knows_reversed(struct __sk_buff *ctx, const struct tuple *tuple)
{
	struct tuple_v4 reversed = tuple_to_v4_reversed(tuple);

	return nf_knows(ctx, &reversed, tuple->proto);
}

/*
 * What opens a flow is asked for by the tuple of its replies as well: sent
 * straight to a backend from a port that talks to it through its Service, it would
 * get that flow's replies, and netfilter must move it to another port.
 */
EC_INLINE bool nf_passes_flow(struct __sk_buff *ctx, const struct pkt *pkt, bool opening)
{
	if (nf_knows_own(ctx, &pkt->tuple))
		return false;
	return !opening || !nf_knows_reversed(ctx, &pkt->tuple);
}

/* An error goes the way of the packet inside, which came the other way. Nothing translates pings. */
EC_INLINE bool nf_passes_icmp(struct __sk_buff *ctx, const struct scratch *s)
{
	const struct tuple *inner = &s->inner.tuple;

	if (s->pkt.l4 != L4_ICMP_ERROR)
		return true;
	if (!icmp_parse_inner(ctx))
		return false;
	return inner->proto == IPPROTO_ICMP || !nf_knows_reversed(ctx, inner);
}

/*
 * Whether a packet between two pods may pass netfilter by. A flow that it knows is
 * translated there, or has walked the stack in one direction; were it to see no more
 * than that, the rules of many would drop what it calls invalid. Fragments and other
 * protocols are netfilter's to judge.
 */
EC_GLOBAL int nf_passes(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();

	if (!cfg.netfilter_nat)
		return true;
	if (!s || s->pkt.fragment != FRAGMENT_NONE || !pkt_parse_l4(ctx, &s->pkt))
		return false;
	switch (s->pkt.tuple.proto) {
	case IPPROTO_TCP:
		return nf_passes_flow(ctx, &s->pkt, flow_is_opening(&s->pkt));
	case IPPROTO_UDP:
		return nf_passes_flow(ctx, &s->pkt, true);
	case IPPROTO_ICMP:
		return nf_passes_icmp(ctx, s);
	}
	return false;
}

/* Whether netfilter knows a flow with this tuple, such as one that it masquerades itself. */
EC_INLINE bool nf_holds_port(struct __sk_buff *ctx, struct tuple_v4 *reply, __u8 proto)
{
	if (!cfg.netfilter_nat || proto == IPPROTO_ICMP)
		return false;
	return nf_knows(ctx, reply, proto);
}

#endif
