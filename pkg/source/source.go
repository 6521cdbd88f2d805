// Package source delivers the cluster's Node objects as one stream of
// complete states, from the Kubernetes API or from a file.
//
// It owns the watching, the parsing and the retrying. It does not judge what
// the objects say: prefixes and addresses stay text here, and what they mean
// is for pkg/plan to decide.
//
//	err := source.File{Path: "nodes.yaml", Log: log}.Run(ctx, func(u source.Update) { ... })
//
// Every Update either carries all Nodes there are, or an error that says why
// there is nothing newer; an error never empties what was delivered before.
package source

import (
	"slices"
	"time"
)

// Node is what is kept of a Node object.
type Node struct {
	Name string
	// Created is the creationTimestamp; zero when it is missing or unreadable.
	Created time.Time
	// PodCIDRs as they stand in the object, unparsed. An object that has only
	// spec.podCIDR yields that one.
	PodCIDRs []string
	// InternalIPs and ExternalIPs are the addresses of these two types, unparsed.
	InternalIPs []string
	ExternalIPs []string
	// Malformed says what of the object could not be read; empty when all could.
	Malformed string
}

// Equal reports whether two Nodes say the same.
func (n Node) Equal(o Node) bool {
	return n.Name == o.Name && n.Created.Equal(o.Created) && n.Malformed == o.Malformed &&
		slices.Equal(n.PodCIDRs, o.PodCIDRs) &&
		slices.Equal(n.InternalIPs, o.InternalIPs) &&
		slices.Equal(n.ExternalIPs, o.ExternalIPs)
}

// Update is one element of the stream.
type Update struct {
	// Nodes is the complete list, in the source's order. It is nil when Err is set.
	Nodes []Node
	// Changed is when the newest change in Nodes was noticed.
	Changed time.Time
	// Err says why no newer state can be had; what was delivered before stays valid.
	Err error
}
