/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Parsing. struct pkt holds offsets and values, never pointers into the packet:
 * helpers that change a packet invalidate those.
 */
#ifndef EC_LIB_PKT_H
#define EC_LIB_PKT_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/tcp.h>
#include <linux/udp.h>

#include "bpf/lib/compiler.h"
#include "maps/wire/wire.h"

/* What an IPv4 header's fragment field says (RFC 791). */
enum {
	IP_MORE_FRAGMENTS = 0x2000,
	IP_FRAGMENT_OFFSET = 0x1fff,
};

enum fragment_kind {
	FRAGMENT_NONE,
	FRAGMENT_FIRST,
	FRAGMENT_LATER, /* carries no transport header */
};

enum l4_kind {
	L4_UNKNOWN,    /* a protocol without ports that we know */
	L4_FLOW,       /* TCP, UDP, ICMP echo: the tuple has its ports */
	L4_ICMP_ERROR, /* speaks of the flow of the packet inside it */
};

enum tcp_flag {
	TCP_FIN = 0x01,
	TCP_SYN = 0x02,
	TCP_RST = 0x04,
	TCP_ACK = 0x10,
};

enum end {
	END_SOURCE = 1,
	END_DESTINATION,
};

struct pkt {
	struct tuple tuple;
	__u32 l4_off;
	__u32 ip_len; /* of the whole IP packet, in bytes */
	__u32 seq;    /* TCP, host order */
	__u32 ack;
	__u32 seq_end; /* sequence number after this segment */
	__u16 ip_id;
	__u8 ttl;
	__u8 options;  /* IP options are present */
	__u8 fragment; /* enum fragment_kind */
	__u8 l4;       /* enum l4_kind */
	__u8 tcp_flags;
	__u8 icmp_type;
	__u8 rewrite; /* enum end of the address that is still to be rewritten (rewrite.h), or 0 */
	__be32 rewrite_to;
};

enum pkt_offset {
	IP_OFF = ETH_HLEN,
	IP_TTL_OFF = ETH_HLEN + offsetof(struct iphdr, ttl),
	IP_SADDR_OFF = ETH_HLEN + offsetof(struct iphdr, saddr),
	IP_DADDR_OFF = ETH_HLEN + offsetof(struct iphdr, daddr),
};

/* The IPv4 address in an address of either family. */
EC_INLINE __be32 addr_v4(const struct addr *a)
{
	return *(const __be32 *)&a->bytes[12];
}

EC_INLINE void addr_set_v4(struct addr *a, __be32 v4)
{
	__u32 *w = (__u32 *)a->bytes;

	w[0] = 0;
	w[1] = 0;
	w[2] = bpf_htonl(0x0000ffff);
	w[3] = v4;
}

EC_INLINE bool addr_equal(const struct addr *a, const struct addr *b)
{
	const __u32 *x = (const __u32 *)a->bytes, *y = (const __u32 *)b->bytes;

	return x[3] == y[3] && x[2] == y[2] && x[1] == y[1] && x[0] == y[0];
}

EC_INLINE bool addr_is_zero(const struct addr *a)
{
	const __u32 *w = (const __u32 *)a->bytes;

	return !(w[0] | w[1] | w[2] | w[3]);
}

/* Whether the IPv4 address lies in the prefix; len counts IPv4 bits. */
EC_INLINE bool addr_v4_in(__be32 v4, const struct addr *prefix, __u32 len)
{
	__u32 mask = len ? ~0U << ((32 - len) & 31) : 0;

	return !addr_is_zero(prefix) && !((v4 ^ addr_v4(prefix)) & bpf_htonl(mask));
}

/* Multicast, or the limited broadcast address: class D and above. */
EC_INLINE bool addr_v4_multicast(__be32 v4)
{
	return (bpf_ntohl(v4) >> 28) >= 14;
}

/* What no host on a wire has: 0.0.0.0/8, 127.0.0.0/8, class D and above (RFC 6890). */
EC_INLINE bool addr_v4_martian(__be32 v4)
{
	__u32 first = bpf_ntohl(v4) >> 24;

	return first == 0 || first == 127 || first >= 224;
}

