/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The IPv6 header and its extensions (RFC 8200), from arrival to the next hop, and the address ranges. */
#ifndef EC_LIB_IPV6_H
#define EC_LIB_IPV6_H

#include <linux/ipv6.h>

#include "bpf/lib/csum.h"
#include "bpf/lib/scratch.h"
#include "bpf/lib/verdict.h"

enum {
	IPV6_CHAIN = 8,        /* how many extension headers are read */
	IPV6_LEAST_MTU = 1280, /* what every link carries, in bytes (RFC 8200, section 5) */
	IPV6_MORE_FRAGMENTS = 0x0001,
	IPV6_FRAGMENT_OFFSET = 0xfff8,
	IPV6_JUMBO = 0xc204, /* type and length of the jumbo payload option (RFC 2675) */
};

/* The first word of an address, in host order. */
EC_INLINE __u32 ipv6_head(const struct addr *a)
{
	return bpf_ntohl(*(const __be32 *)a->bytes);
}

/* Whether the address lies in the prefix; none lies in one of length 0, which stands for no prefix. */
EC_INLINE bool ipv6_in(const struct addr *address, const struct addr *prefix, __u32 len)
{
	const __u64 *x = (const __u64 *)address->bytes, *y = (const __u64 *)prefix->bytes;
	__u64 high = bpf_be64_to_cpu(x[0] ^ y[0]), low = bpf_be64_to_cpu(x[1] ^ y[1]);

	if (len <= 64)
		return len && !(high >> (64 - len));
	return !high && !(low >> ((128 - len) & 63));
}

EC_INLINE bool ipv6_multicast(const struct addr *a)
{
	return a->bytes[0] == 0xff;
}

EC_INLINE bool ipv6_link_local(const struct addr *a)
{
	return ipv6_head(a) >> 22 == 0xfe80 >> 6;
}

/* Whether packets to the address stay on the link: link-local, or multicast of no wider scope (RFC 4291). */
EC_INLINE bool ipv6_of_link(const struct addr *a)
{
	return ipv6_link_local(a) || (ipv6_multicast(a) && (a->bytes[1] & 0x0f) <= 2);
}

/* Addresses that no host beyond the link can have: ::, ::1, multicast and link-local ones (RFC 6890). */
EC_INLINE bool ipv6_martian(const struct addr *a)
{
	const __u32 *w = (const __u32 *)a->bytes;

	return ipv6_multicast(a) || ipv6_link_local(a) || !(w[0] | w[1] | w[2] | (w[3] & ~bpf_htonl(1)));
}

EC_INLINE bool ipv6_is_extension(__u8 proto)
{
	return proto == IPPROTO_HOPOPTS || proto == IPPROTO_ROUTING || proto == IPPROTO_FRAGMENT ||
	       proto == IPPROTO_DSTOPTS || proto == IPPROTO_MH;
}

/* What every extension header begins with; a fragment header has no more. */
struct ipv6_extension {
	__u8 next;
	__u8 len; /* in units of 8 bytes, less one */
	__be16 fragment;
	__be32 id;
};

struct ipv6_walk {
	struct __sk_buff *ctx;
	struct chain *chain;
};

/*
 * Whether the hop-by-hop options are the jumbo payload option alone, which the kernel puts
 * into GSO packets that are too long for the header's length (BIG TCP), and takes out of
 * their segments again: no router sees it.
 */
EC_INLINE bool ipv6_is_jumbo(struct chain *c, const struct ipv6_extension *e)
{
	if (!c->may_be_jumbo || e->len || e->fragment != bpf_htons(IPV6_JUMBO) || e->next != IPPROTO_TCP)
		return false;
	c->jumbo = sizeof(*e);
	return true;
}

/* Reads one header: 1 ends the walk. */
static long ipv6_walk_step(__u32 i, struct ipv6_walk *w)
{
	struct chain *c = w->chain;
	struct ipv6_extension e;
	__u16 fragment;

	if (!ipv6_is_extension(c->next) || c->fragment == FRAGMENT_LATER)
		return 1;
	/* Hop-by-hop options come first, and no fragment is fragmented again. */
	if ((c->next == IPPROTO_HOPOPTS && i) || (c->next == IPPROTO_FRAGMENT && c->fragment) ||
	    c->off + sizeof(e) > c->end || bpf_skb_load_bytes(w->ctx, c->off, &e, sizeof(e))) {
		c->broken = 1;
		return 1;
	}
	if (c->next == IPPROTO_HOPOPTS && !ipv6_is_jumbo(c, &e))
		c->hop_by_hop = 1;
	c->off += sizeof(e);
	if (c->next == IPPROTO_FRAGMENT) {
		fragment = bpf_ntohs(e.fragment);
		c->id = bpf_ntohl(e.id);
		if (fragment & IPV6_FRAGMENT_OFFSET)
			c->fragment = FRAGMENT_LATER;
		else if (fragment & IPV6_MORE_FRAGMENTS)
			c->fragment = FRAGMENT_FIRST;
	} else {
		c->off += e.len * 8;
	}
	c->next = e.next;
	return 0;
}

