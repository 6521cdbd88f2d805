/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Answers a pod's TCP segment that belongs to no flow with a RST (RFC 9293, section
 * 3.10.7.1): the connection cannot go on, and its socket learns that at once.
 */
#ifndef EC_LIB_RESET_H
#define EC_LIB_RESET_H

#include "bpf/lib/allowance.h"
#include "bpf/lib/count.h"
#include "bpf/lib/ip.h"
#include "bpf/lib/nat.h"

/* A pod gets one RST in each interval, in ns. */
#define RESET_INTERVAL (NSEC_PER_SEC / 100)

/* How many bytes are cut out: more than lies before any TCP header but one behind long chains of IPv6. */
#define RESET_CUT 128

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

/*
 * Makes the frame so long, with no segments and no pending checksum. Of the helpers that
 * shorten a packet, only removing the bytes where a pending checksum starts clears it;
 * growing the packet drops a sum that the device has computed.
 */
EC_INLINE bool reset_resize(struct __sk_buff *ctx, __u32 frame)
{
	return !bpf_skb_change_tail(ctx, frame + RESET_CUT - 1, 0) && !bpf_skb_change_tail(ctx, frame + RESET_CUT, 0) &&
	       !bpf_skb_adjust_room(ctx, -RESET_CUT, BPF_ADJ_ROOM_MAC, 0);
}

EC_CALL bool reset_write_ipv4(struct __sk_buff *ctx, const struct pkt *pkt)
{
	struct iphdr ip = {
		.version = 4,
		.ihl = 5,
		.tot_len = bpf_htons(sizeof(ip) + sizeof(struct tcphdr)),
		.frag_off = bpf_htons(IP_DONT_FRAGMENT),
		.ttl = 64,
		.protocol = IPPROTO_TCP,
		.saddr = addr_v4(&pkt->tuple.dst),
		.daddr = addr_v4(&pkt->tuple.src),
	};

	ip.check = ~csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)&ip, sizeof(ip), 0));
	return !bpf_skb_store_bytes(ctx, IP_OFF, &ip, sizeof(ip), 0);
}

EC_CALL bool reset_write_ipv6(struct __sk_buff *ctx, const struct pkt *pkt)
{
	struct ipv6hdr ip = {
		.version = 6,
		.payload_len = bpf_htons(sizeof(struct tcphdr)),
		.nexthdr = IPPROTO_TCP,
		.hop_limit = 64,
	};

	__builtin_memcpy(&ip.saddr, &pkt->tuple.dst, sizeof(ip.saddr));
	__builtin_memcpy(&ip.daddr, &pkt->tuple.src, sizeof(ip.daddr));
	return !bpf_skb_store_bytes(ctx, IP_OFF, &ip, sizeof(ip), 0);
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

/* Turns the frame into a RST for the pod. */
EC_INLINE bool reset_write(struct __sk_buff *ctx, const struct pkt *pkt, const struct device *dev)
{
	bool six = pkt->family == FAMILY_IPV6;
	__u32 l4_off = IP_OFF + (six ? sizeof(struct ipv6hdr) : sizeof(struct iphdr));

	if (!reset_resize(ctx, l4_off + sizeof(struct tcphdr)))
		return false;
	if (!(six ? reset_write_ipv6(ctx, pkt) : reset_write_ipv4(ctx, pkt)) || !reset_write_tcp(ctx, pkt, l4_off))
		return false;
	/* pod_mac and host_mac are adjacent, in the order of the Ethernet header. */
	return !bpf_skb_store_bytes(ctx, 0, dev->pod_mac, 12, 0);
}

/* Answers a segment of the owner in the scratch record, if a RST is due. Returns a TC action. */
EC_GLOBAL int reset_answer(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();
	struct device *dev;

	if (!s || !reset_is_due(s))
		return EC_ACT_SHOT;
	dev = flow_owner(s->owner.ifindex);
	if (!dev || !allowance_take(dev, RESET_INTERVAL) || !reset_write(ctx, &s->pkt, dev))
		return EC_ACT_SHOT;
	return bpf_redirect(s->owner.ifindex, 0);
}

/* finish for programs that see what pods send: a segment that belongs to no flow may be answered. */
EC_INLINE int reset_or_finish(struct __sk_buff *ctx, enum direction direction, enum verdict verdict)
{
	if (verdict != -DROP_NO_MAPPING)
		return finish(ctx, direction, verdict);
	count_drop(ctx, direction, DROP_NO_MAPPING);
	return reset_answer(ctx);
}

#endif
