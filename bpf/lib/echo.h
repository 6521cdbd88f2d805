/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * An echo request to the address of a Service. Nobody there would reply to it, so it
 * is turned into its reply in place, with whatever headers it has, and never leaves the
 * node.
 */
#ifndef EC_LIB_ECHO_H
#define EC_LIB_ECHO_H

#include "bpf/lib/answer.h"
#include "bpf/lib/rewrite.h"

/*
 * Whether it is a request. Of a later fragment (pkt_flow) that is not known, but requests have their identifier in
 * sport.
 */
EC_INLINE bool echo_asks(const struct pkt *pkt)
{
	if (pkt->l4 != L4_FLOW || !pkt_is_icmp(pkt->family, pkt->tuple.proto))
		return false;
	return pkt->fragment == FRAGMENT_LATER ? !pkt->tuple.dport : pkt_is_echo(pkt->family, pkt->icmp_type);
}

/* Makes the message a reply, and its checksum that of one. */
EC_INLINE bool echo_turn_message(struct __sk_buff *ctx, const struct pkt *pkt)
{
	__u8 request = ICMP_ECHO, reply = ICMP_ECHOREPLY;

	if (pkt->family == FAMILY_IPV6) {
		request = ICMPV6_ECHO;
		reply = ICMPV6_ECHOREPLY;
	}
	return !bpf_l4_csum_replace(ctx, pkt->l4_off + ICMP_CHECK, bpf_htons(request << 8), bpf_htons(reply << 8), 2) &&
	       !bpf_skb_store_bytes(ctx, pkt->l4_off, &reply, sizeof(reply), 0);
}

/* Exchanges the addresses, which no checksum notices. */
EC_INLINE bool echo_turn_addresses(struct __sk_buff *ctx, const struct pkt *pkt)
{
	struct addr ends[] = {pkt->tuple.dst, pkt->tuple.src};
	__be32 ipv4[] = {addr_v4(&ends[0]), addr_v4(&ends[1])};

	if (pkt->family == FAMILY_IPV6)
		return !bpf_skb_store_bytes(ctx, IP_OFF + offsetof(struct ipv6hdr, saddr), ends, sizeof(ends), 0);
	return !bpf_skb_store_bytes(ctx, IP_OFF + offsetof(struct iphdr, saddr), ipv4, sizeof(ipv4), 0);
}

/* Answers an echo request of the owner in the scratch record; GO_ON: it is none. */
EC_CALL enum verdict echo_answer(struct __sk_buff *ctx, struct scratch *s)
{
	struct device *dev = flow_owner(s->owner.ifindex);
	const struct pkt *pkt = &s->pkt;

	if (!dev || !echo_asks(pkt))
		return VERDICT_GO_ON;
	if ((pkt->fragment != FRAGMENT_LATER && !echo_turn_message(ctx, pkt)) || !echo_turn_addresses(ctx, pkt) ||
	    answer_send(ctx, s, dev) == EC_ACT_SHOT)
		return -DROP_WRITE_FAILED;
	return VERDICT_ANSWERED;
}

#endif
