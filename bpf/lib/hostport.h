/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Host ports: what the node's own addresses have on a port that one of its pods has asked
 * for (maps/hostports). Each is a frontend with one backend, that pod, so the flows are like
 * those to a Service, with SET_HOST_PORT as their set.
 */
#ifndef EC_LIB_HOSTPORT_H
#define EC_LIB_HOSTPORT_H

#include "bpf/lib/path.h"
#include "bpf/lib/scratch.h"
#include "bpf/lib/socket.h"

/*
 * Makes the pod that has the host port the target; false: none has it, or one that is gone.
 * The entry may be deleted meanwhile and its memory be another's at once, so it is looked up
 * again.
 */
EC_CALL bool hostport_take(struct target *t, const struct host_port_key *key)
{
	const struct host_port *found = bpf_map_lookup_elem(&hostports, key);
	const struct endpoint *ep;

	for (int i = 0; i < 2 && found; i++) {
		t->address = found->pod_address;
		t->port = found->pod_port;
		t->pod = found->ifindex;
		barrier();
		if (bpf_map_lookup_elem(&hostports, key) == found)
			break;
		found = bpf_map_lookup_elem(&hostports, key);
	}
	if (!found)
		return false;
	t->set = SET_HOST_PORT;
	t->backend = 0;
	t->generation = t->pod;
	t->flags = FLOW_SERVICE | FLOW_ON_NODE;
	ep = path_endpoint(&t->address);
	return ep && ep->ifindex == t->pod;
}

/*
 * Whether an address of the node's, with these flags (frontend_flags), has host ports. What is a ClusterIP has none;
 * one that the node holds itself, as for a cache of DNS, is told from its own by the socket that is bound to it.
 */
EC_INLINE bool hostport_may_be(__u32 flags)
{
	return (flags & (SERVICE_OWN | SERVICE_CLUSTER_IP)) == SERVICE_OWN;
}

/*
 * Finds the host port that a packet to an address of the node's goes to, and makes its pod the target. As among
 * sockets, a port of this address comes before one of all addresses. A socket of the node that is bound to this very
 * address keeps it from pods: whoever may write a Pod would have what the node's own processes are told there.
 */
EC_CALL bool hostport_find(struct __sk_buff *ctx, struct scratch *s)
{
	const struct tuple *out = &s->pkt.tuple;
	struct host_port_key key = {.address = out->dst, .port = out->dport, .proto = out->proto};
	bool found = hostport_take(&s->target, &key);

	if (!found) {
		key.address = addr_any_like(&out->dst);
		found = hostport_take(&s->target, &key);
	}
	return found && !socket_is_bound(ctx, s, out);
}

/* Whether the tuple's source is a host port, if that is an address of the node's. */
EC_CALL bool hostport_is_source(const struct tuple *t)
{
	struct host_port_key key = {.address = t->src, .port = t->sport, .proto = t->proto};

	if (bpf_map_lookup_elem(&hostports, &key))
		return true;
	key.address = addr_any_like(&t->src);
	return bpf_map_lookup_elem(&hostports, &key);
}

/* Whether the pod of a flow to a host port still has it. A pod's host ports are the same as long as it lives. */
EC_INLINE bool hostport_serves(const struct snat_entry *flow)
{
	const struct endpoint *ep = path_endpoint(&flow->far_address);

	return ep && ep->ifindex == flow->pod;
}

#endif
