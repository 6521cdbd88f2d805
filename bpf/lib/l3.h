/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Interfaces without an Ethernet header, such as WireGuard's, tun, PPP and ipip. Their programs give each packet a
 * header of their own, so that all else can read it, and redirect it, as if it were a frame of an Ethernet interface.
 * The kernel removes the header where such a packet goes on: on arrival in front of its stack, and where it is
 * redirected to an interface without one.
 */
#ifndef EC_LIB_L3_H
#define EC_LIB_L3_H

#include "bpf/lib/ip.h"

/* Whether the program has to look at the packet: at IP that no program of ours has sent. */
EC_INLINE bool l3_reads(const struct __sk_buff *ctx)
{
	return !(ctx->mark & cfg.mark) && ip_family(ctx) != FAMILIES;
}

/* The first byte of the header's addresses, which are locally administered. No IP packet begins so. */
#define L3_FIRST 2

/*
 * Gives the packet a header, unless the program of another build that has run before has given it one. VXLAN takes no
 * frame from 00:00:00:00:00:00. The kernel has no room for a header in a packet of more than 16 KiB, unless it is of
 * GSO.
 */
EC_CALL enum verdict l3_begin(struct __sk_buff *ctx)
{
	struct ethhdr eth = {.h_dest = {L3_FIRST}, .h_source = {L3_FIRST}, .h_proto = ctx->protocol};
	__u8 first;

	if (!bpf_skb_load_bytes(ctx, 0, &first, sizeof(first)) && first == L3_FIRST)
		return VERDICT_GO_ON;
	if (bpf_skb_change_head(ctx, sizeof(eth), 0) || bpf_skb_store_bytes(ctx, 0, &eth, sizeof(eth), 0))
		return -DROP_WRITE_FAILED;
	return VERDICT_GO_ON;
}

/*
 * The action of a packet that leaves. No helper removes a header again but redirection: what goes on is sent once more,
 * with our mark, by which the program passes it then.
 */
EC_INLINE int l3_leave(struct __sk_buff *ctx, int action)
{
	if (action != EC_ACT_UNSPEC)
		return action;
	ctx->mark |= cfg.mark;
	return bpf_redirect(ctx->ifindex, 0);
}

#endif
