/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Answers to a pod, or a client outside, made of the packet that it has sent: an ICMP error that quotes it, or
 * a RST (reset.h). Which packets are answered, and how, is in too_big.h, refuse.h and
 * reset.h.
 */
#ifndef EC_LIB_ANSWER_H
#define EC_LIB_ANSWER_H

#include "bpf/lib/allowance.h"
#include "bpf/lib/flow.h"
#include "bpf/lib/ip.h"
#include "bpf/lib/offload.h"
#include "bpf/lib/path.h"
#include "bpf/lib/service.h"
#include "bpf/lib/tunnel.h"

/* answers_until has only 32 bits, so it counts units of 2^16 ns. */
#define ANSWER_SHIFT 16

/* In such units: a pod gets one answer in each interval, and a hundred at once. */
#define ANSWER_INTERVAL ((__u32)(NSEC_PER_SEC / 100 >> ANSWER_SHIFT) + 1)
#define ANSWER_BURST (100 * ANSWER_INTERVAL)

/* How many bytes are cut out: more than precedes a transport header, unless that follows long extension headers. */
#define ANSWER_CUT 128

/* Takes one of the pod's answers, unless they are used up for the time of a burst (GCRA, as in allowance.h). */
EC_INLINE bool answer_take(struct device *dev, __u32 burst)
{
	__u32 was, now, ahead;

	for (int i = 0; i < ALLOWANCE_TRIES; i++) {
		was = *(volatile __u32 *)&dev->answers_until;
		/* Read after was, which is no further ahead then than it may be. */
		now = bpf_ktime_get_coarse_ns() >> ANSWER_SHIFT;
		ahead = was - now;
		if (ahead > 2 * ANSWER_BURST + ANSWER_INTERVAL) /* further than it can be: was lies in the past */
			ahead = 0;
		if (ahead >= burst)
			return false;
		if (__sync_val_compare_and_swap(&dev->answers_until, was, now + ahead + ANSWER_INTERVAL) == was)
			return true;
	}
	return false;
}

/* TCP heeds an answer. Other senders may not: half of what a pod may have at once is TCP's alone. */
EC_INLINE __u32 answer_burst(const struct scratch *s)
{
	return s->pkt.tuple.proto == IPPROTO_TCP ? 2 * ANSWER_BURST : ANSWER_BURST;
}

/*
 * The owner in the scratch record, if it may have another answer of a burst. What the node sends for itself has none.
 */
EC_INLINE struct device *answer_to(const struct scratch *s, __u32 burst)
{
	bool of_node = !s->owner.ifindex && (s->owner.flags & FLOW_HOST) && !(s->owner.flags & FLOW_SERVICE);
	struct device *dev = of_node ? NULL : flow_owner(s->owner.ifindex);

	return dev && answer_take(dev, burst) ? dev : NULL;
}

/*
 * The address from which a router would answer: the node's or, of a packet to a Service, that, so that it is to be
 * asked for before the packet is given back. NULL: there is none.
 */
EC_INLINE const struct addr *answer_router(const struct scratch *s)
{
	const struct config *config = config_get();
	const struct addr *node;

	if (service_has_translated(s))
		return &s->service.sent.dst;
	node = config ? path_node_address(config, s->pkt.family) : NULL;
	return node && !addr_is_zero(node) ? node : NULL;
}

/* Where the transport header of an answer begins, in bytes from the start of the frame. */
EC_INLINE __u32 answer_l4_off(const struct pkt *pkt)
{
	return IP_OFF + (pkt->family == FAMILY_IPV6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr));
}

/*
 * Gives the frame this length, no segments and no pending checksum. A pending checksum
 * goes only if the bytes at which it starts are removed, and one that the device has
 * computed of the whole packet only if the packet grows: so its end is cut, a byte added,
 * and the rest removed at its start.
 */
EC_INLINE bool answer_resize(struct __sk_buff *ctx, __u32 frame)
{
	__u32 cut = ANSWER_CUT;
	struct offload o;

	/* It may start far inside, as in a tunnel within a tunnel of the pod's own. */
	if (offload_read(ctx, &o) && o.start >= cut)
		cut = o.start + 1;
	return !bpf_skb_change_tail(ctx, frame + cut - 1, 0) && !bpf_skb_change_tail(ctx, frame + cut, 0) &&
	       !bpf_skb_adjust_room(ctx, -(__s32)cut, BPF_ADJ_ROOM_MAC, 0);
}

EC_CALL bool answer_write_ipv4(struct __sk_buff *ctx, const struct pkt *pkt, const struct addr *from, __u8 proto,
			       __u32 len)
{
	struct iphdr ip = {
		.version = 4,
		.ihl = 5,
		.tot_len = bpf_htons(sizeof(ip) + len),
		.frag_off = bpf_htons(IP_DONT_FRAGMENT),
		.ttl = 64,
		.protocol = proto,
		.saddr = addr_v4(from),
		.daddr = addr_v4(&pkt->tuple.src),
	};

	ip.check = ~csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)&ip, sizeof(ip), 0));
	return !bpf_skb_store_bytes(ctx, IP_OFF, &ip, sizeof(ip), 0);
}

EC_CALL bool answer_write_ipv6(struct __sk_buff *ctx, const struct pkt *pkt, const struct addr *from, __u8 proto,
			       __u32 len)
{
	struct ipv6hdr ip = {
		.version = 6,
		.payload_len = bpf_htons(len),
		.nexthdr = proto,
		.hop_limit = 64,
	};

	__builtin_memcpy(&ip.saddr, from, sizeof(ip.saddr));
	__builtin_memcpy(&ip.daddr, &pkt->tuple.src, sizeof(ip.daddr));
	return !bpf_skb_store_bytes(ctx, IP_OFF, &ip, sizeof(ip), 0);
}

