package datapath

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/journal"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// step is a point of Load between two changes, where it may be cut off.
type step string

// The steps in their order. Until committed nothing that runs is touched;
// attached and published come once for each attachment and each pin.
const (
	stepPrepared  step = "prepared"
	stepOpened    step = "opened"
	stepLoaded    step = "loaded"
	stepTested    step = "tested"
	stepFilled    step = "filled"
	stepCommitted step = "committed"
	stepAttached  step = "attached"
	stepMerged    step = "merged"
	stepPublished step = "published"
)

// Load brings the programs into the kernel, onto every interface that has some
// of ours, and into the pin directory. It is the one way to start, to start again
// and to upgrade: maps that are pinned are used as they are, or copied into larger
// ones. After an error the programs of before run on with the maps of before.
// Wherever it is cut off, the next call puts things right.
func Load(ctx context.Context, opts Options) (*Datapath, error) {
	return load(ctx, opts.withDefaults(), func(step) error { return nil })
}

// load calls at between its steps; an error of it is a failure of that step.
func load(ctx context.Context, opts Options, at func(step) error) (*Datapath, error) {
	found, err := Probe(opts.Attach)
	if err != nil {
		return nil, err
	}
	opts.Log.Info("kernel has what is needed", "release", found.Release, "tcx", found.TCX)
	if err := os.MkdirAll(opts.StateDir, 0o700); err != nil {
		return nil, fmt.Errorf("make state directory: %w", err)
	}
	loading, err := opts.lockLoading(ctx)
	if err != nil {
		return nil, err
	}
	defer loading.Release()
	l := &loader{opts: opts, at: at, qdiscs: qdiscs{stateDir: opts.StateDir}}
	defer func() { l.pods.Release() }()
	if err := l.run(ctx); err != nil {
		l.close()
		return nil, err
	}
	dp, err := l.finish()
	if err != nil {
		l.close()
	}
	return dp, err
}

// loader is one run of Load.
type loader struct {
	opts     Options
	at       func(step) error
	qdiscs   qdiscs
	spec     *ebpf.CollectionSpec
	tables   map[string]*table
	programs map[string]*ebpf.Program
	pods     *bpffs.Lock // keeps the plugin out; nil: it may work
}

// run does all that takes the verifier's time before it keeps the plugin out.
func (l *loader) run(ctx context.Context) error {
	stages := []struct {
		do   func() error
		then step
	}{
		{l.prepare, stepPrepared},
		{l.checkLayout, ""},
		{l.openTables, stepOpened},
		{l.loadPrograms, stepLoaded},
		{l.selfTest, stepTested},
		{func() error { return l.begin(ctx) }, ""},
		{l.fill, stepFilled},
		{l.replace, ""},
		{l.publish, ""},
	}
	for _, s := range stages {
		if err := s.do(); err != nil {
			return err
		}
		if s.then == "" {
			continue
		}
		if err := l.at(s.then); err != nil {
			return err
		}
	}
	return nil
}

// begin comes before anything that runs is touched: nobody works on a pod, attaches or detaches from then on.
func (l *loader) begin(ctx context.Context) (err error) {
	started := time.Now()
	if l.pods, err = l.opts.lock(ctx, l.opts.work); err != nil {
		return err
	}
	l.opts.Log.Info("no work on a pod is under way", "waited", time.Since(started))
	if l.opts.begin != nil {
		l.opts.begin()
	}
	return l.qdiscs.prune() // those of interfaces that are gone
}

// prepare makes the directories, configures the programs and sweeps pins that
// never got to their place.
func (l *loader) prepare() (err error) {
	if err := l.opts.Dir.Prepare(); err != nil {
		return err
	}
	if l.spec, err = configure(l.opts); err != nil {
		return err
	}
	if err := os.MkdirAll(nextDir(l.opts.Dir), 0o700); err != nil {
		return fmt.Errorf("make pin directory: %w", err)
	}
	return sweepNext(l.opts.Dir, l.spec.Maps)
}

// kernelPrefix tells our maps from others' in `bpftool map`; what is pinned has the plain name.
const kernelPrefix = "ec_"

// pathLifetime is how long the programs go by what they found out about an
// address. A change of the cluster or of the routes is seen that much later.
const pathLifetime = 10 * time.Millisecond

