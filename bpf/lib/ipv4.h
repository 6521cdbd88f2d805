/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The IPv4 header, from arrival to the next hop, and the address ranges. */
#ifndef EC_LIB_IPV4_H
#define EC_LIB_IPV4_H

#include "bpf/lib/csum.h"
#include "bpf/lib/pkt.h"
#include "bpf/lib/verdict.h"

/* What the header's fragment field says (RFC 791). */
enum {
	IP_DONT_FRAGMENT = 0x4000,
	IP_MORE_FRAGMENTS = 0x2000,
	IP_FRAGMENT_OFFSET = 0x1fff,
};

/* Whether the address lies in the prefix; none lies in one of length 0, which stands for no prefix. */
EC_INLINE bool ipv4_in(__be32 address, const struct addr *prefix, __u32 len)
{
	__u32 mask = ~0U << ((32 - len) & 31);

	return len && !((address ^ addr_v4(prefix)) & bpf_htonl(mask));
}

/* Multicast, or the limited broadcast address: class D and above. */
EC_INLINE bool ipv4_multicast(__be32 address)
{
	return (bpf_ntohl(address) >> 28) >= 14;
}

/* Addresses that no host on a network can have: 0.0.0.0/8, 127.0.0.0/8, class D and above (RFC 6890). */
EC_INLINE bool ipv4_martian(__be32 address)
{
	__u32 first = bpf_ntohl(address) >> 24;

	return first == 0 || first == 127 || first >= 224;
}

/*
 * Reads the header: addresses, protocol, and what forwarding needs. False: malformed
 * or truncated.
 */
EC_INLINE bool ipv4_parse(struct __sk_buff *ctx, struct pkt *pkt)
{
	struct iphdr *ip;
	__u32 header;
	__u16 frag;

	if (!pkt_linear(ctx, IP_OFF + sizeof(*ip)))
		return false;
	ip = (void *)(long)ctx->data + IP_OFF;
	if ((void *)(ip + 1) > (void *)(long)ctx->data_end)
		return false;
	header = ip->ihl * 4;
	pkt->ip_len = bpf_ntohs(ip->tot_len);
	/* A GSO packet larger than the field can say has 0 there (BIG TCP). */
	if (!pkt->ip_len && ctx->gso_size)
		pkt->ip_len = ctx->len - IP_OFF;
	if (ip->version != 4 || header < sizeof(*ip) || pkt->ip_len < header || pkt->ip_len > ctx->len - IP_OFF)
		return false;
	frag = bpf_ntohs(ip->frag_off);
	if (frag & IP_FRAGMENT_OFFSET)
		pkt->fragment = FRAGMENT_LATER;
	else if (frag & IP_MORE_FRAGMENTS)
		pkt->fragment = FRAGMENT_FIRST;
	pkt->options = header > sizeof(*ip);
	pkt->l4_off = IP_OFF + header;
	pkt->ip_id = bpf_ntohs(ip->id);
	pkt->tos = ip->tos;
	pkt->ttl = ip->ttl;
	pkt->tuple.proto = ip->protocol;
	addr_set_v4(&pkt->tuple.src, ip->saddr);
	addr_set_v4(&pkt->tuple.dst, ip->daddr);
	return true;
}

/* Whether the header's checksum is right. */
EC_INLINE bool ipv4_sum_right(const struct __sk_buff *ctx)
{
	const __u32 *word = (void *)(long)ctx->data + IP_OFF;
	__u64 sum;

	if ((void *)(word + 5) > (void *)(long)ctx->data_end)
		return false;
	sum = (__u64)word[0] + word[1] + word[2] + word[3] + word[4];
	return csum_fold((sum & 0xffff) + (sum >> 16)) == 0xffff;
}

/*
 * ipv4_parse for a packet that arrives. Its header checksum is verified, as nobody else
 * does that when the stack is bypassed; packets with options go to the stack (fwd.h),
 * which verifies theirs.
 */
EC_INLINE bool ipv4_parse_arrived(struct __sk_buff *ctx, struct pkt *pkt)
{
	return ipv4_parse(ctx, pkt) && (pkt->options || ipv4_sum_right(ctx));
}

/* Changes an address in the header, and the header checksum. */
EC_INLINE enum verdict ipv4_rewrite(struct __sk_buff *ctx, enum end end, __be32 from, __be32 to)
{
	__u32 off = IP_OFF + (end == END_SOURCE ? offsetof(struct iphdr, saddr) : offsetof(struct iphdr, daddr));

	if (bpf_l3_csum_replace(ctx, IP_OFF + offsetof(struct iphdr, check), from, to, sizeof(to)) ||
	    bpf_skb_store_bytes(ctx, off, &to, sizeof(to), 0))
		return -DROP_WRITE_FAILED;
	return VERDICT_GO_ON;
}

/* The Ethernet header and the IPv4 header without options: what a router rewrites. */
struct ipv4_hop {
	__u8 macs[12];
	__be16 ethertype;
	__be16 ip_start[4];
	__u8 ttl;
	__u8 proto;
	__be16 check;
	__be16 source[2]; /* in two halves, for their alignment */
	__be16 destination[2];
};
_Static_assert(sizeof(struct ipv4_hop) == 34, "ipv4_hop mirrors the packet");

/* Replaces an address if it changes, and returns by how much the header's sum grows. */
EC_INLINE __u32 ipv4_hop_address(__be16 half[2], bool changes, __be32 to)
{
	__u32 growth;

	if (!changes)
		return 0;
	growth = csum_growth(half[0], to & 0xffff) + csum_growth(half[1], to >> 16);
	half[0] = to;
	half[1] = to >> 16;
	return growth;
}

/*
 * Decrements the TTL, and writes the MACs unless NULL, the address that a rewrite left
 * pending (rewrite.h), and the header checksum.
 */
EC_CALL enum verdict ipv4_hop(struct __sk_buff *ctx, const struct pkt *pkt, const __u8 *macs)
{
	void *data = (void *)(long)ctx->data;
	struct ipv4_hop hop;
	__u32 growth;

	if (data + sizeof(hop) > (void *)(long)ctx->data_end)
		return -DROP_INVALID;
	__builtin_memcpy(&hop, data, sizeof(hop));
	if (macs)
		__builtin_memcpy(hop.macs, macs, sizeof(hop.macs));
	hop.ttl--;
	growth = csum_growth(bpf_htons(0x0100), 0);
	growth += ipv4_hop_address(hop.source, pkt->rewrite == END_SOURCE, addr_v4(&pkt->rewrite_to));
	growth += ipv4_hop_address(hop.destination, pkt->rewrite == END_DESTINATION, addr_v4(&pkt->rewrite_to));
	hop.check = csum_grown(hop.check, growth);
	return bpf_skb_store_bytes(ctx, 0, &hop, sizeof(hop), 0) ? -DROP_WRITE_FAILED : VERDICT_GO_ON;
}

#endif
