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

#endif
