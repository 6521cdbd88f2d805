/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Services for the node's own processes: where one sends to a Service, its socket gets the
 * address of a backend, and what it is told about its peer is the Service's again. The
 * packets are to the backend from the beginning. The map sockets remembers both ends.
 *
 * These programs run in process context, where others may interrupt them: they have no
 * scratch record.
 */
#ifndef EC_LIB_SOCK_H
#define EC_LIB_SOCK_H

#include "bpf/lib/affinity.h"
#include "bpf/lib/backend.h"
#include "bpf/lib/frontend.h"
#include "bpf/lib/hostport.h"

/* What a program on a cgroup returns. */
enum sock_result {
	SOCK_REFUSED, /* the system call fails, with EPERM unless the program says otherwise */
	SOCK_PASSED,
};

/* Where what a process sends goes; less than SOCK_STRAIGHT is a refusal, by its negated reason (enum drop_reason). */
enum sock_course {
	SOCK_LEAST = -DROP_REASONS,
	SOCK_STRAIGHT = 0, /* to the address that the process has named */
	SOCK_TO_SERVICE,   /* to a backend of the Service that has that address */
};

/* An address and port that a socket is to be connected to, or to send to, or is told. */
struct sock_peer {
	struct addr address;
	__be16 port;
	__u8 proto;
	bool connects;
	__u64 cookie;
};

/* Whether the socket is one of the node's own, and its protocol one that is translated. */
EC_INLINE bool sock_is_ours(struct bpf_sock_addr *ctx)
{
	return cfg.services && cfg.host_netns && (ctx->protocol == IPPROTO_TCP || ctx->protocol == IPPROTO_UDP) &&
	       bpf_get_netns_cookie(ctx) == cfg.host_netns;
}

/* Reads the address that the program is about. One of IPv6 may be IPv4's: the form is the maps' (::ffff:a.b.c.d). */
EC_INLINE void sock_read(struct bpf_sock_addr *ctx, enum family family, struct sock_peer *peer)
{
	__u32 *w = (__u32 *)peer->address.bytes;

	if (family == FAMILY_IPV4) {
		addr_set_v4(&peer->address, ctx->user_ip4);
	} else {
		w[0] = ctx->user_ip6[0];
		w[1] = ctx->user_ip6[1];
		w[2] = ctx->user_ip6[2];
		w[3] = ctx->user_ip6[3];
	}
	peer->port = ctx->user_port;
	peer->proto = ctx->protocol;
	peer->cookie = bpf_get_socket_cookie(ctx);
}

/* Replaces the address that the program is about. */
EC_INLINE void sock_write(struct bpf_sock_addr *ctx, enum family family, const struct addr *address, __be16 port)
{
	const __u32 *w = (const __u32 *)address->bytes;

	if (family == FAMILY_IPV4) {
		ctx->user_ip4 = w[3];
	} else {
		ctx->user_ip6[0] = w[0];
		ctx->user_ip6[1] = w[1];
		ctx->user_ip6[2] = w[2];
		ctx->user_ip6[3] = w[3];
	}
	ctx->user_port = port;
}

/* Whether an address is the loopback interface's; the unspecified one means that as well. */
EC_INLINE bool sock_is_loopback(const struct addr *a)
{
	const __u32 *w = (const __u32 *)a->bytes;

	if (addr_is_v4(a))
		return a->bytes[12] == 127 || !w[3];
	return !(w[0] | w[1] | w[2]) && (w[3] & ~bpf_htonl(1)) == 0;
}

/*
 * Whether a datagram that no socket is connected for may be an answer, though the address is a Service's: pods and
 * other nodes have theirs, whoever claims it. Who asks a Service there gets it from that node.
 */
EC_CALL bool sock_may_answer(const struct sock_peer *peer, __u32 flags)
{
	struct destination *to;

	if (peer->connects || (flags & SERVICE_CLUSTER_IP))
		return false;
	to = path_destination(&peer->address);
	return to &&
	       (to->kind == DESTINATION_POD_CIDR || to->kind == DESTINATION_LOCAL || to->kind == DESTINATION_NODE);
}

