/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Parsing. struct pkt holds offsets and values, never pointers into the packet, which
 * helpers that change the packet invalidate.
 */
#ifndef EC_LIB_PKT_H
#define EC_LIB_PKT_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/tcp.h>
#include <linux/udp.h>

#include "bpf/lib/addr.h"
#include "bpf/lib/frag.h"
#include "bpf/lib/verdict.h"

enum fragment_kind {
	FRAGMENT_NONE,
	FRAGMENT_FIRST,
	FRAGMENT_LATER, /* carries no transport header */
};

enum l4_kind {
	L4_UNREAD,     /* no step has needed it yet */
	L4_UNKNOWN,    /* no ports: another protocol, or a later fragment */
	L4_FLOW,       /* TCP, UDP, ICMP echo: the ports are in the tuple */
	L4_ICMP_ERROR, /* belongs to the flow of the packet that it quotes */
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
	__u32 l4_off;  /* of the transport header, in bytes from the start of the frame */
	__u32 ip_len;  /* of the whole IP packet, in bytes */
	__u32 seq;     /* TCP, host order, as are the next two */
	__u32 ack;     /* acknowledgement number */
	__u32 seq_end; /* sequence number after this segment */
	__u32 ip_id;   /* of fragments, host order */
	__u8 ttl;
	__u8 options;   /* routers have to look at IP options, or at hop-by-hop options of IPv6 */
	__u8 family;    /* enum family */
	__u8 fragment;  /* enum fragment_kind */
	__u8 l4;        /* enum l4_kind */
	__u8 tcp_flags; /* enum tcp_flag */
	__u8 icmp_type;
	__u8 tos;
	__u8 no_sum;            /* UDP without a checksum */
	__u8 jumbo;             /* length of the kernel's own jumbo option, which no segment has (ipv6.h) */
	__u8 rewrite;           /* enum end of an address still to be rewritten (rewrite.h), or 0 */
	struct addr rewrite_to; /* and its new value, which is valid only then */
};

/* Offset of the IP header. */
#define IP_OFF ETH_HLEN

/*
 * Whether the frame belongs to a VLAN, and so to another network than its interface.
 * The kernel has removed the tag from the packet. Identifier 0 only carries a priority
 * (IEEE 802.1Q).
 */
EC_INLINE bool pkt_in_vlan(const struct __sk_buff *ctx)
{
	return ctx->vlan_present && (ctx->vlan_tci & 0x0fff);
}

/* Makes the first len bytes readable directly; false: the packet is shorter. */
EC_INLINE bool pkt_linear(struct __sk_buff *ctx, __u32 len)
{
	if ((void *)(long)ctx->data + len <= (void *)(long)ctx->data_end)
		return true;
	if (ctx->len < len)
		return false;
	return !bpf_skb_pull_data(ctx, len);
}

EC_INLINE bool pkt_is_icmp_error(__u8 family, __u8 type)
{
	if (family == FAMILY_IPV6)
		return type >= ICMPV6_UNREACHABLE && type <= ICMPV6_PARAMETER_PROBLEM;
	return type == ICMP_DEST_UNREACH || type == ICMP_SOURCE_QUENCH || type == ICMP_REDIRECT ||
	       type == ICMP_TIME_EXCEEDED || type == ICMP_PARAMETERPROB;
}

/* Reads the start of the transport header. False: the IP packet ends before, even if the frame does not. */
EC_INLINE bool pkt_load_l4(struct __sk_buff *ctx, const struct pkt *pkt, void *to, __u32 len)
{
	return pkt->l4_off - IP_OFF + len <= pkt->ip_len && !bpf_skb_load_bytes(ctx, pkt->l4_off, to, len);
}

/* Whether the protocol is the ICMP of the family. */
EC_INLINE bool pkt_is_icmp(__u8 family, __u8 proto)
{
	return proto == (family == FAMILY_IPV6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP);
}

/* Whether flows of the protocol have ports, or an identifier, that can be rewritten. */
EC_INLINE bool pkt_proto_known(__u8 family, __u8 proto)
{
	return proto == IPPROTO_TCP || proto == IPPROTO_UDP || pkt_is_icmp(family, proto);
}

EC_INLINE bool pkt_is_echo(__u8 family, __u8 type)
{
	return type == (family == FAMILY_IPV6 ? ICMPV6_ECHO : ICMP_ECHO);
}

EC_INLINE bool pkt_is_echo_reply(__u8 family, __u8 type)
{
	return type == (family == FAMILY_IPV6 ? ICMPV6_ECHOREPLY : ICMP_ECHOREPLY);
}

