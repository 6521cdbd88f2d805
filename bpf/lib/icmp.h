/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * ICMP errors (RFC 792, RFC 1191; RFC 4443 for IPv6) about masqueraded flows: the quoted
 * packet is translated together with the error (RFC 5508, section 4), and the error
 * takes the same way as the flow.
 */
#ifndef EC_LIB_ICMP_H
#define EC_LIB_ICMP_H

#include "bpf/lib/rewrite.h"
#include "bpf/lib/scratch.h"

/* Reads the quoted packet's ports. False: its protocol, or kind of ICMP message, has no flows. */
EC_INLINE bool icmp_inner_ports(struct inner *inner, __u8 family, const __be16 *l4)
{
	const struct icmp_header *icmp = (const void *)l4;

	if (!pkt_is_icmp(family, inner->tuple.proto)) {
		inner->tuple.sport = l4[0];
		inner->tuple.dport = l4[1];
		return pkt_proto_known(family, inner->tuple.proto);
	}
	if (pkt_is_echo(family, icmp->type))
		inner->tuple.sport = icmp->id;
	else
		inner->tuple.dport = icmp->id;
	return pkt_is_echo(family, icmp->type) || pkt_is_echo_reply(family, icmp->type);
}

/* Reads the quoted IPv4 header. False: there is none, or no transport header follows it directly. */
EC_INLINE bool icmp_inner_ipv4(struct __sk_buff *ctx, struct inner *inner)
{
	struct iphdr ip;

	if (inner->ip_off + sizeof(ip) > inner->end || bpf_skb_load_bytes(ctx, inner->ip_off, &ip, sizeof(ip)) ||
	    ip.version != 4)
		return false;
	inner->l4_off = inner->ip_off + ip.ihl * 4;
	inner->ip_check = ip.check;
	inner->tuple.proto = ip.protocol;
	addr_set_v4(&inner->tuple.src, ip.saddr);
	addr_set_v4(&inner->tuple.dst, ip.daddr);
	return ip.ihl >= 5 && !(ip.frag_off & bpf_htons(IP_FRAGMENT_OFFSET));
}

/* The same for IPv6, with its extension headers. */
EC_INLINE bool icmp_inner_ipv6(struct __sk_buff *ctx, struct scratch *s)
{
	struct inner *inner = &s->inner;
	__u32 addresses = inner->ip_off + offsetof(struct ipv6hdr, saddr);
	__u8 start[8];

	inner->l4_off = inner->ip_off + sizeof(struct ipv6hdr);
	if (inner->l4_off > inner->end || bpf_skb_load_bytes(ctx, inner->ip_off, start, sizeof(start)) ||
	    start[0] >> 4 != 6)
		return false;
	/* The addresses are adjacent, in a tuple as in the header. */
	if (bpf_skb_load_bytes(ctx, addresses, &inner->tuple, 2 * sizeof(struct addr)))
		return false;
	s->chain.off = inner->l4_off;
	s->chain.end = inner->end;
	s->chain.next = start[offsetof(struct ipv6hdr, nexthdr)];
	s->chain.may_be_jumbo = 0;
	if (ipv6_is_extension(s->chain.next) && (ipv6_follow(ctx) || s->chain.fragment == FRAGMENT_LATER))
		return false;
	inner->l4_off = s->chain.off;
	inner->tuple.proto = s->chain.next;
	return true;
}

/*
 * Reads the quoted packet into the scratch record. Returns 0 if its flow cannot be in
 * a table; the addresses are read even then, and zero only if they are not quoted.
 */
