//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * On the cgroup of all of the node's processes: what those do with sockets in the host's
 * network namespace, so that they reach Services. A datagram of an IPv6 socket to an
 * address of IPv4 meets ec_sendmsg4, all else that such a socket does the programs of
 * IPv6. ec_getpeername and ec_recvmsg may not refuse.
 */
#include "bpf/lib/sock.h"

SEC("cgroup/connect4")
int ec_connect4(struct bpf_sock_addr *ctx)
{
	return sock_send(ctx, FAMILY_IPV4, true);
}

SEC("cgroup/connect6")
int ec_connect6(struct bpf_sock_addr *ctx)
{
	return sock_send(ctx, FAMILY_IPV6, true);
}

SEC("cgroup/sendmsg4")
int ec_sendmsg4(struct bpf_sock_addr *ctx)
{
	return sock_send(ctx, FAMILY_IPV4, false);
}

SEC("cgroup/sendmsg6")
int ec_sendmsg6(struct bpf_sock_addr *ctx)
{
	return sock_send(ctx, FAMILY_IPV6, false);
}

SEC("cgroup/recvmsg4")
int ec_recvmsg4(struct bpf_sock_addr *ctx)
{
	return sock_tell(ctx, FAMILY_IPV4, false);
}

SEC("cgroup/recvmsg6")
int ec_recvmsg6(struct bpf_sock_addr *ctx)
{
	return sock_tell(ctx, FAMILY_IPV6, false);
}

SEC("cgroup/getpeername4")
int ec_getpeername4(struct bpf_sock_addr *ctx)
{
	return sock_tell(ctx, FAMILY_IPV4, true);
}

SEC("cgroup/getpeername6")
int ec_getpeername6(struct bpf_sock_addr *ctx)
{
	return sock_tell(ctx, FAMILY_IPV6, true);
}

SEC("cgroup/sock_release")
int ec_sock_release(struct bpf_sock *ctx)
{
	if (cfg.services && cfg.host_netns && bpf_get_netns_cookie(ctx) == cfg.host_netns)
		sock_forget(bpf_get_socket_cookie(ctx));
	return SOCK_PASSED;
}
