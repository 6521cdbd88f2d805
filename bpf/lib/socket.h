/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Sockets, of the node or of a pod, that have the tuple of a flow to open already. */
#ifndef EC_LIB_SOCKET_H
#define EC_LIB_SOCKET_H

#include "bpf/lib/flow.h"
#include "bpf/lib/ip.h"
#include "bpf/lib/path.h"
#include "bpf/lib/scratch.h"

/*
 * Whether a socket of the node would get the replies. The lookup for TCP finds
 * TIME_WAIT sockets as well; ICMP identifiers have no sockets.
 */
EC_INLINE bool socket_has_port(struct __sk_buff *ctx, struct scratch *s, const struct tuple *reverse_key)
{
	__u32 len = ip_set_lookup(s, reverse_key, true);
	struct bpf_sock *sk = NULL;

	if (reverse_key->proto == IPPROTO_TCP)
		sk = bpf_skc_lookup_tcp(ctx, (void *)&s->lookup, len, BPF_F_CURRENT_NETNS, 0);
	else if (reverse_key->proto == IPPROTO_UDP)
		sk = bpf_sk_lookup_udp(ctx, (void *)&s->lookup, len, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	bpf_sk_release(sk);
	return true;
}

/* Whether TCP in a pod's namespace has a connection, of which the lookup of this length is a packet's tuple. */
EC_CALL bool socket_connected_tcp(struct __sk_buff *ctx, struct scratch *s, __u32 len, __u32 netns)
{
	struct bpf_sock *sk = bpf_skc_lookup_tcp(ctx, (void *)&s->lookup, len, netns, 0);
	__u32 state;

	if (!sk)
		return false;
	state = sk->state;
	bpf_sk_release(sk);
	return state != BPF_TCP_LISTEN;
}

/* The same for UDP. */
EC_CALL bool socket_connected_udp(struct __sk_buff *ctx, struct scratch *s, __u32 len, __u32 netns)
{
	struct bpf_sock *sk = bpf_sk_lookup_udp(ctx, (void *)&s->lookup, len, netns, 0);
	__u32 state;

	if (!sk)
		return false;
	state = sk->state;
	bpf_sk_release(sk);
	return state == BPF_TCP_ESTABLISHED;
}

/* Whether a socket has an address of its own, and not all of its family. */
EC_INLINE bool socket_has_address(const struct bpf_sock *sk, enum family family)
{
	if (family == FAMILY_IPV4)
		return sk->src_ip4;
	return sk->src_ip6[0] | sk->src_ip6[1] | sk->src_ip6[2] | sk->src_ip6[3];
}

/* Whether a socket of the node's is bound to the very address that the packet with this tuple goes to. */
EC_CALL bool socket_is_bound(struct __sk_buff *ctx, struct scratch *s, const struct tuple *t)
{
	__u32 len = ip_set_lookup(s, t, false);
	enum family family = s->pkt.family;
	struct bpf_sock *sk = NULL;
	bool bound;

	if (t->proto == IPPROTO_TCP)
		sk = bpf_sk_lookup_tcp(ctx, (void *)&s->lookup, len, BPF_F_CURRENT_NETNS, 0);
	else if (t->proto == IPPROTO_UDP)
		sk = bpf_sk_lookup_udp(ctx, (void *)&s->lookup, len, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	bound = socket_has_address(sk, family);
	bpf_sk_release(sk);
	return bound;
}

/* Whether a socket of the node's is connected to who has sent the packet with this tuple. */
EC_INLINE bool socket_expects(struct __sk_buff *ctx, struct scratch *s, const struct tuple *t)
{
	return socket_connected_udp(ctx, s, ip_set_lookup(s, t, false), BPF_F_CURRENT_NETNS);
}

/*
 * Whether the tuple is that of a connection past the Service already: of a pod that asks, from the port straight to the
 * backend; of a client outside, of the backend straight to the client. Listeners, and sockets for datagrams from
 * anywhere, get no other replies than they would without a Service.
 */
EC_INLINE bool socket_is_connected(struct __sk_buff *ctx, struct scratch *s, const struct tuple *reverse_key)
{
	/* Of a client outside, the backend: a pod or, 0, the host, whose namespace is the current one (0 less one). */
	struct endpoint *backend = s->owner.ifindex ? NULL : path_endpoint(&s->target.address);
	__u32 pod = backend ? backend->ifindex : s->owner.ifindex;
	struct device *dev = flow_owner(pod);
	__u32 len = ip_set_lookup(s, reverse_key, s->owner.ifindex);

	if (!dev || (!dev->netns && pod))
		return false;
	if (reverse_key->proto == IPPROTO_TCP)
		return socket_connected_tcp(ctx, s, len, dev->netns - 1);
	return reverse_key->proto == IPPROTO_UDP && socket_connected_udp(ctx, s, len, dev->netns - 1);
}

#endif
