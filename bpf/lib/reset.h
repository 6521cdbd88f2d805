/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Answers a TCP segment, a pod's or to a Service, with a RST (RFC 9293, section 3.10.7.1): its connection
 * cannot begin or go on, and its socket learns that at once.
 */
#ifndef EC_LIB_RESET_H
#define EC_LIB_RESET_H

#include "bpf/lib/answer.h"
#include "bpf/lib/nat.h"
#include "bpf/lib/service.h"

/* A TCP header behind its pseudo header, which adds up to the same in either family. */
struct reset_tcp {
	struct addr src;
	struct addr dst;
	__be32 len;
	__be32 proto;
	struct tcphdr tcp;
};

/*
 * Whether there is certainly no flow. There may be one while flow tables are being
 * moved, or if there is an entry that just cannot be used: then no RST is sent.
 */
EC_INLINE bool reset_is_due(struct scratch *s)
{
	const struct config *config = config_get();
	const struct conntrack_entry *recorded;
	const struct snat_entry *half;
	const struct pkt *pkt = &s->pkt;

	if (!config || (config->flags & CONFIG_FLOWS_MOVE))
		return false;
	if (pkt->l4 != L4_FLOW || pkt->tuple.proto != IPPROTO_TCP || pkt->fragment != FRAGMENT_NONE)
		return false;
	if (pkt->tcp_flags & (TCP_SYN | TCP_RST))
		return false;
	recorded = bpf_map_lookup_elem(&conntrack, &pkt->tuple);
	if (recorded && recorded->ifindex == s->owner.ifindex)
		return false;
	half = bpf_map_lookup_elem(&snat, &pkt->tuple);
	if (half && half->ifindex == s->owner.ifindex)
		return false;
	s->key = nat_reverse_key(&pkt->tuple, &s->owner.address, pkt->tuple.sport);
	half = bpf_map_lookup_elem(&snat_reverse, &s->key);
	return !half || !nat_names(half, &pkt->tuple, s->owner.ifindex);
}

EC_CALL bool reset_write_tcp(struct __sk_buff *ctx, const struct pkt *pkt, __u32 off)
{
	struct reset_tcp l4 = {
		.src = pkt->tuple.dst,
		.dst = pkt->tuple.src,
		.proto = bpf_htonl(IPPROTO_TCP),
		.len = bpf_htonl(sizeof(struct tcphdr)),
		.tcp = {.source = pkt->tuple.dport, .dest = pkt->tuple.sport, .doff = 5, .rst = 1},
	};

	if (pkt->tcp_flags & TCP_ACK) {
		l4.tcp.seq = bpf_htonl(pkt->ack);
	} else {
		l4.tcp.ack = 1;
		l4.tcp.ack_seq = bpf_htonl(pkt->seq_end);
	}
	l4.tcp.check = ~csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)&l4, sizeof(l4), 0));
	return !bpf_skb_store_bytes(ctx, off, &l4.tcp, sizeof(l4.tcp), 0);
}

/* Turns the segment into the RST that its destination would send. */
EC_CALL bool reset_turn(struct __sk_buff *ctx, const struct scratch *s)
{
	return answer_begin(ctx, &s->pkt, &s->pkt.tuple.dst, IPPROTO_TCP, sizeof(struct tcphdr)) &&
	       reset_write_tcp(ctx, &s->pkt, answer_l4_off(&s->pkt));
}

/*
 * Answers a segment of the owner in the scratch record that belongs to no flow, if a RST is due. Returns a TC action.
 */
EC_GLOBAL int reset_answer(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();
	struct device *dev;

	if (!s || !reset_is_due(s))
		return EC_ACT_SHOT;
	dev = answer_to(s, ANSWER_BURST);
	if (!dev || service_undo(ctx, s) || !reset_turn(ctx, s))
		return EC_ACT_SHOT;
	return answer_send(ctx, s, dev);
}

#endif
