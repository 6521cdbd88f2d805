package modes

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// proof says how the counters of a network tell that packets took a path.
type proof struct {
	// through rise by every packet.
	through []string
	// few are moved by neighbour discovery and the like, not by the traffic.
	few []string
	// none begin the names of what must not happen at all.
	none []string
	// held are numbers of things that are there after the traffic, and come to an end at any time: connections tracked.
	held []string
}

// stray is how many packets beside the path are neighbour discovery's, a node's own, or a flow's first ones.
func stray(packets uint64) uint64 { return 50 + packets/1000 }

// least is how many packets must have gone all of the way: a flow's first ones may wait in the stack for a neighbour.
func least(packets uint64) uint64 {
	const first = 5
	if packets <= first {
		return 1
	}
	return packets - max(first, packets/1000)
}

// judge compares two counts.
func (p proof) judge(before, after Counters, packets uint64) error {
	var wrong []error
	for _, name := range slices.Concat(p.through, p.few) {
		_, known := after[name]
		if !known || after[name] < before[name] {
			wrong = append(wrong, fmt.Errorf("counter %q went from %d to %d: it began anew, or is not there", name, before[name], after[name]))
		}
	}
	if len(wrong) > 0 {
		return errors.Join(wrong...)
	}
	for _, name := range p.through {
		if rose := after[name] - before[name]; rose < least(packets) {
			wrong = append(wrong, fmt.Errorf("%q rose by %d, want at least %d", name, rose, least(packets)))
		}
	}
	for _, name := range p.few {
		if rose := after[name] - before[name]; rose > stray(packets) {
			wrong = append(wrong, fmt.Errorf("%q rose by %d, want at most %d", name, rose, stray(packets)))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(after)) {
		begins := func(prefix string) bool { return strings.HasPrefix(name, prefix) }
		if slices.ContainsFunc(p.none, begins) && after[name] != before[name] {
			wrong = append(wrong, fmt.Errorf("%q rose by %d, want 0", name, after[name]-before[name]))
		}
	}
	for _, name := range p.held {
		if after[name] == 0 {
			wrong = append(wrong, fmt.Errorf("%q is 0 after the traffic", name))
		}
	}
	return errors.Join(wrong...)
}
