/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * ICMP errors (RFC 792, RFC 1191) about masqueraded flows: the quoted packet is
 * translated together with the error (RFC 5508, section 4), and the error takes the
 * same way as the flow.
 */
#ifndef EC_LIB_ICMP_H
#define EC_LIB_ICMP_H

#include "bpf/lib/rewrite.h"
#include "bpf/lib/scratch.h"

/* Reads the quoted packet's ports. False: its protocol, or kind of ICMP message, has no flows. */
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
 * Reads the quoted packet into the scratch record. Returns 0 if its flow cannot be in
 * a table; the addresses are read even then, and zero only if they are not quoted.
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
 * Whether a pod, at the given end of an ICMP packet, may send or receive it. Redirects
 * may not pass, and an error must quote a packet that was sent to the pod that sends the
 * error, or that the pod that receives the error has sent: else one pod could interfere
 * with another's flows. A fragmented error, which no stack sends, cannot be checked. The
 * quoted packet of an error that may pass is in the scratch record.
 */
EC_GLOBAL enum verdict icmp_check(struct __sk_buff *ctx, enum end pod)
{
	struct scratch *s = scratch_get();

	if (!s || !pkt_l4(ctx, &s->pkt))
		return -DROP_INVALID;
	if (s->pkt.l4 != L4_ICMP_ERROR)
		return VERDICT_GO_ON;
	if (s->pkt.icmp_type == ICMP_REDIRECT)
		return -DROP_ICMP_REDIRECT;
	if (s->pkt.fragment != FRAGMENT_NONE)
		return -DROP_INVALID;
	icmp_parse_inner(ctx);
	if (pod == END_SOURCE)
		return addr_equal(&s->inner.tuple.dst, &s->pkt.tuple.src) ? VERDICT_GO_ON : -DROP_FORGED_ERROR;
	return addr_equal(&s->inner.tuple.src, &s->pkt.tuple.dst) ? VERDICT_GO_ON : -DROP_FORGED_ERROR;
}

/* Writes one 16-bit word of an ICMP message, with the message's checksum. */
EC_CALL enum verdict icmp_patch(struct __sk_buff *ctx, __u32 icmp_off, __u32 off, __be16 from, __be16 to)
{
	if (from == to)
		return VERDICT_GO_ON;
	if (bpf_l4_csum_replace(ctx, icmp_off + ICMP_CHECK, from, to, sizeof(to)) ||
	    bpf_skb_store_bytes(ctx, off, &to, sizeof(to), 0))
		return -DROP_WRITE_FAILED;
	return VERDICT_GO_ON;
}

/* Updates the quoted transport checksum, if the error quotes enough of the packet to include it. */
EC_CALL enum verdict icmp_patch_inner_check(struct __sk_buff *ctx, __u32 icmp_off, const struct inner *inner,
					    const struct inner_change *c)
{
	__u32 off = inner->l4_off + rewrite_check_offset(inner->tuple.proto);
	__be16 check, changed;
	__u32 growth;

	if (off + sizeof(check) > inner->end || bpf_skb_load_bytes(ctx, off, &check, sizeof(check)))
		return VERDICT_GO_ON;
	if (inner->tuple.proto == IPPROTO_UDP && !check)
		return VERDICT_GO_ON;
	growth = csum_growth(c->old_port, c->port);
	if (inner->tuple.proto != IPPROTO_ICMP)
		growth += csum_growth_v4(c->from, c->to);
	changed = csum_grown(check, growth);
	/* A UDP checksum of 0 would say that there is none (RFC 768). */
	if (inner->tuple.proto == IPPROTO_UDP && !changed)
		changed = 0xffff;
	return icmp_patch(ctx, icmp_off, off, check, changed);
}

/* Makes the scratch record's change to the quoted packet, with all checksums that cover it. */
EC_GLOBAL enum verdict icmp_patch_inner(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();
	struct inner_change *c;
	struct inner *inner;
	__u32 icmp_off, addr, port;
	__be16 check;

	if (!s)
		return -DROP_INVALID;
	c = &s->change;
	inner = &s->inner;
	icmp_off = s->pkt.l4_off;
	addr = inner->ip_off + (c->end == END_SOURCE ? offsetof(struct iphdr, saddr) : offsetof(struct iphdr, daddr));
	port = inner->l4_off + rewrite_port_offset(inner->tuple.proto, c->end);
	check = csum_grown(inner->ip_check, csum_growth_v4(c->from, c->to));
	return icmp_patch_inner_check(ctx, icmp_off, inner, c)
		       ?: icmp_patch(ctx, icmp_off, port, c->old_port, c->port)
		       ?: icmp_patch(ctx, icmp_off, inner->ip_off + offsetof(struct iphdr, check), inner->ip_check, check)
		       ?: icmp_patch(ctx, icmp_off, addr, c->from & 0xffff, c->to & 0xffff)
		       ?: icmp_patch(ctx, icmp_off, addr + 2, c->from >> 16, c->to >> 16);
}

/*
 * Translates an error about a masqueraded flow; half is the flow's in the direction of
 * the error. The given end of the error becomes the half's address, and the opposite end
 * of the quoted packet, which went the other way, becomes its address and port.
 */
EC_CALL enum verdict icmp_translate(struct __sk_buff *ctx, struct scratch *s, enum end end,
				    const struct snat_entry *half)
{
	const struct tuple *outer = &s->pkt.tuple, *inner = &s->inner.tuple;
	bool in = end == END_DESTINATION;

	s->change.from = addr_v4(in ? &inner->src : &inner->dst);
	s->change.to = addr_v4(&half->to_address);
	s->change.old_port = in ? inner->sport : inner->dport;
	s->change.port = half->to_port;
	s->change.end = in ? END_SOURCE : END_DESTINATION;
	return icmp_patch_inner(ctx) ?: ipv4_rewrite(ctx, end, addr_v4(in ? &outer->dst : &outer->src), s->change.to);
}

#endif
