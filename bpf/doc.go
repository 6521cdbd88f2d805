// Package bpf holds the eBPF programs and their compiled form, nothing else.
// pkg/datapath loads them; the maps that they read and write are in maps.
//
//	program         hook                                sees
//	ec_from_pod     tc ingress of a host-side veth      packets that the pod sends; on a bridge, those that its containers send past it
//	ec_to_pod       tc egress of a host-side veth       packets that the host's stack sends to the pod, where Services are served
//	ec_from_uplink  tc ingress of an uplink             packets that reach the node
//	ec_to_uplink    tc egress of an uplink              packets that the host's stack sends
//	ec_from_l3      tc ingress of an uplink without an Ethernet header
//	ec_to_l3        tc egress of one
//	ec_from_tunnel  tc ingress of the tunnel device     packets that other nodes send through the tunnel
//	ec_to_tunnel    tc egress of the tunnel device      packets that the host's stack sends through it
//	ec_collect      syscall, run by the agent           slices of the flow tables, to remove ended flows
//
// Those on the cgroup of the node's processes see what these do with sockets, where Services are served:
//
//	ec_connect4, ec_connect6            connect, and the first datagram of TCP Fast Open
//	ec_sendmsg4, ec_sendmsg6            datagrams of sockets that are connected to nobody
//	ec_recvmsg4, ec_recvmsg6            from whom a datagram is
//	ec_getpeername4, ec_getpeername6    to whom a socket is connected
//	ec_sock_release                     the end of a socket
//
// The walk of a packet:
//
//	    pod                                                      world, other nodes
//	     |                                                              |
//	ec_from_pod                                                  ec_from_uplink
//	     |                                                              |
//	not IP: ARP for the gateway is answered                      not for this host: stack
//	source not the pod's: drop                                   destination a pod? -----> into the pod
//	to a Service: from here on, to its backend                     (the world's flow is recorded)
//	destination                                                  to a Service, or of its backend: translated, sent on
//	 +- this node's pod -----> into the pod                      answers a masqueraded flow? -> into the pod
//	 +- another node's pod --> that node, over the uplink        all else: stack
//	 |                         or through the tunnel                    .
//	 +- another node --------> by the kernel's route, or the tunnel     .
//	 +- this node -----------> stack                                    .
//	 +- the world ----------> masqueraded, by the route          ec_to_uplink
//	too large for its path: the pod is told                       ours (marked): pass
//	what the kernel must decide goes to the stack ...............  a pod's, to the world: masquerade
//	                                                               the node's, on a pod's port: another port
//
// The tunnel, to nodes that are reached by it:
//
//	ec_from_tunnel                                               ec_to_tunnel
//	 sent by the node that the source belongs to? else drop       ours (marked): pass
//	 destination a pod? -----> into the pod                        to a node behind it: the key that says where
//	 this node? -------------> stack                               all else: drop
//
// The objects are committed. To change them: edit the C, then `make generate`.
package bpf