/* Follows the chain in the scratch record to the transport header, or to the data of a later fragment. */
EC_GLOBAL enum verdict ipv6_follow(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();
	struct ipv6_walk w = {.ctx = ctx};

	if (!s)
		return -DROP_INVALID;
	w.chain = &s->chain;
	s->chain.id = 0;
	s->chain.fragment = FRAGMENT_NONE;
	s->chain.hop_by_hop = 0;
	s->chain.broken = 0;
	s->chain.jumbo = 0;
	bpf_loop(IPV6_CHAIN, ipv6_walk_step, &w, 0);
	if (s->chain.broken || s->chain.off > s->chain.end ||
	    (s->chain.fragment != FRAGMENT_LATER && ipv6_is_extension(s->chain.next)))
		return -DROP_EXTENSION_HEADERS;
	return VERDICT_GO_ON;
}

EC_INLINE enum verdict ipv6_parse_chain(struct __sk_buff *ctx, struct scratch *s)
{
	struct pkt *pkt = &s->pkt;
	enum verdict verdict;

	s->chain.off = pkt->l4_off;
	s->chain.end = IP_OFF + pkt->ip_len;
	s->chain.next = pkt->tuple.proto;
	s->chain.may_be_jumbo = ctx->gso_size && pkt->ip_len > 0xffff;
	verdict = ipv6_follow(ctx);
	if (verdict)
		return verdict;
	pkt->l4_off = s->chain.off;
	pkt->tuple.proto = s->chain.next;
	pkt->ip_id = s->chain.id;
	pkt->fragment = s->chain.fragment;
	pkt->options = s->chain.hop_by_hop;
	pkt->jumbo = s->chain.jumbo;
	return VERDICT_GO_ON;
}

/* Reads the headers: addresses, protocol, and what forwarding needs. The addresses are read unless it is INVALID. */
EC_INLINE enum verdict ipv6_parse(struct __sk_buff *ctx, struct scratch *s)
{
	struct pkt *pkt = &s->pkt;
	struct ipv6hdr *ip;

	pkt->family = FAMILY_IPV6;
	if (!pkt_linear(ctx, IP_OFF + sizeof(*ip)))
		return -DROP_INVALID;
	ip = (void *)(long)ctx->data + IP_OFF;
	if ((void *)(ip + 1) > (void *)(long)ctx->data_end)
		return -DROP_INVALID;
	pkt->ip_len = sizeof(*ip) + bpf_ntohs(ip->payload_len);
	/* A GSO packet larger than the field can say has 0 there (BIG TCP). */
	if (!ip->payload_len && ctx->gso_size)
		pkt->ip_len = ctx->len - IP_OFF;
	pkt->l4_off = IP_OFF + sizeof(*ip);
	pkt->tos = ip->priority << 4 | ip->flow_lbl[0] >> 4;
	pkt->ttl = ip->hop_limit;
	pkt->tuple.proto = ip->nexthdr;
	__builtin_memcpy(&pkt->tuple.src, &ip->saddr, sizeof(pkt->tuple.src));
	__builtin_memcpy(&pkt->tuple.dst, &ip->daddr, sizeof(pkt->tuple.dst));
	if (ip->version != 6 || pkt->ip_len > ctx->len - IP_OFF)
		return -DROP_INVALID;
	/* In the maps such an address would be that of IPv4. */
	if (addr_is_v4(&pkt->tuple.src) || addr_is_v4(&pkt->tuple.dst))
		return -DROP_INVALID;
	return ipv6_is_extension(pkt->tuple.proto) ? ipv6_parse_chain(ctx, s) : VERDICT_GO_ON;
}

/*
 * Changes an address in the header. No checksum there covers it, so a sum that the
 * device has computed of the whole packet follows here; the transport's does not.
 */
EC_INLINE enum verdict ipv6_rewrite(struct __sk_buff *ctx, enum end end, const struct addr *to)
{
	__u32 off = IP_OFF + (end == END_SOURCE ? offsetof(struct ipv6hdr, saddr) : offsetof(struct ipv6hdr, daddr));

	return bpf_skb_store_bytes(ctx, off, to, sizeof(*to), BPF_F_RECOMPUTE_CSUM) ? -DROP_WRITE_FAILED
										    : VERDICT_GO_ON;
}

/* The Ethernet header and what of the IPv6 header a router rewrites. */
struct ipv6_hop {
	__u8 macs[12];
	__be16 ethertype;
	__be16 start[3];
	__u8 proto;
	__u8 hop_limit;
};
_Static_assert(sizeof(struct ipv6_hop) == 22, "ipv6_hop mirrors the packet");

/* Decrements the hop limit, and writes the MACs unless NULL and the address that a rewrite left pending (rewrite.h). */
EC_CALL enum verdict ipv6_hop(struct __sk_buff *ctx, const struct pkt *pkt, const __u8 *macs)
{
	void *data = (void *)(long)ctx->data;
	struct ipv6_hop hop;

	if (data + sizeof(hop) > (void *)(long)ctx->data_end)
		return -DROP_INVALID;
	__builtin_memcpy(&hop, data, sizeof(hop));
	if (macs)
		__builtin_memcpy(hop.macs, macs, sizeof(hop.macs));
	hop.hop_limit--;
	if (bpf_skb_store_bytes(ctx, 0, &hop, sizeof(hop), 0))
		return -DROP_WRITE_FAILED;
	/* Does nothing unless the device has computed the sum of the whole packet. */
	bpf_csum_update(ctx, csum_growth(bpf_htons(0x0001), 0));
	return pkt->rewrite ? ipv6_rewrite(ctx, pkt->rewrite, &pkt->rewrite_to) : VERDICT_GO_ON;
}

#endif
