//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* All programs as one object, so that they share one set of maps. */
#include "bpf/collect.c"
#include "bpf/from_pod.c"
#include "bpf/from_tunnel.c"
#include "bpf/from_uplink.c"
#include "bpf/sock.c"
#include "bpf/to_pod.c"
#include "bpf/to_tunnel.c"
#include "bpf/to_uplink.c"

char _license[] SEC("license") = "Dual BSD/GPL";