/* Turns the frame into an answer from an address. The len bytes above its IP header are still to be written. */
EC_INLINE bool answer_begin(struct __sk_buff *ctx, const struct pkt *pkt, const struct addr *from, __u8 proto,
			    __u32 len)
{
	return answer_resize(ctx, answer_l4_off(pkt) + len) &&
	       (pkt->family == FAMILY_IPV6 ? answer_write_ipv6(ctx, pkt, from, proto, len)
					   : answer_write_ipv4(ctx, pkt, from, proto, len));
}

/*
 * Whether an error about the packet may be sent: none about an error, nor about a later fragment of IPv4 (RFC 1122,
 * section 3.2.2).
 */
EC_INLINE bool answer_permits_error(struct __sk_buff *ctx, struct pkt *pkt)
{
	return pkt_l4(ctx, pkt) && pkt->l4 != L4_ICMP_ERROR &&
	       !(pkt->family == FAMILY_IPV4 && pkt->fragment == FRAGMENT_LATER);
}

/* The kind of the error that is to be written: its type and code, and the MTU that it tells, or 0. */
EC_INLINE void answer_set_error(struct scratch *s, __u8 type, __u8 code, __u32 mtu)
{
	s->error.icmp = (struct icmp_header){
		.type = type,
		.code = code,
		.id = bpf_htons(mtu >> 16),
		.rest = bpf_htons(mtu),
	};
}

/*
 * Writes the error, whose kind has been set, into the scratch record, with the start of
 * the packet that it quotes. Returns how many bytes that are; 0: none could be read.
 */
EC_CALL __u32 answer_write_error(struct __sk_buff *ctx, struct scratch *s, const struct addr *from)
{
	struct icmp_error *e = &s->error;
	__u32 quoted = s->pkt.ip_len;

	/* No IP packet is shorter. Linux 6.1 wants to see that it is not empty. */
	if (quoted < sizeof(struct iphdr))
		return 0;
	if (quoted > sizeof(e->quote))
		quoted = sizeof(e->quote);
	__builtin_memset(e->quote, 0, sizeof(e->quote));
	if (bpf_skb_load_bytes(ctx, IP_OFF, e->quote, quoted))
		return 0;
	__builtin_memset(e, 0, offsetof(struct icmp_error, icmp));
	if (s->pkt.family == FAMILY_IPV6) {
		e->src = *from;
		e->dst = s->pkt.tuple.src;
		e->len = bpf_htonl(sizeof(e->icmp) + quoted);
		e->proto = bpf_htonl(IPPROTO_ICMPV6);
	}
	/* What is not quoted is zero, and adds nothing. */
	e->icmp.checksum = ~csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)e, sizeof(*e), 0));
	return quoted;
}

/* Turns the packet into the error about itself whose kind has been set, from an address. */
EC_CALL bool answer_error(struct __sk_buff *ctx, struct scratch *s, const struct addr *from)
{
	__u8 proto = s->pkt.family == FAMILY_IPV6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP;
	__u32 len, quoted;

	if (!answer_permits_error(ctx, &s->pkt))
		return false;
	quoted = answer_write_error(ctx, s, from);
	len = sizeof(s->error.icmp) + quoted;
	if (!quoted || len > sizeof(s->error.icmp) + sizeof(s->error.quote))
		return false;
	return answer_begin(ctx, &s->pkt, from, proto, len) &&
	       !bpf_skb_store_bytes(ctx, answer_l4_off(&s->pkt), &s->error.icmp, len, 0);
}

/* Has the frame go back to its sender. */
EC_CALL bool answer_swap_macs(struct __sk_buff *ctx)
{
	__u8 macs[2 * ETH_ALEN];

	return !bpf_skb_load_bytes(ctx, 0, macs + ETH_ALEN, ETH_ALEN) &&
	       !bpf_skb_load_bytes(ctx, ETH_ALEN, macs, ETH_ALEN) &&
	       !bpf_skb_store_bytes(ctx, 0, macs, sizeof(macs), 0);
}

/*
 * Sends the answer to where the packet came from, which is no pod: the neighbour on an uplink, the far end of the
 * tunnel, or the host's stack, as if it arrived by the uplink that the packet was leaving by. Returns a TC action.
 */
EC_CALL int answer_back(struct __sk_buff *ctx, const struct scratch *s)
{
	const struct config *config = config_get();
	struct destination *to;

	if (!config || !answer_swap_macs(ctx))
		return EC_ACT_SHOT;
	ctx->mark |= cfg.mark;
	if (s->direction == DIRECTION_FROM_TUNNEL) {
		to = path_destination(&s->pkt.tuple.src);
		if (!to || tunnel_encap(ctx, s->pkt.tos, &to->node, to->mac))
			return EC_ACT_SHOT;
	}
	return bpf_redirect(ctx->ifindex, s->direction == DIRECTION_TO_UPLINK ? BPF_F_INGRESS : 0);
}

/* Sends the answer to the owner in the scratch record. Returns a TC action. */
EC_INLINE int answer_send(struct __sk_buff *ctx, const struct scratch *s, const struct device *dev)
{
	if (!s->owner.ifindex)
		return answer_back(ctx, s);
	if (path_is_bridge(dev->pod_mac)) {
		/* What the stack has forwarded has lost the container's address. */
		if (s->direction != DIRECTION_FROM_POD || !answer_swap_macs(ctx))
			return EC_ACT_SHOT;
	} else if (bpf_skb_store_bytes(ctx, 0, dev->pod_mac, 12, 0)) {
		/* pod_mac and host_mac are adjacent, in the order of the Ethernet header. */
		return EC_ACT_SHOT;
	}
	return bpf_redirect(s->owner.ifindex, 0);
}

#endif
