// Package flow is what the entries of all flow tables say alike: what has passed
// of a flow, and what kind of flow it is. It is no map itself.
package flow

//go:generate go run ../../tools/enums

// State is what has passed in one direction: enum flow_state.
type State uint8

// Flags are properties of a flow: enum flow_flags.
type Flags uint8

// Stale reports whether the second copy of a flow's entry has nothing to add to the
// first: it is being removed, or it is another flow's that was seen no later. Both
// are what last_seen says.
func Stale(ours, theirs uint64, same bool) bool {
	return theirs < Marks || ours < Marks || (!same && theirs <= ours)
}

// Later is the TCP sequence number that comes after the other; 0 is none.
func Later(a, b uint32) uint32 {
	if a == 0 || (b != 0 && int32(b-a) > 0) {
		return b
	}
	return a
}
