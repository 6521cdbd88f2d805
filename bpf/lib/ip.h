/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* IP of either family: what differs between them is in ipv4.h and ipv6.h. */
#ifndef EC_LIB_IP_H
#define EC_LIB_IP_H

#include "bpf/lib/ipv4.h"
#include "bpf/lib/ipv6.h"
#include "bpf/lib/maps.h"

/* The family of the packet in a frame; FAMILIES: it is none of IP. */
EC_INLINE enum family ip_family(const struct __sk_buff *ctx)
{
	switch (ctx->protocol) {
	case bpf_htons(ETH_P_IP):
		return FAMILY_IPV4;
	case bpf_htons(ETH_P_IPV6):
		return FAMILY_IPV6;
	}
	return FAMILIES;
}

/* Reads the IP headers. EXTENSION_HEADERS: their chain could not be followed, but the addresses have been read. */
EC_INLINE enum verdict ip_parse(struct __sk_buff *ctx, struct scratch *s, enum family family)
{
	if (family == FAMILY_IPV6)
		return ipv6_parse(ctx, s);
	return ipv4_parse(ctx, &s->pkt) ? VERDICT_GO_ON : -DROP_INVALID;
}

/* ip_parse for a packet that arrives: a header checksum is verified, if the family has one. */
EC_INLINE enum verdict ip_parse_arrived(struct __sk_buff *ctx, struct scratch *s, enum family family)
{
	if (family == FAMILY_IPV6)
		return ipv6_parse(ctx, s);
	return ipv4_parse_arrived(ctx, &s->pkt) ? VERDICT_GO_ON : -DROP_INVALID;
}

/* Whether what pods send to the world in this family is masqueraded. */
EC_INLINE bool ip_masqueraded(__u8 family)
{
	/* The first half is a constant: where it is false, the verifier removes what depends on it. */
	return cfg.masquerade && (cfg.masquerade >> (family & 1) & 1);
}

/* Whether an address of the family lies in the prefix; len counts the family's bits. */
EC_INLINE bool ip_in(__u8 family, const struct addr *address, const struct addr *prefix, __u32 len)
{
	return family == FAMILY_IPV6 ? ipv6_in(address, prefix, len) : ipv4_in(addr_v4(address), prefix, len);
}

/* Whether it is no single host's: multicast, broadcast, or an address of a link alone. */
EC_INLINE bool ip_not_routed(__u8 family, const struct addr *a)
{
	return family == FAMILY_IPV6 ? ipv6_multicast(a) || ipv6_link_local(a) : ipv4_multicast(addr_v4(a));
}

/* Whether no host has the address, or none beyond the link. */
EC_INLINE bool ip_martian(__u8 family, const struct addr *a)
{
	return family == FAMILY_IPV6 ? ipv6_martian(a) : ipv4_martian(addr_v4(a));
}

/* Changes an address in the header, with what covers it there. */
EC_INLINE enum verdict ip_rewrite(struct __sk_buff *ctx, const struct pkt *pkt, enum end end, const struct addr *to)
{
	const struct addr *from = end == END_SOURCE ? &pkt->tuple.src : &pkt->tuple.dst;

	return pkt->family == FAMILY_IPV6 ? ipv6_rewrite(ctx, end, to)
					  : ipv4_rewrite(ctx, end, addr_v4(from), addr_v4(to));
}

/* One hop: the TTL, the MACs unless NULL, and the address that a rewrite left pending (rewrite.h). */
EC_INLINE enum verdict ip_hop(struct __sk_buff *ctx, const struct pkt *pkt, const __u8 *macs)
{
	return pkt->family == FAMILY_IPV6 ? ipv6_hop(ctx, pkt, macs) : ipv4_hop(ctx, pkt, macs);
}

/*
 * Writes a tuple, or that of its replies, as the kernel's lookups want it into the scratch record; returns its length.
 */
EC_INLINE __u32 ip_set_lookup(struct scratch *s, const struct tuple *t, bool of_replies)
{
	const struct addr *src = of_replies ? &t->dst : &t->src, *dst = of_replies ? &t->src : &t->dst;
	__be16 sport = of_replies ? t->dport : t->sport, dport = of_replies ? t->sport : t->dport;

	if (!addr_is_v4(src)) {
		s->lookup.v6.src = *src;
		s->lookup.v6.dst = *dst;
		s->lookup.v6.sport = sport;
		s->lookup.v6.dport = dport;
		return sizeof(s->lookup.v6);
	}
	s->lookup.v4.src = addr_v4(src);
	s->lookup.v4.dst = addr_v4(dst);
	s->lookup.v4.sport = sport;
	s->lookup.v4.dport = dport;
	return sizeof(s->lookup.v4);
}

#endif
