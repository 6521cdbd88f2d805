package observe

import (
	"errors"
	"io/fs"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/raw"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// Fill is how full a map is.
type Fill struct {
	Name     string `json:"name"`
	Entries  uint64 `json:"entries"`
	Capacity uint64 `json:"capacity"`
}

// Percent is how much of the capacity is used.
func (f Fill) Percent() uint64 {
	if f.Capacity == 0 {
		return 0
	}
	return 100 * f.Entries / f.Capacity
}

// Fills tells how full each pinned map is, in the order of Names. Arrays, which
// are always full, are left out, and so are tables that make room by themselves.
func Fills(dir bpffs.Dir) ([]Fill, error) {
	counted, err := flowTables(dir)
	if err != nil {
		return nil, err
	}
	var out []Fill
	for _, name := range Names() {
		f, hashed, err := fill(dir, name, counted)
		if missing(err) {
			continue // an older agent does without it
		}
		if err != nil {
			return nil, err
		}
		if hashed {
			out = append(out, f)
		}
	}
	return out, nil
}

// flowTables returns what the programs count themselves, by map name.
func flowTables(dir bpffs.Dir) (map[string]uint64, error) {
	entries, err := load[usage.Key, usage.Value](dir, usage.Name)
	if err != nil {
		return nil, err
	}
	counted := map[string]uint64{}
	for _, e := range entries {
		counted[e.Key.Table.String()] = e.Value.Entries
	}
	return counted, nil
}

func fill(dir bpffs.Dir, name string, counted map[string]uint64) (f Fill, hashed bool, err error) {
	m, err := open(dir, name)
	if err != nil {
		return f, false, err
	}
	defer m.Close()
	if raw.IsArray(m) || m.Type() == ebpf.LRUHash {
		return f, false, nil
	}
	f = Fill{Name: name, Capacity: uint64(m.MaxEntries())}
	n, ok := counted[name]
	if !ok {
		n, err = raw.Count(m)
	}
	f.Entries = n
	return f, true, err
}

// missing reports whether the error says that something is not pinned.
func missing(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, ErrNoPin) }
