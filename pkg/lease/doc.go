// Package lease is the source of Nodes where there is no Kubernetes: the registry of the network flannel in etcd. Below a prefix
// that has the network's configuration, each node leases a subnet for its pods under its public address, as flanneld does, so that
// both live in one network.
//
// It owns the lease of this node and what is known of the others', and delivers them as Nodes: a subnet is a podCIDR, a public
// address an InternalIP. Everything behind is the same as for Nodes of Kubernetes.
//
//	r, err := lease.Open(lease.Options{Endpoints: []string{"http://10.0.0.1:2379"}, Prefix: "/coreos.com/network"}, log)
//	network, err := r.Network(ctx, said)
//	err = r.Run(ctx, network, lease.Self{Node: "n1", ...}, func(u source.Update) { ... })
//
// Nothing that stands is given up because etcd is away, has been emptied, or is another one: see table.
package lease
