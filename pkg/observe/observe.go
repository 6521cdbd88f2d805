// Package observe reads the pinned maps for people and for metrics: each map
// as a table and as objects, counters, fill, and the state of the node as a
// whole. It writes nothing, needs no agent, and opens only what is pinned.
//
//	table, err := observe.Reader{Dir: "/sys/fs/bpf/ebpf-cni"}.Read("endpoints")
package observe

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// ErrNoPin is returned (wrapped) when a map is not pinned where it should be.
var ErrNoPin = errors.New("not pinned")

// Column is one column of a table for people.
type Column struct {
	Name string
	// Right aligns numbers.
	Right bool
}

// Table is the content of a map, sorted. Rows are made when asked for, since a
// flow table may hold hundreds of thousands.
type Table struct {
	Name    string
	Columns []Column
	// Len is the number of rows.
	Len int
	// Cells returns row i for people, a cell per column.
	Cells func(i int) []string
	// Object returns row i with all fields under their C names.
	Object func(i int) Object
}

// Reader reads the maps of one node.
type Reader struct {
	Dir bpffs.Dir
	// Now is CLOCK_MONOTONIC in ns, for ages; nil: the kernel's.
	Now func() uint64
}

// Names lists the maps that Read knows, in the order in which they are shown.
func Names() []string {
	names := make([]string, 0, len(views))
	for _, v := range views {
		names = append(names, v.name())
	}
	return names
}

// Read returns the content of the named map. The error matches ErrNoPin when
// there is no such map on this node, and says what to do.
func (r Reader) Read(name string) (Table, error) {
	i := slices.IndexFunc(views, func(v reader) bool { return v.name() == name })
	if i < 0 {
		return Table{}, fmt.Errorf("no map is called %q", name)
	}
	t, err := views[i].read(r.Dir, r.now())
	return t, r.explain(name, err)
}

func (r Reader) now() uint64 {
	if r.Now != nil {
		return r.Now()
	}
	return Monotonic()
}

// explain turns what a person would ask about into what they can do.
func (r Reader) explain(name string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("map %s is %w below %s: no agent has run since the node booted, or its pins are elsewhere (--bpffs)",
			name, ErrNoPin, r.Dir.Maps())
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("read map %s below %s: permission denied: run as root", name, r.Dir.Maps())
	}
	return err
}

// explainDir is explain for what is not one map.
func (r Reader) explainDir(err error) error {
	switch {
	case missing(err):
		return fmt.Errorf("the dataplane is %w below %s: no agent has run since the node booted, or its pins are elsewhere (--bpffs)",
			ErrNoPin, r.Dir)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("read below %s: permission denied: run as root", r.Dir)
	}
	return err
}

// Monotonic is the clock of the time stamps in the maps, in ns.
func Monotonic() uint64 {
	var ts unix.Timespec
	// The only errors are a clock that does not exist and a bad pointer.
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return uint64(ts.Nano())
}