EC_GLOBAL int icmp_parse_inner(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();
	struct inner *inner;
	__be16 l4[4];

	if (!s)
		return 0;
	inner = &s->inner;
	__builtin_memset(inner, 0, sizeof(*inner));
	inner->ip_off = s->pkt.l4_off + sizeof(struct icmp_header);
	inner->end = IP_OFF + s->pkt.ip_len;
	if (s->pkt.family == FAMILY_IPV6 ? !icmp_inner_ipv6(ctx, s) : !icmp_inner_ipv4(ctx, inner))
		return 0;
	if (inner->l4_off + sizeof(l4) > inner->end || bpf_skb_load_bytes(ctx, inner->l4_off, l4, sizeof(l4)))
		return 0;
	inner->known = icmp_inner_ports(inner, s->pkt.family, l4);
	return inner->known;
}

/* Whether a kind of ICMP message is of a link alone: neighbour discovery (RFC 4861) and multicast listeners'. */
EC_INLINE bool icmp_of_link(__u8 family, __u8 type)
{
	return family == FAMILY_IPV6 &&
	       ((type >= ICMPV6_MLD_QUERY && type <= ICMPV6_REDIRECT) || type == ICMPV6_MLD2_REPORT);
}

EC_INLINE bool icmp_is_redirect(__u8 family, __u8 type)
{
	return type == (family == FAMILY_IPV6 ? ICMPV6_REDIRECT : ICMP_REDIRECT);
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
	if (s->pkt.fragment != FRAGMENT_LATER && icmp_is_redirect(s->pkt.family, s->pkt.icmp_type))
		return -DROP_ICMP_REDIRECT;
	if (s->pkt.fragment != FRAGMENT_LATER && icmp_of_link(s->pkt.family, s->pkt.icmp_type))
		return -DROP_LINK_SCOPE;
	if (s->pkt.l4 != L4_ICMP_ERROR)
		return VERDICT_GO_ON;
	if (s->pkt.fragment != FRAGMENT_NONE)
		return -DROP_INVALID;
	icmp_parse_inner(ctx);
	if (pod == END_SOURCE)
		return addr_equal(&s->inner.tuple.dst, &s->pkt.tuple.src) ? VERDICT_GO_ON : -DROP_FORGED_ERROR;
	return addr_equal(&s->inner.tuple.src, &s->pkt.tuple.dst) ? VERDICT_GO_ON : -DROP_FORGED_ERROR;
}

/* A router's advertisement (RFC 4861, 4.2). */
#define ICMPV6_ROUTER_ADVERTISEMENT 134

/*
 * Whether the stack may get an ICMP packet from a container on its link: no error, which would tell it something about
 * packets to anybody, as that the way to another node is narrow, nor that the container is a router, by which a host
 * that does not forward would go. Whatever is not known to be no error is taken for one.
 */
EC_INLINE enum verdict icmp_check_link(struct __sk_buff *ctx, struct pkt *pkt)
{
	__u8 family = pkt->family, type;

	if (!pkt_l4(ctx, pkt))
		return -DROP_INVALID;
	type = pkt->icmp_type;
	if (pkt->fragment == FRAGMENT_LATER)
		return VERDICT_STACK;
	if (icmp_is_redirect(family, type))
		return -DROP_ICMP_REDIRECT;
	if (family == FAMILY_IPV6 && type == ICMPV6_ROUTER_ADVERTISEMENT)
		return -DROP_LINK_SCOPE;
	if (icmp_of_link(family, type) || pkt_is_echo(family, type) || pkt_is_echo_reply(family, type))
		return VERDICT_STACK;
	return -DROP_FORGED_ERROR;
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
	if (cfg.services && inner->tuple.proto == IPPROTO_SCTP)
		return VERDICT_GO_ON;
	growth = csum_growth(c->old_port, c->port);
	if (rewrite_covers_addresses(inner->tuple.proto))
		growth += csum_growth_address(&c->from, &c->to);
	changed = csum_grown(check, growth);
	/* A UDP checksum of 0 would say that there is none (RFC 768). */
	if (inner->tuple.proto == IPPROTO_UDP && !changed)
		changed = 0xffff;
	return icmp_patch(ctx, icmp_off, off, check, changed);
}