// configure returns the programs with their constants and capacities set.
func configure(opts Options) (*ebpf.CollectionSpec, error) {
	spec, err := opts.spec()
	if err != nil {
		return nil, err
	}
	resize(spec, snat.Name, opts.SnatEntries)
	resize(spec, snat.ReverseName, opts.SnatEntries)
	resize(spec, conntrack.Name, opts.ConntrackEntries)
	resize(spec, journal.SnatName, capacity(spec, snat.Name))
	resize(spec, journal.ConntrackName, capacity(spec, conntrack.Name))
	node := opts.NodeConfig
	node.SnatEntries, node.ConntrackEntries = capacity(spec, snat.Name), capacity(spec, conntrack.Name)
	node.PathLifetime = uint32(pathLifetime)
	for name, m := range spec.Maps {
		m.Pinning = ebpf.PinNone
		if !isData(name) {
			m.Name = kernelPrefix + name
		}
	}
	v, ok := spec.Variables["cfg"]
	if !ok {
		return nil, errors.New("configure programs: they have no constant cfg")
	}
	if err := v.Set(node); err != nil {
		return nil, fmt.Errorf("configure programs: %w", err)
	}
	return spec, nil
}

func resize(spec *ebpf.CollectionSpec, name string, entries uint32) {
	if m := spec.Maps[name]; m != nil && entries > 0 {
		m.MaxEntries = entries
	}
}

func capacity(spec *ebpf.CollectionSpec, name string) uint32 {
	if m := spec.Maps[name]; m != nil {
		return m.MaxEntries
	}
	return 0
}

func (l *loader) openTables() error {
	l.tables = make(map[string]*table)
	for _, name := range slices.Sorted(maps.Keys(l.spec.Maps)) {
		if isPrivate(name) {
			continue
		}
		t, err := openTable(l.opts.Dir, name, l.spec.Maps[name])
		if err != nil {
			return err
		}
		l.tables[name] = t
		if t.moves() {
			l.opts.Log.Info("map moves to a new layout", "map", name, "layout", t.spec.String(), "was", t.sources[0].m.String())
		}
	}
	return nil
}

// startOver is the way to a build that cannot use the maps that are there.
const startOver = "or drain the node and reboot it; `ebpf-agent cleanup` removes the maps too, but takes the network from every pod that lives"

// checkLayout refuses maps of a newer build: what their values mean is unknown.
func (l *loader) checkLayout() error {
	m, err := openPin(l.opts.Dir.Map(config.Name))
	if m == nil || err != nil {
		return err
	}
	defer m.Close()
	v, err := lookup(m, make([]byte, m.KeySize()))
	if err != nil || v == nil {
		return err
	}
	if layout := decode[config.Value](v[0]).Layout; layout > wire.LayoutVersion {
		return fmt.Errorf("pinned maps have layout %d, this build knows %d: %w; run a newer build, %s",
			layout, wire.LayoutVersion, ErrLayout, startOver)
	}
	return nil
}

// loadPrograms shows the programs to the verifier.
func (l *loader) loadPrograms() (err error) {
	l.programs, err = l.loadCollection(l.spec)
	return err
}

// loadCollection loads programs that use the tables.
func (l *loader) loadCollection(spec *ebpf.CollectionSpec) (map[string]*ebpf.Program, error) {
	replacements := make(map[string]*ebpf.Map)
	for name, t := range l.tables {
		replacements[name] = t.m
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: replacements})
	if err != nil {
		return nil, fmt.Errorf("load programs: %w", err)
	}
	defer coll.Close()
	programs := coll.Programs
	coll.Programs = nil
	return programs, nil
}

// fill copies what moves, before any new program runs.
func (l *loader) fill() error {
	for _, t := range l.tables {
		if err := t.fill(); err != nil {
			return err
		}
	}
	return nil
}

// finish makes the result of a run that succeeded.
func (l *loader) finish() (*Datapath, error) {
	all := make(map[string]*ebpf.Map)
	for name, t := range l.tables {
		all[name] = t.m
	}
	m, err := wrapMaps(all)
	if err != nil {
		return nil, err
	}
	for _, t := range l.tables {
		t.m = nil // the result's
		t.close()
	}
	return &Datapath{Maps: m, opts: l.opts, programs: l.programs, qdiscs: l.qdiscs}, nil
}

func (l *loader) close() {
	for _, t := range l.tables {
		t.close()
	}
	for _, p := range l.programs {
		_ = p.Close()
	}
}