EC_INLINE struct tuple tuple_reversed(const struct tuple *t)
{
	struct tuple r = {
		.src = t->dst,
		.dst = t->src,
		.sport = t->dport,
		.dport = t->sport,
		.proto = t->proto,
	};

	return r;
}

/* A tuple as the kernel's lookups take it for IPv4: what struct bpf_sock_tuple, three times as large, begins with. */
struct tuple_v4 {
	__be32 src;
	__be32 dst;
	__be16 sport;
	__be16 dport;
};

EC_INLINE struct tuple_v4 tuple_to_v4(const struct tuple *t)
{
	struct tuple_v4 v4 = {
		.src = addr_v4(&t->src),
		.dst = addr_v4(&t->dst),
		.sport = t->sport,
		.dport = t->dport,
	};

	return v4;
}

EC_INLINE struct tuple_v4 tuple_to_v4_reversed(const struct tuple *t)
{
	struct tuple r = tuple_reversed(t);

	return tuple_to_v4(&r);
}

/*
 * Whether the frame belongs to a VLAN and so to another network than its
 * interface's own. The kernel has taken the tag off the packet; identifier 0 only
 * gives a priority (IEEE 802.1Q).
 */
EC_INLINE bool pkt_in_vlan(const struct __sk_buff *ctx)
{
	return ctx->vlan_present && (ctx->vlan_tci & 0x0fff);
}

/* Makes the first len bytes readable in the linear part; false: the packet is shorter. */
EC_INLINE bool pkt_linear(struct __sk_buff *ctx, __u32 len)
{
	if ((void *)(long)ctx->data + len <= (void *)(long)ctx->data_end)
		return true;
	if (ctx->len < len)
		return false;
	return !bpf_skb_pull_data(ctx, len);
}

/*
 * Reads the IPv4 header: addresses, protocol, what must be known to forward.
 * False: malformed or truncated.
 */
EC_INLINE bool pkt_parse_ip(struct __sk_buff *ctx, struct pkt *pkt)
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
	pkt->ttl = ip->ttl;
	pkt->tuple.proto = ip->protocol;
	addr_set_v4(&pkt->tuple.src, ip->saddr);
	addr_set_v4(&pkt->tuple.dst, ip->daddr);
	return true;
}

/* Whether the sum over the IPv4 header, its checksum included, is right (RFC 1071). */
EC_INLINE bool pkt_ip_sum_right(const struct __sk_buff *ctx)
{
	const __u32 *word = (void *)(long)ctx->data + IP_OFF;
	__u64 sum;

	if ((void *)(word + 5) > (void *)(long)ctx->data_end)
		return false;
	sum = (__u64)word[0] + word[1] + word[2] + word[3] + word[4];
	sum = (sum & 0xffff) + ((sum >> 16) & 0xffff) + (sum >> 32);
	return (sum & 0xffff) + (sum >> 16) == 0xffff;
}

/*
 * pkt_parse_ip of a packet that arrives: its header's checksum must be right, for
 * where the stack is passed by nobody else looks. What has options is the stack's
 * (fwd.h), and so is their checksum.
 */
EC_INLINE bool pkt_parse_arrived(struct __sk_buff *ctx, struct pkt *pkt)
{
	return pkt_parse_ip(ctx, pkt) && (pkt->options || pkt_ip_sum_right(ctx));
}

EC_INLINE bool icmp_is_error(__u8 type)
{
	return type == ICMP_DEST_UNREACH || type == ICMP_SOURCE_QUENCH || type == ICMP_REDIRECT ||
	       type == ICMP_TIME_EXCEEDED || type == ICMP_PARAMETERPROB;
}

/* The start of the transport header. False: the IP packet is shorter, whatever follows it in the frame. */
EC_INLINE bool pkt_load_l4(struct __sk_buff *ctx, const struct pkt *pkt, void *to, __u32 len)
{
	return pkt->l4_off - IP_OFF + len <= pkt->ip_len && !bpf_skb_load_bytes(ctx, pkt->l4_off, to, len);
}

