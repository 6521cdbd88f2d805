/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * ICMP errors (RFC 792, RFC 1191) about masqueraded flows: the packet inside is
 * translated like the one outside (RFC 5508, section 4), and takes the same way
 * as its flow.
 */
#ifndef EC_LIB_ICMP_H
#define EC_LIB_ICMP_H

#include "bpf/lib/rewrite.h"
#include "bpf/lib/scratch.h"

/* False: an ICMP message of a kind that has no flow. */
EC_INLINE bool icmp_inner_ports(struct inner *inner, const __be16 *l4)
{
	const struct icmp_header *icmp = (const void *)l4;

	if (inner->tuple.proto != IPPROTO_ICMP) {
		inner->tuple.sport = l4[0];
		inner->tuple.dport = l4[1];
		return pkt_proto_known(inner->tuple.proto);
	}
	if (icmp->type == ICMP_ECHO)
		inner->tuple.sport = icmp->id;
	else
		inner->tuple.dport = icmp->id;
	return icmp->type == ICMP_ECHO || icmp->type == ICMP_ECHOREPLY;
}

/*
 * Reads the packet inside into the scratch record: its addresses, all zero if the
 * error does not quote them, and the rest. 0: it is not the start of one whose flow
 * could be in a table.
 */
EC_GLOBAL int icmp_parse_inner(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();
	struct inner *inner;
	struct iphdr ip;
	__be16 l4[4];

	if (!s)
		return 0;
	inner = &s->inner;
	__builtin_memset(inner, 0, sizeof(*inner));
	inner->ip_off = s->pkt.l4_off + sizeof(struct icmp_header);
	inner->l4_off = inner->ip_off + sizeof(ip);
	inner->end = IP_OFF + s->pkt.ip_len;
	if (inner->l4_off > inner->end || bpf_skb_load_bytes(ctx, inner->ip_off, &ip, sizeof(ip)) || ip.version != 4)
		return 0;
	inner->ip_check = ip.check;
	inner->tuple.proto = ip.protocol;
	addr_set_v4(&inner->tuple.src, ip.saddr);
	addr_set_v4(&inner->tuple.dst, ip.daddr);
	if (ip.ihl != 5 || (ip.frag_off & bpf_htons(IP_FRAGMENT_OFFSET)))
		return 0;
	if (inner->l4_off + sizeof(l4) > inner->end || bpf_skb_load_bytes(ctx, inner->l4_off, l4, sizeof(l4)))
		return 0;
	return icmp_inner_ports(inner, l4);
}

/*
 * Whether an ICMP packet may pass between a pod, which is the given end of it, and
 * anybody: no redirect, and no error but about a packet of that pod's: one that was
 * sent to the pod that sends the error, or that the pod to which it is sent has sent.
 * Else one pod could speak for another's flows. An error in fragments, which nobody
 * sends, cannot be judged. 0, or a negated drop reason; an error's inner packet is
 * then in the scratch record.
 */
EC_GLOBAL int icmp_check(struct __sk_buff *ctx, enum end pod)
{
	struct scratch *s = scratch_get();

	if (!s || !pkt_parse_l4(ctx, &s->pkt))
		return -DROP_INVALID;
	if (s->pkt.l4 != L4_ICMP_ERROR)
		return 0;
	if (s->pkt.icmp_type == ICMP_REDIRECT)
		return -DROP_ICMP_REDIRECT;
	if (s->pkt.fragment != FRAGMENT_NONE)
		return -DROP_INVALID;
	icmp_parse_inner(ctx);
	if (pod == END_SOURCE)
		return addr_equal(&s->inner.tuple.dst, &s->pkt.tuple.src) ? 0 : -DROP_FORGED_ERROR;
	return addr_equal(&s->inner.tuple.src, &s->pkt.tuple.dst) ? 0 : -DROP_FORGED_ERROR;
}

