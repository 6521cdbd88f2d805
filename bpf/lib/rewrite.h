/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Changing one end of a packet, with every checksum that covers it. */
#ifndef EC_LIB_REWRITE_H
#define EC_LIB_REWRITE_H

#include "bpf/lib/ip.h"
#include "bpf/lib/maps.h"
#include "bpf/lib/offload.h"

enum rewrite_offset {
	ICMP_CHECK = offsetof(struct icmp_header, checksum),
	ICMP_ID = offsetof(struct icmp_header, id),
};

/* Offset of the checksum in the transport header. */
EC_INLINE __u32 rewrite_check_offset(__u8 proto)
{
	if (proto == IPPROTO_TCP)
		return offsetof(struct tcphdr, check);
	if (proto == IPPROTO_UDP)
		return offsetof(struct udphdr, check);
	return ICMP_CHECK;
}

/* Offset of an end's port in the transport header, or of the identifier of an ICMP echo. */
EC_INLINE __u32 rewrite_port_offset(__u8 proto, enum end end)
{
	if (proto == IPPROTO_ICMP || proto == IPPROTO_ICMPV6)
		return ICMP_ID;
	return end == END_SOURCE ? offsetof(struct udphdr, source) : offsetof(struct udphdr, dest);
}

/* Whether the checksum of the transport header covers the addresses: ICMP's does not, ICMPv6's does. */
EC_INLINE bool rewrite_covers_addresses(__u8 proto)
{
	return proto != IPPROTO_ICMP;
}

/*
 * Changes the transport checksum for another address. The checksum helpers keep a UDP
 * checksum of 0 (BPF_F_MARK_MANGLED_0) and allow for one that is pending
 * (BPF_F_PSEUDO_HDR: a change to the pseudo header).
 */
EC_INLINE bool rewrite_sum_address(struct __sk_buff *ctx, __u32 check, const struct addr *from, const struct addr *to,
				   __u64 flags)
{
	return !bpf_l4_csum_replace(ctx, check, 0, csum_growth_address(from, to), flags | BPF_F_PSEUDO_HDR);
}

/*
 * Changes, for a new address and port, a checksum that is complete while another one in
 * the packet is pending (offload_inside): the helpers would take it for the pending one.
 */
EC_CALL enum verdict rewrite_sum_outside(struct __sk_buff *ctx, __u32 check, __u32 growth)
{
	__be16 sum;

	if (bpf_skb_load_bytes(ctx, check, &sum, sizeof(sum)))
		return -DROP_INVALID;
	/* 0 would say that there is none (RFC 768). */
	sum = csum_grown(sum, growth) ?: 0xffff;
	return bpf_skb_store_bytes(ctx, check, &sum, sizeof(sum), 0) ? -DROP_WRITE_FAILED : VERDICT_GO_ON;
}

/* Changes a port in the transport header, for which the checksum has been changed already. */
EC_INLINE enum verdict rewrite_port(struct __sk_buff *ctx, const struct pkt *pkt, __u32 off, __be16 port)
{
	/* Else the checksum makes up for the port in a sum that the device has computed of the whole packet. */
	__u64 recompute = pkt->no_sum ? BPF_F_RECOMPUTE_CSUM : 0;

	return bpf_skb_store_bytes(ctx, off, &port, sizeof(port), recompute) ? -DROP_WRITE_FAILED : VERDICT_GO_ON;
}

/* The tuple has the port at once, and the address when that is written: what comes next may be to a Service. */
EC_INLINE void rewrite_note_port(struct pkt *pkt, enum end end, __be16 port)
{
	if (end == END_SOURCE)
		pkt->tuple.sport = port;
	else
		pkt->tuple.dport = port;
}

/*
 * Changes the port of one end of a flow's packet, and the transport checksum for the
 * new port and address. The address in the IP header is left to ip_hop, or to
 * rewrite_finish if the packet goes to the stack.
 */
EC_CALL enum verdict rewrite_begin(struct __sk_buff *ctx, struct pkt *pkt, enum end end, const struct snat_entry *e)
{
	const struct addr *from = end == END_SOURCE ? &pkt->tuple.src : &pkt->tuple.dst;
	__be16 old = end == END_SOURCE ? pkt->tuple.sport : pkt->tuple.dport;
	__be16 port = e->to_port;
	__u8 proto = pkt->tuple.proto;
	__u32 check = pkt->l4_off + rewrite_check_offset(proto), off = pkt->l4_off + rewrite_port_offset(proto, end);
	__u64 flags = proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;

	pkt->rewrite = end;
	pkt->rewrite_to = e->to_address;
	if (cfg.services)
		rewrite_note_port(pkt, end, port);
	if (pkt->fragment == FRAGMENT_LATER)
		return VERDICT_GO_ON;
	if (offload_inside(ctx, pkt))
		return rewrite_sum_outside(ctx, check,
					   csum_growth_address(from, &pkt->rewrite_to) + csum_growth(old, port))
			       ?: rewrite_port(ctx, pkt, off, port);
	if (rewrite_covers_addresses(proto) && !rewrite_sum_address(ctx, check, from, &pkt->rewrite_to, flags))
		return -DROP_WRITE_FAILED;
	if (port == old)
		return VERDICT_GO_ON;
	if (bpf_l4_csum_replace(ctx, check, old, port, flags | sizeof(port)))
		return -DROP_WRITE_FAILED;
	return rewrite_port(ctx, pkt, off, port);
}

