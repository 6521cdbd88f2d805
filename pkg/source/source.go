// Package source delivers the cluster's objects by resource, each as a stream
// of complete states, from the Kubernetes API or from a file. The one resource
// so far is Nodes.
//
// It owns the watching, the parsing and the retrying. The objects are pkg/plan's
// own types, and what their values mean is for pkg/plan to decide.
//
//	err := source.File{Path: "nodes.yaml", Log: log}.Run(ctx, func(u source.Update) { ... })
//
// Every Update either carries all Nodes there are, or an error that says why
// there is nothing newer; an error never empties what was delivered before.
package source

import (
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// Update is one element of the stream of Nodes.
type Update struct {
	// Nodes is the complete list, in the source's order. It is nil when Err is set.
	Nodes []plan.Node
	// Changed is when the newest change in Nodes was noticed.
	Changed time.Time
	// Err says why no newer state can be had; what was delivered before stays valid.
	Err error
}