/* Whether flows of the protocol have ports, or an identifier, that can be rewritten. */
EC_INLINE bool pkt_proto_known(__u8 proto)
{
	return proto == IPPROTO_TCP || proto == IPPROTO_UDP || proto == IPPROTO_ICMP;
}

EC_INLINE bool pkt_parse_tcp(struct __sk_buff *ctx, struct pkt *pkt)
{
	struct tcphdr tcp;
	__u32 header, ip_header = pkt->l4_off - IP_OFF;

	if (!pkt_load_l4(ctx, pkt, &tcp, sizeof(tcp)))
		return false;
	header = tcp.doff * 4;
	/* Only a first fragment may hold less than its header says. */
	if (header < sizeof(tcp) || (pkt->fragment == FRAGMENT_NONE && ip_header + header > pkt->ip_len))
		return false;
	pkt->tuple.sport = tcp.source;
	pkt->tuple.dport = tcp.dest;
	pkt->tcp_flags = ((__u8 *)&tcp)[13];
	pkt->seq = bpf_ntohl(tcp.seq);
	pkt->ack = bpf_ntohl(tcp.ack_seq);
	pkt->seq_end = pkt->seq + tcp.syn + tcp.fin;
	if (pkt->ip_len > ip_header + header)
		pkt->seq_end += pkt->ip_len - ip_header - header;
	pkt->l4 = L4_FLOW;
	return true;
}

EC_INLINE bool pkt_parse_icmp(struct __sk_buff *ctx, struct pkt *pkt)
{
	struct icmp_header icmp;

	if (!pkt_load_l4(ctx, pkt, &icmp, sizeof(icmp)))
		return false;
	pkt->icmp_type = icmp.type;
	if (icmp.type == ICMP_ECHO) {
		pkt->tuple.sport = icmp.id;
		pkt->l4 = L4_FLOW;
	} else if (icmp.type == ICMP_ECHOREPLY) {
		pkt->tuple.dport = icmp.id;
		pkt->l4 = L4_FLOW;
	} else if (icmp_is_error(icmp.type)) {
		pkt->l4 = L4_ICMP_ERROR;
	}
	return true;
}

/*
 * Reads the transport header of a packet that has one. False: malformed or
 * truncated; a protocol that we do not know is L4_UNKNOWN.
 */
EC_INLINE bool pkt_parse_l4(struct __sk_buff *ctx, struct pkt *pkt)
{
	struct udphdr udp;

	if (pkt->fragment == FRAGMENT_LATER)
		return true;
	switch (pkt->tuple.proto) {
	case IPPROTO_TCP:
		return pkt_parse_tcp(ctx, pkt);
	case IPPROTO_ICMP:
		return pkt_parse_icmp(ctx, pkt);
	case IPPROTO_UDP:
		if (!pkt_load_l4(ctx, pkt, &udp, sizeof(udp)))
			return false;
		pkt->tuple.sport = udp.source;
		pkt->tuple.dport = udp.dest;
		pkt->l4 = L4_FLOW;
	}
	return true;
}

/*
 * Whether the packet, or each segment of a GSO packet, fits an MTU (bytes of
 * IP packet).
 */
EC_INLINE bool pkt_fits(struct __sk_buff *ctx, const struct pkt *pkt, __u32 mtu)
{
	__u32 headers = pkt->l4_off - IP_OFF + sizeof(struct udphdr);
	__u8 doff;

	if (!ctx->gso_size)
		return pkt->ip_len <= mtu;
	if (pkt->tuple.proto == IPPROTO_TCP) {
		if (bpf_skb_load_bytes(ctx, pkt->l4_off + 12, &doff, sizeof(doff)))
			return false;
		headers = pkt->l4_off - IP_OFF + (doff >> 4) * 4;
	}
	return headers + ctx->gso_size <= mtu;
}

#endif
