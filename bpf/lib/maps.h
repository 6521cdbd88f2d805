/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * All pinned maps, each declared in maps/NAME/NAME.h, and the programs' constants. The
 * loader sets the capacities of the flow tables.
 */
#ifndef EC_LIB_MAPS_H
#define EC_LIB_MAPS_H

#include "bpf/lib/compiler.h"
#include "maps/affinity/affinity.h"
#include "maps/backends/backends.h"
#include "maps/bridges/bridges.h"
#include "maps/config/config.h"
#include "maps/conntrack/conntrack.h"
#include "maps/destinations/destinations.h"
#include "maps/devices/devices.h"
#include "maps/drops/drops.h"
#include "maps/endpoints/endpoints.h"
#include "maps/fragments/fragments.h"
#include "maps/hostports/hostports.h"
#include "maps/journal/journal.h"
#include "maps/ports/ports.h"
#include "maps/services/services.h"
#include "maps/snat/snat.h"
#include "maps/sources/sources.h"
#include "maps/sockets/sockets.h"
#include "maps/traffic/traffic.h"
#include "maps/uplinks/uplinks.h"
#include "maps/usage/usage.h"

/* Set by the loader before the verifier sees the programs. */
volatile const struct node_config cfg = {
	.masquerade = 1,
	.mark = 0x00800000,
	.snat_ports = {{.first = 49152, .count = 16384}},
	.snat_entries = 262144,
	.conntrack_entries = 262144,
	.path_lifetime = 10 * 1000 * 1000,
	.tunnel_port = 4789,
	.tunnel_vni = 4096,
	.tunnel_checksum = 1,
};

EC_INLINE struct config *config_get(void)
{
	__u32 key = 0;

	return bpf_map_lookup_elem(&config, &key);
}

/* Whether what is new to a Service of the family is kube-proxy's. */
EC_INLINE bool config_yields(const struct config *config, __u8 family)
{
	return config && (config->flags & (family == FAMILY_IPV6 ? CONFIG_YIELDS_IPV6 : CONFIG_YIELDS_IPV4));
}

#endif
