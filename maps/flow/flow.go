// Package flow has the types that the entries of all flow tables share: which
// packets of a flow have passed, and what kind of flow it is. It is no map itself.
package flow

//go:generate go run ../../tools/enums

// State is what has passed in one direction: enum flow_state.
type State uint8

// Flags are properties of a flow: enum flow_flags.
type Flags uint8

// Stale reports whether the second of two copies of an entry has nothing to add to
// the first: one is being removed, or they are of different flows (not same) and the
// second was seen no later. ours and theirs are the copies' last_seen.
func Stale(ours, theirs uint64, same bool) bool {
	return theirs < Marks || ours < Marks || (!same && theirs <= ours)
}

// Later is the later of two TCP sequence numbers; 0 means that there is none.
func Later(a, b uint32) uint32 {
	if a == 0 || (b != 0 && int32(b-a) > 0) {
		return b
	}
	return a
}
