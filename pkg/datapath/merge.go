package datapath

import (
	"encoding/binary"
	"slices"
	"unsafe"

	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/fragments"
	"github.com/ebpf-cni/ebpf-cni/maps/journal"
	"github.com/ebpf-cni/ebpf-cni/maps/ports"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
)

// content says who writes a map, and so how two copies of it become one.
type content int

const (
	// mirrored: the agent and the plugin write; the pinned map is the truth.
	mirrored content = iota
	// flows: the programs write; the more recent entry is the truth.
	flows
	// counters: the programs add; what the other copy counted is added.
	counters
	// owned: a record that is mirrored but for the counters in it.
	owned
	// hints: the programs write, and what is lost costs little: a map that is made
	// anew, of whatever kind, begins empty.
	hints
)

// counts says that there are counters in the map.
func (c content) counts() bool { return c == counters || c == owned }

func contentOf(name string) content {
	switch name {
	case snat.Name, snat.ReverseName, conntrack.Name:
		return flows
	case drops.Name, traffic.Name, usage.Name:
		return counters
	case devices.Name:
		return owned
	case journal.SnatName, journal.ConntrackName, journal.CandidatesName, ports.Name, fragments.Name:
		return hints
	}
	return mirrored
}

// combine returns what have becomes when the other copy of the entry says
// theirs. base is what both said when they last were the same, nil if unknown.
// The result has the size of have.
func combine(name string, kind content, have, theirs, base value) value {
	theirs = theirs.resized(len(have[0]))
	if base != nil {
		base = base.resized(len(have[0]))
	}
	switch kind {
	case mirrored:
		return theirs
	case flows:
		return value{combineFlow(name, have[0], theirs[0])}
	case counters:
		return combineCounters(have, theirs, base)
	case owned:
		return value{combineDevice(have[0], theirs[0], base)}
	}
	return have
}

// combineCounters adds up words of 64 bits.
func combineCounters(have, theirs, base value) value {
	out := have.clone()
	for cpu := range out {
		for at := 0; at+8 <= len(out[cpu]); at += 8 {
			ours, other := word(have[cpu], at), word(theirs[cpu], at)
			sum := max(ours, other)
			if base != nil {
				sum = ours + other - word(base[cpu], at)
			}
			binary.NativeEndian.PutUint64(out[cpu][at:], sum)
		}
	}
	return out
}

func word(b []byte, at int) uint64 { return binary.NativeEndian.Uint64(b[at:]) }

// combineDevice takes the addresses from theirs and adds up the counters.
func combineDevice(have, theirs []byte, base value) []byte {
	ours, other := decode[devices.Value](have), decode[devices.Value](theirs)
	out := other
	if base == nil {
		out.Packets, out.Bytes = max(ours.Packets, other.Packets), max(ours.Bytes, other.Bytes)
		out.SnatFlows = max(ours.SnatFlows, other.SnatFlows)
		out.ConntrackFlows = max(ours.ConntrackFlows, other.ConntrackFlows)
	} else {
		was := decode[devices.Value](base[0])
		out.Packets += ours.Packets - was.Packets
		out.Bytes += ours.Bytes - was.Bytes
		out.SnatFlows += ours.SnatFlows - was.SnatFlows
		out.ConntrackFlows += ours.ConntrackFlows - was.ConntrackFlows
	}
	return encode(theirs, out)
}

// combineFlow joins two copies of one flow's entry. The later one counts, with
// the state bits that only the other saw: each direction of a flow passes one
// hook, so they saw different packets.
func combineFlow(name string, have, theirs []byte) []byte {
	if name == conntrack.Name {
		ours, other := decode[conntrack.Value](have), decode[conntrack.Value](theirs)
		if stale(ours.LastSeen, other.LastSeen, ours.Ifindex == other.Ifindex) {
			return have
		}
		out := ours
		if other.LastSeen > ours.LastSeen {
			out = other
		}
		if ours.Ifindex == other.Ifindex {
			out.FromPod, out.FromWorld = ours.FromPod|other.FromPod, ours.FromWorld|other.FromWorld
			out.PodSeqEnd, out.PodAck = later(ours.PodSeqEnd, other.PodSeqEnd), later(ours.PodAck, other.PodAck)
			out.WorldSeqEnd, out.WorldAck = later(ours.WorldSeqEnd, other.WorldSeqEnd), later(ours.WorldAck, other.WorldAck)
		}
		return encode(have, out)
	}
	ours, other := decode[snat.Value](have), decode[snat.Value](theirs)
	same := ours.Ifindex == other.Ifindex && ours.ToAddress == other.ToAddress && ours.ToPort == other.ToPort
	if stale(ours.LastSeen, other.LastSeen, same) {
		return have
	}
	out := ours
	if other.LastSeen > ours.LastSeen {
		out = other
	}
	if same {
		out.State = ours.State | other.State
		out.SeqEnd, out.Ack = later(ours.SeqEnd, other.SeqEnd), later(ours.Ack, other.Ack)
	}
	return encode(have, out)
}

// stale says that the other copy has nothing to add: it is being removed, or it
// is another flow's that was seen no later.
func stale(ours, theirs uint64, same bool) bool {
	return theirs < snat.Marks || ours < snat.Marks || (!same && theirs <= ours)
}

// later is the sequence number that comes after the other; 0 is none.
func later(a, b uint32) uint32 {
	if a == 0 || (b != 0 && int32(b-a) > 0) {
		return b
	}
	return a
}

// gone says that a flow's entry is being removed. It is asked of every entry of
// the large tables, so it looks at the stamp alone.
func gone(name string, v []byte) bool {
	at := unsafe.Offsetof(snat.Value{}.LastSeen)
	if name == conntrack.Name {
		at = unsafe.Offsetof(conntrack.Value{}.LastSeen)
	}
	return word(v, int(at)) < snat.Marks
}

// decode reads the fields that this build knows; a layout that grew has more.
func decode[V any](b []byte) V {
	var v V
	padded := make([]byte, max(len(b), binary.Size(v)))
	copy(padded, b)
	// Neither fails: V is a struct of fixed size and the buffer is long enough.
	_, _ = binary.Decode(padded, binary.NativeEndian, &v)
	return v
}

// encode returns b with the fields that this build knows replaced.
func encode[V any](b []byte, v V) []byte {
	known, _ := binary.Append(nil, binary.NativeEndian, v)
	out := slices.Clone(b)
	copy(out, known)
	return out
}