/* A ones' complement checksum after one 16-bit word that it covers has changed (RFC 1624). */
EC_INLINE __be16 icmp_check_change(__be16 check, __be16 from, __be16 to)
{
	__u32 sum = (__u16)~check + (__u16)~from + (__u32)to;

	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

EC_INLINE __be16 icmp_check_change_addr(__be16 check, __be32 from, __be32 to)
{
	check = icmp_check_change(check, from & 0xffff, to & 0xffff);
	return icmp_check_change(check, from >> 16, to >> 16);
}

/* Writes one 16-bit word of an ICMP message, with the message's checksum. */
EC_CALL int icmp_patch(struct __sk_buff *ctx, __u32 icmp_off, __u32 off, __be16 from, __be16 to)
{
	if (from == to)
		return 0;
	if (bpf_l4_csum_replace(ctx, icmp_off + ICMP_CHECK, from, to, sizeof(to)) ||
	    bpf_skb_store_bytes(ctx, off, &to, sizeof(to), 0))
		return -DROP_WRITE_FAILED;
	return 0;
}

/* The inner transport checksum, where the error quotes enough of the packet to hold it. */
EC_CALL int icmp_patch_inner_check(struct __sk_buff *ctx, __u32 icmp_off, const struct inner *inner,
				   const struct inner_change *c)
{
	__u32 off = inner->l4_off + rewrite_check_offset(inner->tuple.proto);
	__be16 check, changed;

	if (off + sizeof(check) > inner->end || bpf_skb_load_bytes(ctx, off, &check, sizeof(check)))
		return 0;
	if (inner->tuple.proto == IPPROTO_UDP && !check)
		return 0;
	changed = icmp_check_change(check, c->old_port, c->port);
	if (inner->tuple.proto != IPPROTO_ICMP)
		changed = icmp_check_change_addr(changed, c->from, c->to);
	/* A UDP checksum of 0 would say that there is none (RFC 768). */
	if (inner->tuple.proto == IPPROTO_UDP && !changed)
		changed = 0xffff;
	return icmp_patch(ctx, icmp_off, off, check, changed);
}

/* Changes an end of the inner packet, with all checksums that cover it, as the scratch record says. */
EC_GLOBAL int icmp_patch_inner(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();
	struct inner_change *c;
	struct inner *inner;
	__u32 icmp_off, addr, port;
	int ret;

	if (!s)
		return -DROP_INVALID;
	c = &s->change;
	inner = &s->inner;
	icmp_off = s->pkt.l4_off;
	addr = inner->ip_off + (c->end == END_SOURCE ? offsetof(struct iphdr, saddr) : offsetof(struct iphdr, daddr));
	port = inner->l4_off + rewrite_port_offset(inner->tuple.proto, c->end);
	ret = icmp_patch_inner_check(ctx, icmp_off, inner, c);
	if (!ret)
		ret = icmp_patch(ctx, icmp_off, port, c->old_port, c->port);
	if (!ret)
		ret = icmp_patch(ctx, icmp_off, inner->ip_off + offsetof(struct iphdr, check), inner->ip_check,
				 icmp_check_change_addr(inner->ip_check, c->from, c->to));
	if (!ret)
		ret = icmp_patch(ctx, icmp_off, addr, c->from & 0xffff, c->to & 0xffff);
	if (!ret)
		ret = icmp_patch(ctx, icmp_off, addr + 2, c->from >> 16, c->to >> 16);
	return ret;
}

/*
 * Translates an error that a masqueraded flow's packet met on its way out: the
 * inner source, which is the node, becomes the pod, and so does the outer
 * destination.
 */
EC_CALL int icmp_translate_in(struct __sk_buff *ctx, struct scratch *s, const struct snat_entry *reverse)
{
	int ret;

	s->change.from = addr_v4(&s->inner.tuple.src);
	s->change.to = addr_v4(&reverse->to_address);
	s->change.old_port = s->inner.tuple.sport;
	s->change.port = reverse->to_port;
	s->change.end = END_SOURCE;
	ret = icmp_patch_inner(ctx);
	return ret ?: rewrite_ip(ctx, END_DESTINATION, addr_v4(&s->pkt.tuple.dst), s->change.to);
}

/*
 * Translates an error that the pod, or the host's stack, sends about a reply: the
 * inner destination, which is the pod, becomes the node, and so does the outer source.
 */
EC_CALL int icmp_translate_out(struct __sk_buff *ctx, struct scratch *s, const struct snat_entry *forward)
{
	int ret;

	s->change.from = addr_v4(&s->inner.tuple.dst);
	s->change.to = addr_v4(&forward->to_address);
	s->change.old_port = s->inner.tuple.dport;
	s->change.port = forward->to_port;
	s->change.end = END_DESTINATION;
	ret = icmp_patch_inner(ctx);
	return ret ?: rewrite_ip(ctx, END_SOURCE, addr_v4(&s->pkt.tuple.src), s->change.to);
}

#endif