/* Writes an address of the quoted packet, with the message's checksum and, of IPv4, the quoted header's. */
EC_CALL enum verdict icmp_patch_inner_address(struct __sk_buff *ctx, const struct scratch *s)
{
	const struct inner_change *c = &s->change;
	const struct inner *inner = &s->inner;
	__u32 icmp_off = s->pkt.l4_off, growth = csum_growth_address(&c->from, &c->to), off = inner->ip_off, len;
	const __u8 *to = c->to.bytes;
	enum verdict verdict;

	if (s->pkt.family == FAMILY_IPV6) {
		off += c->end == END_SOURCE ? offsetof(struct ipv6hdr, saddr) : offsetof(struct ipv6hdr, daddr);
		if (bpf_l4_csum_replace(ctx, icmp_off + ICMP_CHECK, 0, growth, 0))
			return -DROP_WRITE_FAILED;
		return bpf_skb_store_bytes(ctx, off, to, sizeof(c->to), 0) ? -DROP_WRITE_FAILED : VERDICT_GO_ON;
	}
	verdict = icmp_patch(ctx, icmp_off, off + offsetof(struct iphdr, check), inner->ip_check,
			     csum_grown(inner->ip_check, growth));
	off += c->end == END_SOURCE ? offsetof(struct iphdr, saddr) : offsetof(struct iphdr, daddr);
	len = sizeof(__be32);
	to += sizeof(c->to) - len;
	if (verdict || bpf_l4_csum_replace(ctx, icmp_off + ICMP_CHECK, 0, growth, 0) ||
	    bpf_skb_store_bytes(ctx, off, to, len, 0))
		return verdict ?: -DROP_WRITE_FAILED;
	return VERDICT_GO_ON;
}

/* Makes the scratch record's change to the quoted packet, with all checksums that cover it. */
EC_GLOBAL enum verdict icmp_patch_inner(struct __sk_buff *ctx)
{
	struct scratch *s = scratch_get();
	struct inner_change *c;
	struct inner *inner;
	__u32 port;

	if (!s)
		return -DROP_INVALID;
	c = &s->change;
	inner = &s->inner;
	port = inner->l4_off + rewrite_port_offset(inner->tuple.proto, c->end);
	return icmp_patch_inner_check(ctx, s->pkt.l4_off, inner, c)
		       ?: icmp_patch(ctx, s->pkt.l4_off, port, c->old_port, c->port)
		       ?: icmp_patch_inner_address(ctx, s);
}

/* Writes the address of the error itself; the checksum of ICMPv6 covers it. */
EC_INLINE enum verdict icmp_rewrite_outer(struct __sk_buff *ctx, const struct pkt *pkt, enum end end,
					  const struct addr *to)
{
	const struct addr *from = end == END_SOURCE ? &pkt->tuple.src : &pkt->tuple.dst;

	if (pkt->family == FAMILY_IPV6 && !rewrite_sum_address(ctx, pkt->l4_off + ICMP_CHECK, from, to, 0))
		return -DROP_WRITE_FAILED;
	return ip_rewrite(ctx, pkt, end, to);
}

/*
 * Translates an error about a masqueraded flow; half is the flow's in the direction of
 * the error. The given end of the error becomes the half's address, and the opposite end
 * of the quoted packet, which went the other way, becomes its address and port.
 */
EC_CALL enum verdict icmp_translate(struct __sk_buff *ctx, struct scratch *s, enum end end,
				    const struct snat_entry *half)
{
	const struct tuple *inner = &s->inner.tuple;
	bool in = end == END_DESTINATION;

	s->change.from = in ? inner->src : inner->dst;
	s->change.to = half->to_address;
	s->change.old_port = in ? inner->sport : inner->dport;
	s->change.port = half->to_port;
	s->change.end = in ? END_SOURCE : END_DESTINATION;
	return icmp_patch_inner(ctx) ?: icmp_rewrite_outer(ctx, &s->pkt, end, &s->change.to);
}

#endif
