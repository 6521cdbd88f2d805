// Package observe reads the pinned maps for people and for metrics: each map
// as a table and as objects, counters, fill, and the state of the node as a
// whole. It writes nothing, needs no agent, and opens only what is pinned.
//
//	table, err := observe.Reader{Dir: "/sys/fs/bpf/ebpf-cni", StateDir: "/run/ebpf-cni"}.Read("endpoints")
package observe

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/registry"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// ErrNoPin is returned (wrapped) when a map is not pinned where it should be.
var ErrNoPin = errors.New("not pinned")

// Reader reads the maps of one node.
type Reader struct {
	Dir bpffs.Dir
	// StateDir is the state directory, for what pods are called and the agent has left.
	StateDir string
	// Now is CLOCK_MONOTONIC in ns, for ages; nil: the kernel's.
	Now func() uint64
}

// Names lists the maps that Read knows, in the order in which they are shown.
func Names() (names []string) {
	for _, d := range registry.All() {
		if d.View != nil {
			names = append(names, d.Name)
		}
	}
	return names
}

// Read returns the content of the named map, with the names of pods where it has their links, and of Services where it is about them. The error matches ErrNoPin when
// there is no such map on this node, and says what to do.
func (r Reader) Read(name string) (typed.Table, error) {
	for _, d := range registry.All() {
		if d.Name == name && d.View != nil {
			t, err := r.show(d)
			return t, r.explain(name, err)
		}
	}
	return typed.Table{}, fmt.Errorf("no map is called %q", name)
}

func (r Reader) show(d typed.Definition) (typed.Table, error) {
	m, err := open(r.Dir, d.Name)
	if err != nil {
		return typed.Table{}, err
	}
	defer m.Close()
	t, err := d.View.Show(m, d.Name, r.now())
	pods, _ := ReadPods(r.StateDir) // what can't be read has no name
	if err == nil {
		t, err = r.withServices(t)
	}
	return pods.named(t), err
}

func open(dir bpffs.Dir, name string) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(dir.Map(name), &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s: %w", dir.Map(name), err)
	}
	return m, nil
}

// load reads all entries of a pinned map.
func load[K comparable, V any](dir bpffs.Dir, name string) (entries []typed.Entry[K, V], err error) {
	m, err := open(dir, name)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	for e, err := range typed.New[K, V](m, name).All() {
		if err != nil {
			return nil, err
		}
		entries = append(entries, e)
	}
	return entries, nil
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
