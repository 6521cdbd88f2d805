/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Neighbour discovery (RFC 4861) from a pod: a solicitation for the gateway is answered
 * here. Nothing else of the link alone leaves a pod, since no other pod shares its link.
 */
#ifndef EC_LIB_ND_H
#define EC_LIB_ND_H

#include "bpf/lib/ip.h"

enum {
	ND_HOP_LIMIT = 255,   /* nobody has forwarded the packet */
	ND_OPTION_TARGET = 2, /* link-layer address of the target */
	ND_ADVERTISED = 0xe0, /* by a router, as solicited, and overriding what was known */
};

/* A solicitation or an advertisement, with the one option that both may have. */
struct nd_message {
	struct icmp_header icmp; /* its last four bytes are flags and reserved */
	struct addr target;
	__u8 option;
	__u8 option_len; /* in units of 8 bytes */
	__u8 mac[6];
};
_Static_assert(sizeof(struct nd_message) == 32, "nd_message mirrors the packet");

enum {
	ND_LEN = sizeof(struct nd_message),
	ND_BARE_LEN = offsetof(struct nd_message, option),
	ND_OFF = IP_OFF + sizeof(struct ipv6hdr),
};

/* A message behind its pseudo header. */
struct nd_sum {
	struct addr src;
	struct addr dst;
	__be32 len;
	__be32 proto;
	struct nd_message message;
};

/* fe80::1, which is the gateway of every pod and the address of nobody else. */
EC_INLINE bool nd_is_gateway(const struct addr *a)
{
	const __u32 *w = (const __u32 *)a->bytes;

	return w[0] == bpf_htonl(0xfe800000) && !(w[1] | w[2]) && w[3] == bpf_htonl(1);
}

/* The gateway itself, or its solicited-node address (RFC 4291, section 2.7.1). */
EC_INLINE bool nd_reaches_gateway(const struct addr *a)
{
	const __u32 *w = (const __u32 *)a->bytes;

	return nd_is_gateway(a) ||
	       (w[0] == bpf_htonl(0xff020000) && !w[1] && w[2] == bpf_htonl(1) && w[3] == bpf_htonl(0xff000001));
}

/* The checksum of a message of so many bytes; 0 if the message has the right one. */
EC_INLINE __u16 nd_checksum(struct nd_sum *sum, __u32 len)
{
	sum->len = bpf_htonl(len);
	sum->proto = bpf_htonl(IPPROTO_ICMPV6);
	return ~csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)sum, sizeof(*sum), 0));
}

/* Reads a packet that may be a solicitation for the gateway; what is not there of the option is zero. */
EC_INLINE bool nd_read(struct __sk_buff *ctx, const struct pkt *pkt, struct nd_sum *sum, __u32 len)
{
	if (pkt->tuple.proto != IPPROTO_ICMPV6 || pkt->ttl != ND_HOP_LIMIT || pkt->l4_off != ND_OFF)
		return false;
	if (len == ND_LEN)
		return !bpf_skb_load_bytes(ctx, ND_OFF, &sum->message, ND_LEN);
	return len == ND_BARE_LEN && !bpf_skb_load_bytes(ctx, ND_OFF, &sum->message, ND_BARE_LEN);
}

/* Whether the pod solicits the gateway as section 7.1.1 wants it: not while it looks for duplicates, from :: */
EC_INLINE bool nd_asks_for_gateway(const struct pkt *pkt, struct nd_sum *sum, __u32 len)
{
	const struct nd_message *m = &sum->message;

	if (m->icmp.type != ICMPV6_NEIGHBOUR_SOLICITATION || m->icmp.code || !nd_is_gateway(&m->target) ||
	    !nd_reaches_gateway(&pkt->tuple.dst))
		return false;
	if (len == ND_LEN && m->option_len != 1)
		return false;
	sum->src = pkt->tuple.src;
	sum->dst = pkt->tuple.dst;
	return !nd_checksum(sum, len);
}

/* Writes the advertisement over the solicitation; to is who has asked. */
EC_INLINE enum verdict nd_write(struct __sk_buff *ctx, const struct device *dev, struct nd_sum *sum,
				const struct addr *to)
{
	struct nd_message *m = &sum->message;
	__be16 payload = bpf_htons(ND_LEN);
	__u8 macs[12];

	sum->src = m->target;
	sum->dst = *to;
	__builtin_memset(&m->icmp, 0, sizeof(m->icmp));
	m->icmp.type = ICMPV6_NEIGHBOUR_ADVERTISEMENT;
	m->icmp.id = bpf_htons(ND_ADVERTISED << 8);
	m->option = ND_OPTION_TARGET;
	m->option_len = 1;
	__builtin_memcpy(m->mac, dev->host_mac, sizeof(m->mac));
	m->icmp.checksum = nd_checksum(sum, ND_LEN);
	if (bpf_skb_load_bytes(ctx, ETH_ALEN, macs, ETH_ALEN))
		return -DROP_INVALID;
	__builtin_memcpy(macs + ETH_ALEN, dev->host_mac, ETH_ALEN);
	/* The addresses are adjacent, in the order of the IPv6 header. */
	if (bpf_skb_change_tail(ctx, ND_OFF + ND_LEN, 0) || bpf_skb_store_bytes(ctx, 0, macs, sizeof(macs), 0) ||
	    bpf_skb_store_bytes(ctx, IP_OFF + offsetof(struct ipv6hdr, payload_len), &payload, sizeof(payload), 0) ||
	    bpf_skb_store_bytes(ctx, IP_OFF + offsetof(struct ipv6hdr, saddr), &sum->src, 2 * sizeof(*to), 0) ||
	    bpf_skb_store_bytes(ctx, ND_OFF, m, ND_LEN, 0))
		return -DROP_WRITE_FAILED;
	return VERDICT_GO_ON;
}

/* What the pod sends to its link: a solicitation for the gateway, from an address that it has, is answered. */
EC_CALL enum verdict nd_answer(struct __sk_buff *ctx, const struct device *dev, const struct pkt *pkt)
{
	const struct addr *from = &pkt->tuple.src;
	__u32 len = pkt->ip_len - sizeof(struct ipv6hdr);
	struct nd_sum sum = {};
	enum verdict verdict;

	if (addr_is_zero(&dev->addresses[FAMILY_IPV6]) ||
	    !(ipv6_link_local(from) || addr_equal(from, &dev->addresses[FAMILY_IPV6])))
		return -DROP_LINK_SCOPE;
	if (!nd_read(ctx, pkt, &sum, len) || !nd_asks_for_gateway(pkt, &sum, len))
		return -DROP_LINK_SCOPE;
	verdict = nd_write(ctx, dev, &sum, from);
	if (verdict)
		return verdict;
	bpf_redirect(ctx->ifindex, 0);
	return VERDICT_ANSWERED;
}

#endif
