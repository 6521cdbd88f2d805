/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Changing one end of a packet, with every checksum that covers it. */
#ifndef EC_LIB_REWRITE_H
#define EC_LIB_REWRITE_H

#include "bpf/lib/ipv4.h"
#include "bpf/lib/maps.h"

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
	if (proto == IPPROTO_ICMP)
		return ICMP_ID;
	return end == END_SOURCE ? offsetof(struct udphdr, source) : offsetof(struct udphdr, dest);
}

/*
 * Changes the port of one end of a flow's packet, and the transport checksum for the
 * new port and address. The address in the IPv4 header is left to ipv4_hop, or to
 * rewrite_finish if the packet goes to the stack. The checksum helpers keep a UDP
 * checksum of 0 (BPF_F_MARK_MANGLED_0) and allow for one that is pending
 * (BPF_F_PSEUDO_HDR: a change to the pseudo header).
 */
EC_CALL enum verdict rewrite_begin(struct __sk_buff *ctx, struct pkt *pkt, enum end end, const struct snat_entry *e)
{
	__be32 from = end == END_SOURCE ? addr_v4(&pkt->tuple.src) : addr_v4(&pkt->tuple.dst);
	__be16 old = end == END_SOURCE ? pkt->tuple.sport : pkt->tuple.dport;
	__be32 to = addr_v4(&e->to_address);
	__be16 port = e->to_port;
	__u8 proto = pkt->tuple.proto;
	__u32 check = pkt->l4_off + rewrite_check_offset(proto);
	__u64 flags = proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;

	pkt->rewrite = end;
	pkt->rewrite_to = to;
	if (pkt->fragment == FRAGMENT_LATER)
		return VERDICT_GO_ON;
	if (proto != IPPROTO_ICMP && bpf_l4_csum_replace(ctx, check, from, to, flags | BPF_F_PSEUDO_HDR | sizeof(to)))
		return -DROP_WRITE_FAILED;
	if (port != old) {
		__u32 off = pkt->l4_off + rewrite_port_offset(proto, end);

		if (bpf_l4_csum_replace(ctx, check, old, port, flags | sizeof(port)) ||
		    bpf_skb_store_bytes(ctx, off, &port, sizeof(port), 0))
			return -DROP_WRITE_FAILED;
	}
	return VERDICT_GO_ON;
}

/* Writes the address that rewrite_begin left, in a packet that does not pass ipv4_hop. */
EC_INLINE enum verdict rewrite_finish(struct __sk_buff *ctx, const struct pkt *pkt)
{
	switch (pkt->rewrite) {
	case END_SOURCE:
		return ipv4_rewrite(ctx, END_SOURCE, addr_v4(&pkt->tuple.src), pkt->rewrite_to);
	case END_DESTINATION:
		return ipv4_rewrite(ctx, END_DESTINATION, addr_v4(&pkt->tuple.dst), pkt->rewrite_to);
	}
	return VERDICT_GO_ON;
}

#endif
