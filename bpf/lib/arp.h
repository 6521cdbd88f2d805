/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* ARP (RFC 826) from a pod: the gateway's address is answered here, the rest is dropped. */
#ifndef EC_LIB_ARP_H
#define EC_LIB_ARP_H

#include "bpf/lib/count.h"
#include "bpf/lib/pkt.h"

/* 169.254.1.1, which no host has. */
#define ARP_GATEWAY bpf_htonl(0xa9fe0101)

/* include/uapi/linux/if_arp.h */
enum {
	ARP_HARDWARE_ETHERNET = 1,
	ARP_REQUEST = 1,
	ARP_REPLY = 2,
};

struct arp_ethernet {
	struct ethhdr eth;
	__be16 hardware;
	__be16 protocol;
	__u8 hardware_len;
	__u8 protocol_len;
	__be16 operation;
	__u8 sender_mac[6];
	__u8 sender_ip[4];
	__u8 target_mac[6];
	__u8 target_ip[4];
};
_Static_assert(sizeof(struct arp_ethernet) == 42, "arp_ethernet mirrors the packet");

EC_INLINE bool arp_asks_for_gateway(const struct arp_ethernet *arp)
{
	__be32 target;

	__builtin_memcpy(&target, arp->target_ip, sizeof(target));
	return arp->hardware == bpf_htons(ARP_HARDWARE_ETHERNET) && arp->protocol == bpf_htons(ETH_P_IP) &&
	       arp->hardware_len == 6 && arp->protocol_len == 4 && arp->operation == bpf_htons(ARP_REQUEST) &&
	       target == ARP_GATEWAY;
}

/* Turns a request for the gateway into its reply, and sends it back. */
EC_CALL enum verdict arp_answer(struct __sk_buff *ctx, const struct device *dev)
{
	struct arp_ethernet arp;

	if (bpf_skb_load_bytes(ctx, 0, &arp, sizeof(arp)))
		return -DROP_INVALID;
	if (!arp_asks_for_gateway(&arp))
		return -DROP_NOT_IP;
	__builtin_memcpy(arp.eth.h_dest, arp.eth.h_source, 6);
	__builtin_memcpy(arp.eth.h_source, dev->host_mac, 6);
	arp.operation = bpf_htons(ARP_REPLY);
	__builtin_memcpy(arp.target_mac, arp.sender_mac, 6);
	__builtin_memcpy(arp.target_ip, arp.sender_ip, 4);
	__builtin_memcpy(arp.sender_mac, dev->host_mac, 6);
	*(__be32 *)arp.sender_ip = ARP_GATEWAY;
	if (bpf_skb_store_bytes(ctx, 0, &arp, sizeof(arp), 0))
		return -DROP_WRITE_FAILED;
	bpf_redirect(ctx->ifindex, 0);
	return VERDICT_ANSWERED;
}

#endif
