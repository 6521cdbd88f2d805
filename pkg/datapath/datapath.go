// Package datapath owns a node's programs and maps in the kernel: it loads,
// configures and tests the programs, replaces those that are running, sweeps the
// flow tables, and removes everything again. Package migrate below it moves the
// content of maps to a new layout. It does not decide what is in the maps.
//
//	dp, err := datapath.Load(ctx, datapath.Options{Dir: dir, StateDir: state, NodeConfig: cfg, Log: log})
//	err = dp.AttachUplink(3, attach.UplinkHooks())
//	result, again, err := dp.Sweep()
package datapath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath/migrate"
)

var (
	// ErrLayout is returned (wrapped) by Load when these programs cannot use the
	// pinned maps, nor maps made from them. The running programs stay.
	ErrLayout = migrate.ErrLayout

	// ErrSelfTest is returned (wrapped) by Load when a new program fails on a test
	// packet, or returns what no program may.
	ErrSelfTest = errors.New("program fails its self-test")

	// ErrKernelTooOld is returned (wrapped) by Load and Probe, with a list of what
	// the kernel lacks.
	ErrKernelTooOld = errors.New("kernel is too old")

	// ErrRealtime is returned (wrapped) by Load and Probe on a PREEMPT_RT kernel.
	ErrRealtime = errors.New("PREEMPT_RT kernels are not supported")
)

// defaultLockTimeout is longer than any work on one pod takes.
const defaultLockTimeout = 30 * time.Second

// Options say where a node's dataplane is pinned and how it is configured.
type Options struct {
	// Dir is the pin directory.
	Dir bpffs.Dir
	// StateDir holds the node's lock, and the records of the qdiscs that we made and of what the programs were made of.
	StateDir string
	// Attach is how programs are attached; the zero value is attach.Auto.
	Attach attach.Mode
	// Cgroup is the directory of the cgroup of the node's processes, whose sockets
	// reach Services; empty: they do not.
	Cgroup string
	// NodeConfig is the programs' constants. The capacities, the lifetime of paths
	// and the host's network namespace in it are filled in by Load.
	NodeConfig config.NodeConfig
	// Bare loads the programs for uplinks without an Ethernet header as well, those of attach.BareHooks.
	Bare bool
	// SnatEntries is the capacity of the tables snat and snat_reverse, and
	// ConntrackEntries that of conntrack; 0: as compiled.
	SnatEntries, ConntrackEntries uint32
	// LockTimeout bounds the wait for work on pods to end; 0: 30 seconds.
	LockTimeout time.Duration
	// Spec holds other programs than the embedded ones, for tests.
	Spec *ebpf.CollectionSpec
	// Log is for operators; nil: slog.Default.
	Log *slog.Logger

	// begin, unless nil, is called before the first change to what runs.
	begin func()
	// work names what holds the node's lock to those that wait for it; empty: start.
	work string
}

func (o Options) withDefaults() Options {
	if o.Attach == "" {
		o.Attach = attach.Auto
	}
	if o.LockTimeout == 0 {
		o.LockTimeout = defaultLockTimeout
	}
	if o.work == "" {
		o.work = "start"
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	return o
}

// onSockets reports whether there are programs for the sockets of the node's processes.
func (o Options) onSockets() bool { return o.NodeConfig.Services != 0 && o.Cgroup != "" }

func (o Options) attacher() attach.Attacher {
	a := attach.Attacher{Dir: o.Dir, Mode: o.Attach, Cgroup: o.Cgroup}
	if !o.onSockets() { // what is attached is to go, whatever cgroup it is on
		a.Cgroup = ""
	}
	return a
}

// lock takes the node's lock for a change to all pods at once.
func (o Options) lock(ctx context.Context, work string) (*bpffs.Lock, error) {
	ctx, cancel := context.WithTimeout(ctx, o.LockTimeout)
	defer cancel()
	return bpffs.Exclusive(ctx, o.StateDir, work)
}

// LoadLock is the file in the state directory that serialises loads. The node's lock
// is not held for that long: the verifier takes seconds.
const LoadLock = "load.lock"

func (o Options) lockLoading(ctx context.Context) (*bpffs.Lock, error) {
	ctx, cancel := context.WithTimeout(ctx, o.LockTimeout)
	defer cancel()
	return bpffs.File(ctx, filepath.Join(o.StateDir, LoadLock))
}

// Datapath is a node's running dataplane. It keeps running when it is closed and
// when the process ends. Its methods, except Close, may be called by several
// goroutines at once.
type Datapath struct {
	// Maps are the pinned maps.
	Maps *Maps

	opts Options
	// programs are the loaded ones by name. Reconfigure replaces them, so running is
	// held while one is used or compared with what is attached.
	programs map[string]*ebpf.Program
	ids      map[string]ebpf.ProgramID // of programs
	running  sync.RWMutex
	// sweeping is held by who has the map of candidates to himself.
	sweeping sync.Mutex
	// changes serialises attaching, detaching and replacing.
	changes sync.Mutex
	qdiscs  qdiscs
	tcx     bool // programs are attached by tcx, else by clsact
	pods    attach.Watch
}

// Program returns a loaded program by its name, such as ec_from_pod, as long as
// Reconfigure is not called; nil when there is none.
func (d *Datapath) Program(name string) *ebpf.Program {
	d.running.RLock()
	defer d.running.RUnlock()
	return d.programs[name]
}

// Reconfigure replaces the running programs in place by the same ones with other
// constants, and with those for uplinks without an Ethernet header (Options.Bare) or without: maps, flows and attachments stay. After an error the old programs keep
// running. Other methods wait while it replaces, but not while it waits itself, for
// the verifier or for work on pods.
func (d *Datapath) Reconfigure(ctx context.Context, node config.NodeConfig, bare bool) error {
	// The new programs find the maps by their pins. A map without one would be created anew, empty.
	if _, err := d.RestorePins(); err != nil {
		return fmt.Errorf("reconfigure programs: %w", err)
	}
	opts := d.opts
	opts.NodeConfig, opts.Bare, opts.work = node, bare, "mode change"
	begun := false
	opts.begin = func() {
		begun = true
		d.changes.Lock()
		d.running.Lock()
	}
	next, err := Load(ctx, opts)
	if err == nil {
		d.programs, next.programs = next.programs, d.programs
		d.ids = next.ids
	}
	if begun {
		d.running.Unlock()
		d.changes.Unlock()
	}
	if err != nil {
		return fmt.Errorf("reconfigure programs: %w", err)
	}
	return next.Close()
}

// Close closes the programs and maps. They stay pinned and attached.
func (d *Datapath) Close() error {
	d.pods.Close()
	errs := []error{d.Maps.Close()}
	for _, p := range d.programs {
		errs = append(errs, p.Close())
	}
	return errors.Join(errs...)
}
