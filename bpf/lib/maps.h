/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The maps. Their records stand in maps/NAME/NAME.h; the loader sets the
 * capacities of the flow tables.
 */
#ifndef EC_LIB_MAPS_H
#define EC_LIB_MAPS_H

#include "bpf/lib/compiler.h"
#include "maps/config/config.h"
#include "maps/conntrack/conntrack.h"
#include "maps/destinations/destinations.h"
#include "maps/devices/devices.h"
#include "maps/drops/drops.h"
#include "maps/endpoints/endpoints.h"
#include "maps/fragments/fragments.h"
#include "maps/ports/ports.h"
#include "maps/snat/snat.h"
#include "maps/traffic/traffic.h"
#include "maps/uplinks/uplinks.h"
#include "maps/usage/usage.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct endpoint_key);
	__type(value, struct endpoint);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} endpoints SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct device_key);
	__type(value, struct device);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} devices SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct destination_key);
	__type(value, struct destination);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} destinations SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct uplink_key);
	__type(value, struct uplink);
	__uint(max_entries, 256);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} uplinks SEC(".maps");

/* Preallocated, so that a burst of new flows cannot fail for want of memory. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct tuple);
	__type(value, struct snat_entry);
	__uint(max_entries, 262144);
} snat SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct tuple);
	__type(value, struct snat_entry);
	__uint(max_entries, 262144);
} snat_reverse SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct tuple);
	__type(value, struct conntrack_entry);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} conntrack SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct fragment);
	__uint(max_entries, FRAGMENTS_OF_WORLD + FRAGMENTS_OF_OTHERS);
} fragments SEC(".maps");

/* The kernel takes the BTF of an array only with a plain integer as its key. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct drop_counter);
	__uint(max_entries, DIRECTIONS * DROP_SLOTS);
} drops SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct traffic_counter);
	__uint(max_entries, DIRECTIONS * TRAFFIC_SLOTS);
} traffic SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct config);
	__uint(max_entries, 1);
} config SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct usage);
	__uint(max_entries, USAGE_TABLES);
} usage SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct port_count);
	__uint(max_entries, 1 << PORTS_BITS);
} ports SEC(".maps");

/* Keys of a flow table that the agent hands to ec_collect. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct tuple);
	__uint(max_entries, 1024);
} candidates SEC(".maps");

/* Each has as many records as its table has entries. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct tuple);
	__uint(max_entries, 262144);
} snat_journal SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct tuple);
	__uint(max_entries, 262144);
} ct_journal SEC(".maps");

/* Set by the loader before the verifier sees the programs. */
volatile const struct node_config cfg = {
	.masquerade = 1,
	.mark = 0x00800000,
	.snat_port_low = 49152,
	.snat_port_high = 65535,
	.snat_entries = 262144,
	.conntrack_entries = 262144,
	.path_lifetime = 10 * 1000 * 1000,
};

EC_INLINE struct config *config_get(void)
{
	__u32 key = 0;

	return bpf_map_lookup_elem(&config, &key);
}

#endif
