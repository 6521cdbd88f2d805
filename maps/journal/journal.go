// Package journal is the pair of arrays in which the programs note the flows of
// snat and of conntrack in the order in which they were opened or last looked at:
// rings, whose ends stand in the map usage. The oldest record is where a program
// that finds no room begins to look for a flow that has ended. The programs write
// both, and each sweep writes them anew. A third array holds the flows that a
// sweep looks at next.
package journal

import (
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// The maps' names in the object and below the pin directory.
const (
	SnatName      = "snat_journal"
	ConntrackName = "ct_journal"
	// CandidatesName is the array of keys that the agent hands to ec_collect.
	CandidatesName = "candidates"
)

// Key is the array index.
type Key struct {
	Index uint32
}

// Value is the flow's key in its table.
type Value = wire.Tuple

// The definitions of the three.
var (
	Snat = typed.Define[Key, Value](typed.Definition{Name: SnatName, Content: typed.Learned, Capacity: "snat"})

	Conntrack = typed.Define[Key, Value](typed.Definition{Name: ConntrackName, Content: typed.Learned, Capacity: "conntrack"})

	Candidates = typed.Define[Key, Value](typed.Definition{Name: CandidatesName, Content: typed.Learned})
)
