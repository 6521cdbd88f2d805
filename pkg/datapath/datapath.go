// Package datapath brings the programs and maps of a node into the kernel and
// keeps them there: it loads, configures and tests the programs, replaces those
// that run already, sweeps the flow tables, and removes all of it again. How maps
// change is the business of package migrate below it. What stands in the maps is the
// business of their writers.
//
//	dp, err := datapath.Load(ctx, datapath.Options{Dir: dir, StateDir: state, NodeConfig: cfg, Log: log})
//	err = dp.AttachUplink(3)
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
	// ErrLayout is returned (wrapped) by Load when the pinned maps cannot become
	// the maps of these programs. What runs goes on running.
	ErrLayout = migrate.ErrLayout

	// ErrSelfTest is returned (wrapped) by Load when a new program, run on a test
	// packet, does what it may never do.
	ErrSelfTest = errors.New("program fails its self-test")

	// ErrKernelTooOld is returned (wrapped) by Load and Probe, with all that the
	// kernel lacks.
	ErrKernelTooOld = errors.New("kernel is too old")

	// ErrRealtime is returned (wrapped) by Load and Probe on a PREEMPT_RT kernel.
	ErrRealtime = errors.New("kernel is a PREEMPT_RT one")
)

// defaultLockTimeout is longer than any work on one pod takes.
const defaultLockTimeout = 30 * time.Second

// Options say where a node's dataplane lives and how it is configured.
type Options struct {
	// Dir is the pin directory.
	Dir bpffs.Dir
	// StateDir holds the node's lock and the record of the qdiscs that we made.
	StateDir string
	// Attach is how programs are attached; the zero value is attach.Auto.
	Attach attach.Mode
	// NodeConfig is what the programs are compiled with by the verifier. The two
	// capacities in it are filled in from the maps.
	NodeConfig config.NodeConfig
	// SnatEntries is the capacity of the tables snat and snat_reverse, and
	// ConntrackEntries that of conntrack; 0: as compiled.
	SnatEntries, ConntrackEntries uint32
	// LockTimeout bounds the wait for work on pods to end; 0: 30 seconds.
	LockTimeout time.Duration
	// Spec holds other programs than the embedded ones, for tests.
	Spec *ebpf.CollectionSpec
	// Log takes what a person should know; nil: slog.Default.
	Log *slog.Logger

	// begin, when it is not nil, is called before the first change to what runs.
	begin func()
	// work is what who waits for the node's lock is told; empty: the start.
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

func (o Options) attacher() attach.Attacher {
	return attach.Attacher{Dir: o.Dir, Mode: o.Attach}
}

// lock takes the node's lock for a change to all pods at once.
func (o Options) lock(ctx context.Context, work string) (*bpffs.Lock, error) {
	ctx, cancel := context.WithTimeout(ctx, o.LockTimeout)
	defer cancel()
	return bpffs.Exclusive(ctx, o.StateDir, work)
}

// LoadLock is the file in the state directory that keeps two loads apart. The
// node's lock is too dear for that: the verifier takes seconds.
const LoadLock = "load.lock"

func (o Options) lockLoading(ctx context.Context) (*bpffs.Lock, error) {
	ctx, cancel := context.WithTimeout(ctx, o.LockTimeout)
	defer cancel()
	return bpffs.File(ctx, filepath.Join(o.StateDir, LoadLock))
}

// Datapath is the dataplane of a node, open and running. It goes on running
// when it is closed, and when the process ends. Its methods may be called from
// several goroutines at once, but for Close.
type Datapath struct {
	// Maps are the pinned maps.
	Maps *Maps

	opts Options
	// programs are the loaded ones by name. Whoever uses one, or compares one with
	// what is attached, holds running, for Reconfigure takes others in their place.
	programs map[string]*ebpf.Program
	running  sync.RWMutex
	// changes keeps attaching, detaching and replacing apart.
	changes sync.Mutex
	qdiscs  qdiscs
}

// Program returns a loaded program by its name, such as ec_from_pod, as long as
// Reconfigure is not called; nil when there is none.
func (d *Datapath) Program(name string) *ebpf.Program {
	d.running.RLock()
	defer d.running.RUnlock()
	return d.programs[name]
}

// Reconfigure replaces the running programs by the same ones with other
// constants, in place: maps, flows and attachments stay. After an error the
// programs of before run on. Other methods wait for it while it replaces, but not
// while it waits itself, for the verifier or for work on pods.
func (d *Datapath) Reconfigure(ctx context.Context, node config.NodeConfig) error {
	// The new programs find their maps by their pins. One that somebody removed would be made anew, and empty.
	if _, err := d.RestorePins(); err != nil {
		return fmt.Errorf("reconfigure programs: %w", err)
	}
	opts := d.opts
	opts.NodeConfig, opts.work = node, "mode change"
	begun := false
	opts.begin = func() {
		begun = true
		d.changes.Lock()
		d.running.Lock()
	}
	next, err := Load(ctx, opts)
	if err == nil {
		d.programs, next.programs = next.programs, d.programs
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

// Close lets go of the programs and maps. They stay pinned and attached.
func (d *Datapath) Close() error {
	errs := []error{d.Maps.Close()}
	for _, p := range d.programs {
		errs = append(errs, p.Close())
	}
	return errors.Join(errs...)
}
