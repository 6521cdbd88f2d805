// Package journal is the pair of arrays in which the programs note the flows of
// snat and of conntrack, in the order in which they were opened or last judged.
// They are rings whose ends are in the map usage; a program that finds no room
// looks for ended flows from the oldest record on. The programs write both, and
// ec_collect writes every flow anew in each sweep. A third array, candidates, hands
// ec_collect the flows to judge next; the agent writes it.
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

// The definitions of the three maps.
var (
	Snat = typed.Define[Key, Value](typed.Definition{Name: SnatName, Content: typed.Learned, Capacity: "snat"})

	Conntrack = typed.Define[Key, Value](typed.Definition{Name: ConntrackName, Content: typed.Learned, Capacity: "conntrack"})

	Candidates = typed.Define[Key, Value](typed.Definition{Name: CandidatesName, Content: typed.Learned})
)
