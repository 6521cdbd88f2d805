package prog

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/bpf"
	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/journal"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
)

// pool keeps the programs of each configuration with their maps, emptied, from one test to the next: the verifier takes
// longer than most tests, and on an emulated processor much longer.
var pool = make(map[config.NodeConfig][]*ebpf.Collection)

// take returns programs with empty maps, and has them given back when the test ends: cases that each have a bed are subtests, or
// all of them load programs.
func take(tb testing.TB, c config.NodeConfig) *ebpf.Collection {
	tb.Helper()
	var coll *ebpf.Collection
	if free := pool[c]; len(free) > 0 {
		coll, pool[c] = free[len(free)-1], free[:len(free)-1]
	} else {
		coll = load(tb, c)
	}
	tb.Cleanup(func() {
		if err := empty(coll); err != nil {
			coll.Close()
			tb.Errorf("empty the maps: %v", err)
			return
		}
		pool[c] = append(pool[c], coll)
	})
	return coll
}

func load(tb testing.TB, c config.NodeConfig) *ebpf.Collection {
	tb.Helper()
	spec, err := bpf.LoadDataplane()
	must(tb, err)
	must(tb, spec.Variables[bpf.DataplaneVarCfg].Set(c))
	spec.Maps[snat.Name].MaxEntries = c.SnatEntries
	spec.Maps[snat.ReverseName].MaxEntries = c.SnatEntries
	spec.Maps[conntrack.Name].MaxEntries = c.ConntrackEntries
	spec.Maps[journal.SnatName].MaxEntries = c.SnatEntries
	spec.Maps[journal.ConntrackName].MaxEntries = c.ConntrackEntries
	shrink(spec)
	for name, m := range spec.Maps {
		if m.Type == ebpf.Array && name[0] != '.' {
			m.Flags |= unix.BPF_F_MMAPABLE // to be emptied at once
		}
	}
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		tb.Fatalf("load programs: %+v", err)
	}
	return coll
}

func empty(coll *ebpf.Collection) error {
	var failed []error
	for name, m := range coll.Maps {
		if name[0] == '.' { // .rodata belongs to the programs
			continue
		}
		if err := emptyMap(m); err != nil {
			failed = append(failed, fmt.Errorf("map %s: %w", name, err))
		}
	}
	return errors.Join(failed...)
}

func emptyMap(m *ebpf.Map) error {
	switch m.Type() {
	case ebpf.PerCPUArray:
		return zeroAll(m)
	case ebpf.Array:
		all, err := m.Memory()
		if err != nil {
			return err
		}
		_, err = all.WriteAt(make([]byte, all.Size()), 0)
		return err
	}
	return deleteAll(m)
}

// zeroAll empties an array of a value for each processor, in one call: emulated processors take long for each.
func zeroAll(m *ebpf.Map) error {
	keys := make([]uint32, m.MaxEntries())
	zeros := make([][]byte, len(keys)*ebpf.MustPossibleCPU())
	value := make([]byte, m.ValueSize())
	for i := range keys {
		keys[i] = uint32(i)
	}
	for i := range zeros {
		zeros[i] = value
	}
	_, err := m.BatchUpdate(keys, zeros, nil)
	return err
}

// deleteAll takes the first entry away until there is none. Nothing else writes to the map.
func deleteAll(m *ebpf.Map) error {
	key := make([]byte, m.KeySize())
	for {
		err := m.NextKey(nil, &key)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := m.Delete(key); err != nil {
			return err
		}
	}
}
