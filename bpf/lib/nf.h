/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Beside netfilter's NAT (cfg.netfilter_nat): flows to other addresses that
 * kube-proxy, portmap or anyone's rules translate to pods must meet netfilter in
 * both directions. Its connection table
 * knows which flows those are; the kernel lets programs ask (bpf_skb_ct_lookup,
 * Linux 5.18, of the module nf_conntrack), for TCP and UDP.
 */
#ifndef EC_LIB_NF_H
#define EC_LIB_NF_H

#include "bpf/lib/flow.h"
#include "bpf/lib/icmp.h"

/* enum ip_conntrack_status, include/uapi/linux/netfilter/nf_conntrack_common.h: an address or a port was changed. */
#define NF_TRANSLATED (1 << 4 | 1 << 5)

/* The part of the kernel's records that is read here. */
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

enum nf_seen {
	NF_UNKNOWN, /* netfilter has no such flow */
	NF_PLAIN,
	NF_NAT, /* it changes the flow's addresses or ports */
};

/* What netfilter knows of a TCP or UDP flow by the tuple of either direction. */
EC_CALL enum nf_seen nf_lookup(struct __sk_buff *ctx, struct tuple_v4 *tuple, __u8 proto)
{
	struct nf_options options = {.netns_id = -1, .l4proto = proto};
	enum nf_seen seen = NF_PLAIN;
	struct nf_conn *ct;

	ct = bpf_skb_ct_lookup(ctx, (void *)tuple, sizeof(*tuple), &options, sizeof(options));
	/* Any other error is no answer: what may be translated is netfilter's. */
	if (!ct)
		return options.error == -EC_ENOENT ? NF_UNKNOWN : NF_NAT;
	if (ct->status & NF_TRANSLATED)
		seen = NF_NAT;
	bpf_ct_release(ct);
	return seen;
}

EC_INLINE enum nf_seen nf_lookup_own(struct __sk_buff *ctx, const struct tuple *tuple)
{
	struct tuple_v4 own = tuple_to_v4(tuple);

	return nf_lookup(ctx, &own, tuple->proto);
}

EC_INLINE enum nf_seen nf_lookup_reversed(struct __sk_buff *ctx, const struct tuple *tuple)
{
	struct tuple_v4 reversed = tuple_to_v4_reversed(tuple);

	return nf_lookup(ctx, &reversed, tuple->proto);
}

/*
 * A SYN is asked for by the tuple of its replies as well: one sent straight to a
 * backend from a port that talks to it through its Service would get that
 * connection's replies, and netfilter must move it to another port.
 */
EC_INLINE bool nf_passes_tcp(struct __sk_buff *ctx, const struct pkt *pkt)
{
	if (nf_lookup_own(ctx, &pkt->tuple) == NF_NAT)
		return false;
	return !flow_is_opening(pkt) || nf_lookup_reversed(ctx, &pkt->tuple) != NF_NAT;
}

/* A datagram of a flow that netfilter has not seen may open one, like a SYN. */
EC_INLINE bool nf_passes_udp(struct __sk_buff *ctx, const struct pkt *pkt)
{
	enum nf_seen seen = nf_lookup_own(ctx, &pkt->tuple);

	if (seen == NF_UNKNOWN)
		seen = nf_lookup_reversed(ctx, &pkt->tuple);
	return seen != NF_NAT;
}

/* An error goes the way of the packet inside, which came the other way. Nothing translates pings. */
EC_INLINE bool nf_passes_icmp(struct __sk_buff *ctx, const struct pkt *pkt)
{
	struct inner inner = {};

	if (pkt->l4 != L4_ICMP_ERROR)
		return true;
	if (!icmp_parse_inner(ctx, pkt, &inner))
		return false;
	return inner.tuple.proto == IPPROTO_ICMP || nf_lookup_reversed(ctx, &inner.tuple) != NF_NAT;
}

/*
 * Whether a packet between two pods may pass netfilter by: nothing there
 * translates its flow. Fragments and other protocols are netfilter's to judge.
 */
EC_CALL bool nf_passes(struct __sk_buff *ctx, struct pkt *pkt)
{
	if (!cfg.netfilter_nat)
		return true;
	if (pkt->fragment != FRAGMENT_NONE || !pkt_parse_l4(ctx, pkt))
		return false;
	switch (pkt->tuple.proto) {
	case IPPROTO_TCP:
		return nf_passes_tcp(ctx, pkt);
	case IPPROTO_UDP:
		return nf_passes_udp(ctx, pkt);
	case IPPROTO_ICMP:
		return nf_passes_icmp(ctx, pkt);
	}
	return false;
}

/* Whether netfilter knows a flow with this tuple, such as one that it masquerades itself. */
EC_INLINE bool nf_holds_port(struct __sk_buff *ctx, struct tuple_v4 *reply, __u8 proto)
{
	if (!cfg.netfilter_nat || proto == IPPROTO_ICMP)
		return false;
	return nf_lookup(ctx, reply, proto) != NF_UNKNOWN;
}

#endif
