/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The ports of fragmented datagrams: only the first fragment has them. */
#ifndef EC_LIB_FRAG_H
#define EC_LIB_FRAG_H

#include "bpf/lib/maps.h"
#include "bpf/lib/pkt.h"

EC_INLINE struct fragment_key frag_key(const struct pkt *pkt)
{
	struct fragment_key key = {
		.src = pkt->tuple.src,
		.dst = pkt->tuple.dst,
		.id = pkt->ip_id,
		.proto = pkt->tuple.proto,
	};

	return key;
}

/* Remembers a first fragment's ports; the packet must be as it arrived. */
EC_CALL void frag_remember(const struct pkt *pkt)
{
	struct fragment_key key = frag_key(pkt);
	struct fragment ports = {.sport = pkt->tuple.sport, .dport = pkt->tuple.dport};

	bpf_map_update_elem(&fragments, &key, &ports, BPF_ANY);
}

/* Gives a later fragment the ports of its first; false: that was not seen. */
EC_CALL bool frag_recall(struct pkt *pkt)
{
	struct fragment_key key = frag_key(pkt);
	struct fragment *ports = bpf_map_lookup_elem(&fragments, &key);

	if (!ports)
		return false;
	pkt->tuple.sport = ports->sport;
	pkt->tuple.dport = ports->dport;
	if (pkt_proto_known(pkt->tuple.proto))
		pkt->l4 = L4_FLOW;
	return true;
}

#endif
