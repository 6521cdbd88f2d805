package plan

import (
	"slices"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Node is what is kept of a Node object. Sources fill it in; prefixes and addresses are text until Make has judged them.
type Node struct {
	Name string
	// Created is the creationTimestamp; zero when it is missing or unreadable.
	Created time.Time
	// PodCIDRs as they stand in the object; for one with spec.podCIDR alone, that one.
	PodCIDRs []string
	// InternalIPs and ExternalIPs are the addresses of these two types.
	InternalIPs []string
	ExternalIPs []string
	// Zone is the label topology.kubernetes.io/zone; empty when there is none.
	Zone string
	// Leaving says that the Node is being deleted, or that the cluster autoscaler is about to do so. Of others than this
	// node's own a source need not say it.
	Leaving bool
	// TunnelMACs are what inner frames to the node are addressed to, by the family of the outer packet; zero: it takes any.
	TunnelMACs [wire.Families]wire.MAC
	// Doubts are what its source has found to be wrong with it; it counts all the same.
	Doubts []string
	// Malformed says what of the object could not be read; empty when all could.
	Malformed string
}

// Equal reports whether two Nodes say the same.
func (n Node) Equal(o Node) bool {
	return n.Name == o.Name && n.Created.Equal(o.Created) && n.Zone == o.Zone && n.Leaving == o.Leaving && n.Malformed == o.Malformed && n.TunnelMACs == o.TunnelMACs &&
		slices.Equal(n.Doubts, o.Doubts) &&
		slices.Equal(n.PodCIDRs, o.PodCIDRs) &&
		slices.Equal(n.InternalIPs, o.InternalIPs) &&
		slices.Equal(n.ExternalIPs, o.ExternalIPs)
}

// AddAddress adds an entry of status.addresses; of types other than InternalIP and ExternalIP nothing is kept.
func (n *Node) AddAddress(kind, address string) {
	switch kind {
	case "InternalIP":
		n.InternalIPs = append(n.InternalIPs, address)
	case "ExternalIP":
		n.ExternalIPs = append(n.ExternalIPs, address)
	}
}