/* Writes the address that rewrite_begin left, in a packet that does not pass ip_hop. */
EC_INLINE enum verdict rewrite_finish(struct __sk_buff *ctx, const struct pkt *pkt)
{
	return pkt->rewrite ? ip_rewrite(ctx, pkt, pkt->rewrite, &pkt->rewrite_to) : VERDICT_GO_ON;
}

/* Writes the address that rewrite_begin left, so that another change can follow. */
EC_INLINE enum verdict rewrite_settle(struct __sk_buff *ctx, struct pkt *pkt)
{
	enum verdict verdict = rewrite_finish(ctx, pkt);

	if (pkt->rewrite == END_SOURCE)
		pkt->tuple.src = pkt->rewrite_to;
	else if (pkt->rewrite)
		pkt->tuple.dst = pkt->rewrite_to;
	pkt->rewrite = 0;
	return verdict;
}

/* Writes both addresses of a tuple into the header, with what covers them there. */
EC_INLINE enum verdict rewrite_addresses(struct __sk_buff *ctx, const struct pkt *pkt, const struct tuple *to,
					 __u32 growth)
{
	__be32 v4[2] = {addr_v4(&to->src), addr_v4(&to->dst)};

	/* They are adjacent, in a tuple as in the headers. */
	if (pkt->family == FAMILY_IPV6)
		return bpf_skb_store_bytes(ctx, IP_OFF + offsetof(struct ipv6hdr, saddr), to, 2 * sizeof(struct addr),
					   BPF_F_RECOMPUTE_CSUM)
			       ? -DROP_WRITE_FAILED
			       : VERDICT_GO_ON;
	if (bpf_l3_csum_replace(ctx, IP_OFF + offsetof(struct iphdr, check), 0, growth, 0) ||
	    bpf_skb_store_bytes(ctx, IP_OFF + offsetof(struct iphdr, saddr), v4, sizeof(v4), 0))
		return -DROP_WRITE_FAILED;
	return VERDICT_GO_ON;
}

/*
 * Writes both ports of a tuple into the transport header of TCP or UDP, with the checksum,
 * whose sum the addresses have made grow by so much.
 */
EC_INLINE enum verdict rewrite_transport(struct __sk_buff *ctx, const struct pkt *pkt, const struct tuple *to,
					 __u32 growth)
{
	const struct tuple *from = &pkt->tuple;
	__u32 check = pkt->l4_off + rewrite_check_offset(from->proto);
	__u32 ports = csum_growth(from->sport, to->sport) + csum_growth(from->dport, to->dport);
	__u64 flags = from->proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	__u64 recompute = pkt->no_sum ? BPF_F_RECOMPUTE_CSUM : 0;

	if (offload_inside(ctx, pkt)) {
		if (rewrite_sum_outside(ctx, check, growth + ports))
			return -DROP_WRITE_FAILED;
	} else if (bpf_l4_csum_replace(ctx, check, 0, growth, flags | BPF_F_PSEUDO_HDR) ||
		   bpf_l4_csum_replace(ctx, check, 0, ports, flags)) {
		return -DROP_WRITE_FAILED;
	}
	/* They are adjacent, in a tuple as in the headers. */
	return bpf_skb_store_bytes(ctx, pkt->l4_off, &to->sport, 2 * sizeof(to->sport), recompute) ? -DROP_WRITE_FAILED
												   : VERDICT_GO_ON;
}

/*
 * Makes the packet, of TCP, UDP or SCTP, at once that of another tuple, which is in the
 * scratch record. The checksum of SCTP covers no addresses, and its ports stay.
 */
EC_GLOBAL enum verdict rewrite_tuple(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();
	enum verdict verdict;
	struct tuple *to;
	struct pkt *pkt;
	__u32 growth;

	if (!s)
		return -DROP_INVALID;
	pkt = &s->pkt;
	to = &s->service.turns;
	growth = csum_growth_address(&pkt->tuple.src, &to->src) + csum_growth_address(&pkt->tuple.dst, &to->dst);
	if (pkt->fragment != FRAGMENT_LATER && pkt->tuple.proto != IPPROTO_SCTP) {
		verdict = rewrite_transport(ctx, pkt, to, growth);
		if (verdict)
			return verdict;
	}
	verdict = rewrite_addresses(ctx, pkt, to, growth);
	pkt->tuple = *to;
	return verdict;
}

#endif
