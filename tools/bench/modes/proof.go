package modes

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Traffic is what a generator says that went between client and server from one count to the next.
type Traffic struct {
	// Forth packets went from client to server, Back from server to client: datagrams to the packet with Exact, of TCP at least so many.
	Forth, Back uint64
	Exact       bool
	// Bytes were a TCP stream's payload from client to server. How many packets that is, is the kernel's to choose.
	Bytes uint64
	// Flows were new: connections, or datagrams of which each is a flow.
	Flows uint64
}

// proof says how the counters of a network tell that traffic took a path. Counters of packets have a sibling of bytes.
type proof struct {
	// through rise by every packet from client to server, both by every packet of either direction.
	through, both []string
	// opened rise by every new flow.
	opened []string
	// few are moved by neighbour discovery and the like, not by the traffic.
	few []string
	// none begin the names of what must not happen at all.
	none []string
	// held are numbers of things that the traffic leaves: connections tracked.
	held []string
}

// bytesOf is what a counter of packets calls its sibling.
func bytesOf(name string) string { return name + " bytes" }

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

// band is by how much a counter may rise.
type band struct{ low, high uint64 }

func (b band) hold(name string, before, after uint64) error {
	if rose := after - before; rose < b.low || rose > b.high {
		if b.high == unbounded {
			return fmt.Errorf("%q rose by %d, want at least %d", name, rose, b.low)
		}
		return fmt.Errorf("%q rose by %d, want %d to %d", name, rose, b.low, b.high)
	}
	return nil
}

const unbounded = ^uint64(0)

// packets is the band of so many packets.
func (t Traffic) packets(n uint64) band {
	if t.Exact {
		return band{least(n), n + stray(n)}
	}
	return band{least(n), unbounded}
}

// octets is the band of a stream's bytes on a link: payload, and headers, of which a segment has 66 bytes to 1 448, twelve in a hundred with
// VXLAN's outside of them, acknowledgements the other way and what was sent again.
func (t Traffic) octets() band {
	const handshake = 64 << 10
	return band{t.Bytes - t.Bytes/1000, t.Bytes + t.Bytes*12/100 + handshake}
}

// judge compares two counts.
func (p proof) judge(before, after Counters, t Traffic) error {
	expected := map[string]band{}
	for _, name := range p.through {
		expected[name] = t.packets(t.Forth)
	}
	for _, name := range p.both {
		expected[name] = t.packets(t.Forth + t.Back)
	}
	if t.Bytes > 0 {
		for _, name := range slices.Concat(p.through, p.both) {
			expected[bytesOf(name)] = t.octets()
		}
	}
	for _, name := range p.opened {
		expected[name] = band{least(t.Flows), t.Flows + stray(t.Flows)}
	}
	for _, name := range p.few {
		expected[name] = band{0, stray(t.Forth + t.Back)}
	}
	for _, name := range p.held {
		expected[name] = band{1, unbounded}
	}
	return errors.Join(within(expected, before, after), p.intact(before, after))
}

// intact is an error when anything happened that must not.
func (p proof) intact(before, after Counters) error {
	expected := map[string]band{}
	for name := range after {
		if slices.ContainsFunc(p.none, func(prefix string) bool { return strings.HasPrefix(name, prefix) }) {
			expected[name] = band{}
		}
	}
	return within(expected, before, after)
}

// within is an error for each counter that did not rise as expected.
func within(expected map[string]band, before, after Counters) error {
	var wrong []error
	for _, name := range slices.Sorted(maps.Keys(expected)) {
		if _, known := after[name]; !known || after[name] < before[name] {
			wrong = append(wrong, fmt.Errorf("counter %q went from %d to %d: it began anew, or is not there", name, before[name], after[name]))
			continue
		}
		wrong = append(wrong, expected[name].hold(name, before[name], after[name]))
	}
	return errors.Join(wrong...)
}
