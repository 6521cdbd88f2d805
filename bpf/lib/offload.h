/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Checksum offload: a sender may leave a checksum pending, and says where it is to be
 * written. The kernel or the NIC writes it after our programs have run, so a pod could
 * have it overwrite an address or a port that they have checked.
 */
#ifndef EC_LIB_OFFLOAD_H
#define EC_LIB_OFFLOAD_H

#include <bpf/bpf_core_read.h>

#include "bpf/lib/pkt.h"

/* include/linux/skbuff.h */
#define EC_CHECKSUM_PARTIAL 3
#define EC_GSO_BY_FRAGS 0xffff

/* Fields of the kernel's packet: offsets into its buffer, except csum_offset, which counts from csum_start. */
struct sk_buff {
	__u16 csum_start;
	__u16 csum_offset;
	__u16 mac_header; /* where the frame begins, for programs on the way in */
	__u8 ip_summed : 2;
} __attribute__((preserve_access_index));

/* Since Linux 6.2; costs nothing, and its result can be read directly. */
extern void *bpf_cast_to_kern_ctx(void *ctx) __ksym __weak;

/* Where the sum starts and where it is to be written, in bytes from the start of the frame. */
struct offload {
	__u32 start;
	__u32 at;
};

EC_INLINE bool offload_found(struct offload *o, __u32 start, __u32 offset, __u32 frame)
{
	o->start = start - frame;
	o->at = o->start + offset;
	return true;
}

/* offload_read for kernels that show their packet only to bpf_probe_read_kernel. */
EC_CALL bool offload_probe(const struct sk_buff *skb, struct offload *o)
{
	__u16 sum[2] = {}, frame = 0;

	if (BPF_CORE_READ_BITFIELD_PROBED(skb, ip_summed) != EC_CHECKSUM_PARTIAL)
		return false;
	/* csum_start and csum_offset, which are adjacent */
	bpf_core_read(sum, sizeof(sum), &skb->csum_start);
	bpf_core_read(&frame, sizeof(frame), &skb->mac_header);
	return offload_found(o, sum[0], sum[1], frame);
}

/* Whether a checksum is pending, and where. */
EC_INLINE bool offload_read(struct __sk_buff *ctx, struct offload *o)
{
	const struct sk_buff *skb;

	if (!bpf_cast_to_kern_ctx)
		return offload_probe((void *)ctx, o);
	skb = bpf_cast_to_kern_ctx(ctx);
	if (BPF_CORE_READ_BITFIELD(skb, ip_summed) != EC_CHECKSUM_PARTIAL)
		return false;
	return offload_found(o, skb->csum_start, skb->csum_offset, skb->mac_header);
}

/*
 * Whether no checksum is pending, or one that may be: the packet's own, or one in the
 * payload, as a tunnel in the pod has. No stack leaves that of ICMP or of a fragment
 * pending.
 */
EC_INLINE bool offload_right(struct __sk_buff *ctx, const struct pkt *pkt)
{
	__u32 check = 0, header = 8, end; /* header: at least the ports */
	struct offload o;

	if (!offload_read(ctx, &o))
		return true;
	if (pkt->fragment != FRAGMENT_NONE || pkt_is_icmp(pkt->family, pkt->tuple.proto))
		return false;
	switch (pkt->tuple.proto) {
	case IPPROTO_TCP:
		check = offsetof(struct tcphdr, check);
		header = sizeof(struct tcphdr);
		break;
	case IPPROTO_UDP:
		check = offsetof(struct udphdr, check);
		break;
	case IPPROTO_SCTP: /* RFC 9260, section 3.1 */
		check = 8;
		header = 12;
	}
	if (check && o.start == pkt->l4_off && o.at == pkt->l4_off + check)
		return true;
	end = pkt->l4_off + header;
	/* A GSO packet is segmented where the sum starts, and TCP carries no other packet. */
	if (ctx->gso_size && (pkt->tuple.proto == IPPROTO_TCP || o.start < end))
		return false;
	return o.at >= end && o.at < ctx->len - 1;
}

/*
 * Whether a datagram's own checksum is complete and the pending one is in its payload, as
 * in a tunnel of the pod's own. Of a GSO packet both are pending.
 */
EC_INLINE bool offload_inside(struct __sk_buff *ctx, const struct pkt *pkt)
{
	struct offload o;

	return pkt->tuple.proto == IPPROTO_UDP && !pkt->no_sum && !ctx->gso_size && offload_read(ctx, &o) &&
	       o.start != pkt->l4_off;
}

/*
 * How many bytes of each segment of a GSO packet precede its payload, from the IP header
 * on. A tunnel's packet is segmented by the inner transport header, where its sum starts.
 */
EC_CALL __u32 offload_headers(struct __sk_buff *ctx, const struct pkt *pkt)
{
	bool tcp = pkt->tuple.proto == IPPROTO_TCP;
	__u32 start = pkt->l4_off;
	struct offload o;
	__u8 doff;

	if (!tcp && offload_read(ctx, &o)) {
		start = o.start;
		tcp = o.at - o.start == offsetof(struct tcphdr, check);
	}
	if (!tcp)
		return start - IP_OFF + sizeof(struct udphdr);
	if (bpf_skb_load_bytes(ctx, start + 12, &doff, sizeof(doff)))
		return 0;
	return start - IP_OFF + (doff >> 4) * 4 - pkt->jumbo;
}

/* Whether the packet, or each segment of a GSO packet, fits an MTU (bytes of IP packet). */
EC_INLINE bool offload_fits(struct __sk_buff *ctx, const struct pkt *pkt, __u32 mtu)
{
	if (!ctx->gso_size)
		return pkt->ip_len <= mtu;
	return offload_headers(ctx, pkt) + ctx->gso_size <= mtu;
}

/* Whether it certainly does not. Segments of SCTP have lengths of their own, which only the kernel can judge. */
EC_INLINE bool offload_exceeds(struct __sk_buff *ctx, const struct pkt *pkt, __u32 mtu)
{
	return ctx->gso_size != EC_GSO_BY_FRAGS && !offload_fits(ctx, pkt, mtu);
}

#endif
