/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The tunnel: VXLAN (RFC 7348) through one flow-based device. A program gives each
 * packet a key, which says where the device sends it; what arrives has the key that it
 * came with. VXLAN authenticates nobody: the outer source is all that identifies the sender.
 */
#ifndef EC_LIB_TUNNEL_H
#define EC_LIB_TUNNEL_H

#include "bpf/lib/ip.h"
#include "bpf/lib/maps.h"

enum {
	TUNNEL_TTL = 64,    /* of outer packets: what is left of the inner TTL is no measure of the way between nodes */
	TUNNEL_DSCP = 0xfc, /* what of the TOS is copied (RFC 2983, uniform model); ECN is the kernel's (RFC 6040) */
};

/* Whether the packet, as far as its ports have been read, goes to the nodes' tunnel port. */
EC_INLINE bool tunnel_is_outer(const struct pkt *pkt)
{
	return pkt->l4 == L4_FLOW && pkt->tuple.proto == IPPROTO_UDP && pkt->tuple.dport == bpf_htons(cfg.tunnel_port);
}

/* Whether a plain datagram has another destination port. A look at it costs less than reading the header does. */
EC_INLINE bool tunnel_other_port(const struct __sk_buff *ctx, const struct pkt *pkt)
{
	const struct udphdr *udp = (void *)(long)ctx->data + IP_OFF + sizeof(struct iphdr);

	return pkt->family == FAMILY_IPV4 && !pkt->options && pkt->fragment == FRAGMENT_NONE &&
	       (void *)(udp + 1) <= (void *)(long)ctx->data_end && udp->dest != bpf_htons(cfg.tunnel_port);
}

/* Whether a packet of a pod may go to a node: to its tunnel port only nodes send. */
EC_INLINE enum verdict tunnel_guard(struct __sk_buff *ctx, struct pkt *pkt)
{
	if (pkt->tuple.proto != IPPROTO_UDP || tunnel_other_port(ctx, pkt))
		return VERDICT_GO_ON;
	if (!pkt_l4(ctx, pkt))
		return -DROP_INVALID;
	return tunnel_is_outer(pkt) ? -DROP_TUNNEL_PORT : VERDICT_GO_ON;
}

/* Whether a packet on the tunnel device is of a kind that the tunnel carries. */
EC_INLINE enum verdict tunnel_carries(const struct __sk_buff *ctx)
{
	if (ctx->vlan_present)
		return -DROP_NOT_IP;
	return ip_family(ctx) == FAMILIES ? -DROP_NOT_IP : VERDICT_GO_ON;
}

/* Writes the two ends of the tunnel, of one family, into the key; returns the flags that the family needs. */
EC_INLINE __u64 tunnel_ends(struct bpf_tunnel_key *key, const struct addr *source, const struct addr *node)
{
	bool has_source = !addr_is_zero(source);

	if (!addr_is_v4(node)) {
		__builtin_memcpy(key->remote_ipv6, node, sizeof(*node));
		if (has_source)
			__builtin_memcpy(key->local_ipv6, source, sizeof(*source));
		return BPF_F_TUNINFO_IPV6;
	}
	key->remote_ipv4 = bpf_ntohl(addr_v4(node));
	if (has_source)
		key->local_ipv4 = bpf_ntohl(addr_v4(source));
	return cfg.tunnel_checksum ? 0 : BPF_F_ZERO_CSUM_TX;
}

/*
 * Gives the packet the key that has the device send it to a node, with the inner
 * destination MAC unless that is zero, and our mark, which the outer packet keeps.
 * The outer header never forbids fragments: an error about it would reach no pod.
 */
EC_CALL enum verdict tunnel_encap(struct __sk_buff *ctx, __u8 tos, const struct addr *node, const __u8 *mac)
{
	const __be16 *part = (const void *)mac;
	struct bpf_tunnel_key key = {
		.tunnel_id = cfg.tunnel_vni,
		.tunnel_tos = tos & TUNNEL_DSCP,
		.tunnel_ttl = TUNNEL_TTL,
	};
	struct config *config = config_get();
	__u64 flags;

	if (!config)
		return -DROP_INVALID;
	flags = tunnel_ends(&key, &config->tunnel[addr_is_v4(node) ? FAMILY_IPV4 : FAMILY_IPV6].source, node);
	if ((part[0] | part[1] | part[2]) && bpf_skb_store_bytes(ctx, 0, mac, ETH_ALEN, 0))
		return -DROP_WRITE_FAILED;
	if (bpf_skb_set_tunnel_key(ctx, &key, sizeof(key), flags))
		return -DROP_TUNNEL_FAILED;
	ctx->mark |= cfg.mark;
	return VERDICT_GO_ON;
}

/* Sends the packet through the tunnel device with this index. */
EC_INLINE enum verdict tunnel_redirect(struct __sk_buff *ctx, __u32 ifindex, __u8 tos, const struct addr *node,
				       const __u8 *mac)
{
	enum verdict verdict = tunnel_encap(ctx, tos, node, mac);

	if (verdict)
		return verdict;
	bpf_redirect(ifindex, 0);
	return VERDICT_FORWARDED;
}

/* Whether a packet is ec_to_tunnel's own answer to the stack: what has come through the tunnel has a key. */
EC_INLINE bool tunnel_answers(struct __sk_buff *ctx)
{
	struct bpf_tunnel_key key;

	return (ctx->mark & cfg.mark) && bpf_skb_get_tunnel_key(ctx, &key, sizeof(key), 0) &&
	       bpf_skb_get_tunnel_key(ctx, &key, sizeof(key), BPF_F_TUNINFO_IPV6);
}

/* The outer source of a packet that came through the tunnel, and with our VNI. */
EC_CALL enum verdict tunnel_sender(struct __sk_buff *ctx, struct addr *sender)
{
	struct bpf_tunnel_key key;

	if (!bpf_skb_get_tunnel_key(ctx, &key, sizeof(key), 0))
		addr_set_v4(sender, bpf_htonl(key.remote_ipv4));
	else if (!bpf_skb_get_tunnel_key(ctx, &key, sizeof(key), BPF_F_TUNINFO_IPV6))
		__builtin_memcpy(sender, key.remote_ipv6, sizeof(*sender));
	else
		return -DROP_TUNNEL_FAILED;
	if (key.tunnel_id != cfg.tunnel_vni)
		return -DROP_TUNNEL_VNI;
	/* Entries that an older agent has left have no node: a sender without an address would match them. */
	return addr_is_zero(sender) ? -DROP_TUNNEL_NODE : VERDICT_GO_ON;
}

#endif
