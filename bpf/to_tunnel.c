//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* tc egress of the tunnel device. */
#include <linux/if_ether.h>

#include "bpf/lib/count.h"

SEC("tc")
int ec_to_tunnel(struct __sk_buff *ctx)
{
	return finish(ctx, DIRECTION_TO_TUNNEL, ctx->protocol == bpf_htons(ETH_P_IP) ? VERDICT_STACK : -DROP_NOT_IP);
}