/* Any transport header: one place on the stack for all. */
union pkt_header {
	struct tcphdr tcp;
	struct udphdr udp;
	struct icmp_header icmp;
};

EC_INLINE bool pkt_parse_tcp(struct __sk_buff *ctx, struct pkt *pkt, struct tcphdr *tcp)
{
	__u32 header, ip_header = pkt->l4_off - IP_OFF;

	if (!pkt_load_l4(ctx, pkt, tcp, sizeof(*tcp)))
		return false;
	header = tcp->doff * 4;
	/* Only a first fragment may be cut off inside its header. */
	if (header < sizeof(*tcp) || (pkt->fragment == FRAGMENT_NONE && ip_header + header > pkt->ip_len))
		return false;
	pkt->tuple.sport = tcp->source;
	pkt->tuple.dport = tcp->dest;
	pkt->tcp_flags = ((__u8 *)tcp)[13];
	pkt->seq = bpf_ntohl(tcp->seq);
	pkt->ack = bpf_ntohl(tcp->ack_seq);
	pkt->seq_end = pkt->seq + tcp->syn + tcp->fin;
	if (pkt->ip_len > ip_header + header)
		pkt->seq_end += pkt->ip_len - ip_header - header;
	pkt->l4 = L4_FLOW;
	return true;
}

EC_INLINE bool pkt_parse_icmp(struct __sk_buff *ctx, struct pkt *pkt, struct icmp_header *icmp)
{
	if (!pkt_load_l4(ctx, pkt, icmp, sizeof(*icmp)))
		return false;
	pkt->icmp_type = icmp->type;
	if (pkt_is_echo(pkt->family, icmp->type)) {
		pkt->tuple.sport = icmp->id;
		pkt->l4 = L4_FLOW;
	} else if (pkt_is_echo_reply(pkt->family, icmp->type)) {
		pkt->tuple.dport = icmp->id;
		pkt->l4 = L4_FLOW;
	} else {
		pkt->l4 = pkt_is_icmp_error(pkt->family, icmp->type) ? L4_ICMP_ERROR : L4_UNKNOWN;
	}
	return true;
}

EC_INLINE bool pkt_parse_udp(struct __sk_buff *ctx, struct pkt *pkt, struct udphdr *udp)
{
	if (!pkt_load_l4(ctx, pkt, udp, sizeof(*udp)))
		return false;
	pkt->tuple.sport = udp->source;
	pkt->tuple.dport = udp->dest;
	pkt->no_sum = !udp->check;
	pkt->l4 = L4_FLOW;
	return true;
}

/*
 * Reads the transport header, unless that has been done: packets between pods do not
 * need it. False: malformed or truncated.
 */
EC_INLINE bool pkt_l4(struct __sk_buff *ctx, struct pkt *pkt)
{
	union pkt_header header;

	if (pkt->l4 != L4_UNREAD)
		return true;
	if (pkt->fragment == FRAGMENT_LATER || !pkt_proto_known(pkt->family, pkt->tuple.proto)) {
		pkt->l4 = L4_UNKNOWN;
		return true;
	}
	switch (pkt->tuple.proto) {
	case IPPROTO_TCP:
		return pkt_parse_tcp(ctx, pkt, &header.tcp);
	case IPPROTO_UDP:
		return pkt_parse_udp(ctx, pkt, &header.udp);
	default:
		return pkt_parse_icmp(ctx, pkt, &header.icmp);
	}
}

/*
 * Finds the ports of the packet's flow: in its transport header or, for a later
 * fragment, among the first fragments that are remembered for the holder (frag.h). The
 * packet must not have been rewritten yet.
 */
EC_INLINE enum verdict pkt_flow(struct __sk_buff *ctx, struct pkt *pkt, __u32 holder)
{
	if (!pkt_l4(ctx, pkt))
		return -DROP_INVALID;
	/* An ICMP message without an identifier is nobody's, and so are its later fragments. */
	if (pkt->fragment == FRAGMENT_FIRST && (pkt->l4 == L4_FLOW || !pkt_proto_known(pkt->family, pkt->tuple.proto)))
		frag_remember(&pkt->tuple, pkt->ip_id, holder);
	if (pkt->fragment != FRAGMENT_LATER)
		return VERDICT_GO_ON;
	if (!frag_recall(&pkt->tuple, pkt->ip_id, holder))
		return -DROP_FRAG_NOT_FOUND;
	if (pkt_proto_known(pkt->family, pkt->tuple.proto))
		pkt->l4 = L4_FLOW;
	return VERDICT_GO_ON;
}

#endif