/*
 * Whether a socket of the node's is bound to the very address that a process asks for (socket_is_bound). The kernel
 * takes the unspecified one for loopback's.
 */
EC_CALL bool sock_is_bound(struct bpf_sock_addr *ctx, const struct sock_peer *peer)
{
	const __u32 *w = (const __u32 *)peer->address.bytes;
	enum family family = addr_is_v4(&peer->address) ? FAMILY_IPV4 : FAMILY_IPV6;
	union lookup lookup = {};
	__u32 len = sizeof(lookup.v6);
	struct bpf_sock *sk;
	bool bound;

	if (family == FAMILY_IPV4) {
		lookup.v4.dst = w[3] ?: bpf_htonl(0x7f000001);
		lookup.v4.dport = peer->port;
		len = sizeof(lookup.v4);
	} else {
		lookup.v6.dst = peer->address;
		if (addr_is_zero(&lookup.v6.dst))
			lookup.v6.dst.bytes[sizeof(lookup.v6.dst) - 1] = 1;
		lookup.v6.dport = peer->port;
	}
	if (peer->proto == IPPROTO_TCP)
		sk = bpf_sk_lookup_tcp(ctx, (void *)&lookup, len, BPF_F_CURRENT_NETNS, 0);
	else
		sk = bpf_sk_lookup_udp(ctx, (void *)&lookup, len, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	bound = socket_has_address(sk, family);
	bpf_sk_release(sk);
	return bound;
}

/*
 * Finds the host port that a process asks for, and makes its pod the target (hostport_find). Of loopback, ports of all
 * addresses have the usual address alone: others, like that of a resolver, are for who is bound to them.
 */
EC_CALL bool sock_host_port(struct bpf_sock_addr *ctx, const struct sock_peer *peer, struct target *t)
{
	const struct addr any = addr_any_like(&peer->address);
	struct host_port_key key = {.address = peer->address, .port = peer->port, .proto = peer->proto};
	const __u8 *v4 = &peer->address.bytes[12];

	if (addr_equal(&key.address, &any) || !hostport_take(t, &key)) {
		if (addr_is_v4(&peer->address) && v4[0] == 127 && (v4[1] | v4[2] | (v4[3] ^ 1)))
			return false;
		key.address = any;
		if (!hostport_take(t, &key))
			return false;
	}
	return !sock_is_bound(ctx, peer);
}

/* Finds the frontend that a process asks for, if it asks for a Service or a host port; the latter's pod is the target.
 */
EC_CALL enum sock_course sock_frontend(struct bpf_sock_addr *ctx, const struct sock_peer *peer,
				       struct service *frontend, struct target *t)
{
	struct service_key key = {.address = peer->address, .port = peer->port, .proto = peer->proto};
	__u32 flags = SERVICE_OWN;

	if (!sock_is_loopback(&peer->address)) {
		flags = frontend_flags(&peer->address);
		if (!flags || sock_may_answer(peer, flags))
			return SOCK_STRAIGHT;
		if (frontend_copy(&key, frontend))
			return SOCK_TO_SERVICE;
	} else if (cfg.loopback & 1U << (addr_is_v4(&peer->address) ? FAMILY_IPV4 : FAMILY_IPV6)) {
		flags |= SERVICE_NODE;
	}
	if (hostport_may_be(flags) && sock_host_port(ctx, peer, t)) {
		*frontend = (struct service){.set = SET_HOST_PORT};
		return SOCK_TO_SERVICE;
	}
	key.address = addr_any_like(&peer->address);
	if ((flags & SERVICE_NODE) && frontend_copy(&key, frontend))
		return SOCK_TO_SERVICE;
	return flags & SERVICE_CLUSTER_IP ? -DROP_NO_SERVICE_PORT : SOCK_STRAIGHT;
}

/* Whether the node is among the sources that a load balancer's address is for: its InternalIP stands for it. */
EC_CALL bool sock_in_range(const struct addr *address, __u32 set)
{
	const struct config *config = config_get();
	struct source_range_key key = {.prefix_len = 8 * (sizeof(key.set) + sizeof(key.source)), .set = set};

	if (!config)
		return false;
	key.source = config->node_addresses[addr_is_v4(address) ? FAMILY_IPV4 : FAMILY_IPV6];
	return bpf_map_lookup_elem(&source_range, &key);
}

/* Chooses a backend for the node. That of a host port is the target already. */
EC_CALL enum verdict sock_choose(struct target *t, const struct service *frontend)
{
	__u32 number = frontend->set, kept = 0;
	struct service_set *set = bpf_map_lookup_elem(&sets, &number);
	bool local = frontend->flags & SERVICE_LOCAL;
	const struct addr node = {};
	enum verdict verdict = VERDICT_GO_ON;

	if (number == SET_HOST_PORT)
		return VERDICT_GO_ON;
	if (!set || !number)
		return -DROP_NO_BACKEND;
	if (set->affinity)
		kept = affinity_find_client(&node, number, set->affinity, local);
	if (!kept || !backend_take(t, kept, number, BACKEND_SERVING))
		verdict = backend_choose(t, number, set, local);
	if (!verdict && set->affinity)
		affinity_keep_client(&node, t);
	return verdict;
}

/*
 * Finds what is known of the socket and a Service, by its frontend, or else by the backend's
 * address and port. The key is that, or where it is to be noted.
 */
EC_CALL const struct socket_entry *sock_find(const struct sock_peer *peer, bool frontend, struct socket_key *key)
{
	const struct socket_entry *e;

	key->cookie = peer->cookie;
	for (int i = 0; i < SOCKET_PEERS; i++) {
		key->number = i;
		e = bpf_map_lookup_elem(&sockets, key);
		if (!e)
			return NULL;
		if (peer->port == (frontend ? e->frontend_port : e->backend_port) &&
		    addr_equal(&peer->address, frontend ? &e->frontend_address : &e->backend_address))
			return e;
	}
	/* The first may be of a connected socket, to which it is worth more. */
	key->number = 1 + bpf_get_prandom_u32() % (SOCKET_PEERS - 1);
	return NULL;
}

/* The backend of earlier datagrams to the same frontend, while it answers; false: there is none. */
EC_CALL bool sock_goes_on(const struct socket_entry *e, __u32 set, struct target *t)
{
	const struct backend *b;

	if (!e || e->set != set)
		return false;
	if (set == SET_HOST_PORT)
		return e->generation == t->generation && e->backend_port == t->port;
	b = backend_get(e->backend);
	return b && backend_is(b, set, e->generation, BACKEND_GOES_ON) &&
	       backend_take(t, e->backend, set, BACKEND_GOES_ON);
}

/* Remembers that the target is behind what the process has named. */
EC_CALL void sock_remember(const struct sock_peer *peer, const struct target *t, const struct socket_key *key)
{
	struct socket_entry entry = {
		.frontend_address = peer->address,
		.frontend_port = peer->port,
		.backend_address = t->address,
		.backend_port = t->port,
		.proto = peer->proto,
		.connected = peer->connects,
		.set = t->set,
		.backend = t->backend,
		.generation = t->generation,
	};

	bpf_map_update_elem(&sockets, key, &entry, BPF_ANY);
}

/* Forgets a socket. */
EC_CALL void sock_forget(__u64 cookie)
{
	struct socket_key key = {.cookie = cookie};

	for (int i = 0; i < SOCKET_PEERS; i++) {
		key.number = i;
		if (bpf_map_delete_elem(&sockets, &key))
			return;
	}
}

/* Whether kube-proxy has what is new to the frontend, if there is one. It has no host ports. */
EC_CALL bool sock_yields(const struct sock_peer *peer, const struct service *frontend)
{
	return frontend->set != SET_HOST_PORT &&
	       config_yields(config_get(), addr_is_v4(&peer->address) ? FAMILY_IPV4 : FAMILY_IPV6);
}

/* A process connects, or sends a datagram. If that goes to a Service or a host port, its backend is the target. */
EC_CALL enum sock_course sock_turn(struct bpf_sock_addr *ctx, const struct sock_peer *peer, struct target *t)
{
	const struct socket_entry *e = NULL;
	struct socket_key key = {.cookie = peer->cookie};
	struct service frontend = {}; /* for verifiers that do not see that a course to it has set it */
	enum sock_course course = sock_frontend(ctx, peer, &frontend, t);
	bool yields = course != SOCK_STRAIGHT && sock_yields(peer, &frontend);
	int refusal;

	if (yields && (peer->connects || course != SOCK_TO_SERVICE))
		course = SOCK_STRAIGHT;
	/* Resolvers connect datagram sockets to an address only to learn which of their own they would have. */
	if (course == -DROP_NO_SERVICE_PORT && peer->connects && peer->proto == IPPROTO_UDP)
		course = SOCK_STRAIGHT;
	if (course == SOCK_STRAIGHT && peer->connects)
		sock_forget(peer->cookie);
	if (course != SOCK_TO_SERVICE)
		return course;
	if (!yields && (frontend.flags & SERVICE_RANGES) && !sock_in_range(&peer->address, frontend.set))
		return -DROP_SOURCE_RANGE;
	if (!peer->connects)
		e = sock_find(peer, true, &key);
	if (sock_goes_on(e, frontend.set, t))
		return SOCK_TO_SERVICE;
	if (yields)
		return SOCK_STRAIGHT;
	refusal = sock_choose(t, &frontend);
	if (refusal)
		return refusal;
	sock_remember(peer, t, &key);
	return SOCK_TO_SERVICE;
}

/* Counts a refusal, and says what the process is told: ECONNREFUSED where a packet would be answered, else EPERM. */
EC_CALL enum sock_result sock_refuse(__u32 reason)
{
	__u32 key = DIRECTION_SOCKET * DROP_SLOTS + (reason & (DROP_SLOTS - 1));
	struct counter *c = bpf_map_lookup_elem(&drops, &key);

	/* Another process on this CPU may be here at the same time. */
	if (c)
		__sync_fetch_and_add(&c->packets, 1);
	if (reason == DROP_NO_BACKEND || reason == DROP_NO_SERVICE_PORT)
		bpf_set_retval(-EC_ECONNREFUSED);
	return SOCK_REFUSED;
}

/* A process connects, or sends a datagram. */
EC_INLINE enum sock_result sock_send(struct bpf_sock_addr *ctx, enum family family, bool connects)
{
	struct sock_peer peer = {.connects = connects};
	struct target t = {};
	enum sock_course course;

	if (!sock_is_ours(ctx))
		return SOCK_PASSED;
	sock_read(ctx, family, &peer);
	course = sock_turn(ctx, &peer, &t);
	if (course < 0)
		return sock_refuse(-course);
	if (course == SOCK_TO_SERVICE)
		sock_write(ctx, family, &t.address, t.port);
	return SOCK_PASSED;
}

/*
 * A process is told who has sent a datagram, or whom its socket is connected to: the Service,
 * if one stands for that.
 */
EC_INLINE enum sock_result sock_tell(struct bpf_sock_addr *ctx, enum family family, bool connected)
{
	struct sock_peer peer = {};
	const struct socket_entry *e;
	struct socket_key key = {};

	if (!sock_is_ours(ctx))
		return SOCK_PASSED;
	sock_read(ctx, family, &peer);
	e = sock_find(&peer, false, &key);
	if (e && e->connected >= connected)
		sock_write(ctx, family, &e->frontend_address, e->frontend_port);
	return SOCK_PASSED;
}

#endif
