package datapath

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/affinity"
	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/registry"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/sockets"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath/migrate"
)

// step is a point of Load between two changes, where a test can interrupt it.
type step string

// The steps in their order. Before committed, nothing that runs is changed; attached
// comes once for each attachment, published for each pin.
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

// Load loads the programs, attaches them to every interface that has a program of
// ours, and pins them. It is used to start, to restart and to upgrade: pinned maps
// are used as they are, or their content is moved to new ones, and so are pinned
// programs, if they are the same. After an error the
// old programs keep running with the old maps. If the process is killed at any
// point, the next call goes on from there.
func Load(ctx context.Context, opts Options) (*Datapath, error) {
	return load(ctx, opts.withDefaults(), func(step) error { return nil })
}

// load is Load, which calls at after each step; an error of at fails the load.
func load(ctx context.Context, opts Options, at func(step) error) (*Datapath, error) {
	found, err := Probe(opts)
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
	l := &loader{opts: opts, at: at, tcx: found.TCX && opts.Attach != attach.Clsact, qdiscs: qdiscs{stateDir: opts.StateDir}}
	defer func() { l.pods.Release() }()
	if err := l.run(ctx); err != nil {
		l.close()
		return nil, explainMemory(err)
	}
	return l.finish(), nil
}

// explainMemory says what limits the memory of maps, which most often is not the machine.
func explainMemory(err error) error {
	if !errors.Is(err, unix.ENOMEM) {
		return err
	}
	return fmt.Errorf("%w: maps count towards the memory limit of the container or service that makes them: give it a higher one or none "+
		"(a LimitRange of the namespace may have set it)", err)
}

// loader is one run of Load.
type loader struct {
	opts     Options
	at       func(step) error
	tcx      bool
	qdiscs   qdiscs
	spec     *ebpf.CollectionSpec
	tables   *migrate.Tables
	programs map[string]*ebpf.Program
	ids      map[string]ebpf.ProgramID
	tested   *ebpf.Collection // what the self-test runs; nil: the programs themselves
	reused   bool             // the programs were pinned already
	pods     *bpffs.Lock      // the node's lock, which excludes the plugin; nil: not held
}

// run does everything that takes the verifier long before it excludes the plugin.
func (l *loader) run(ctx context.Context) error {
	stages := []struct {
		do   func() error
		then step
	}{
		{l.prepare, stepPrepared},
		{l.openTables, stepOpened},
		{l.loadPrograms, stepLoaded},
		{l.selfTest, stepTested},
		{func() error { return l.begin(ctx) }, ""},
		{l.fill, stepFilled},
		{l.forgetTestPod, ""},
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

// begin is called before anything that runs is changed. From then on nobody else works on a pod, attaches or detaches.
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

// prepare makes the directories and configures the programs.
func (l *loader) prepare() (err error) {
	if err := l.opts.Dir.Prepare(); err != nil {
		return err
	}
	l.spec, err = configure(l.opts)
	return err
}

// kernelPrefix marks our maps in `bpftool map`; their pins have the plain names.
const kernelPrefix = "ec_"

// pathLifetime is how long the programs cache a path. A change of the cluster or of
// the routes takes effect that much later.
const pathLifetime = 10 * time.Millisecond

// configure returns the programs with their constants and capacities set.
func configure(opts Options) (*ebpf.CollectionSpec, error) {
	spec, err := opts.spec()
	if err != nil {
		return nil, err
	}
	options := map[string]uint32{snat.Name: opts.SnatEntries, conntrack.Name: opts.ConntrackEntries}
	for _, d := range registry.All() {
		m := spec.Maps[d.Name]
		if m == nil {
			return nil, fmt.Errorf("configure programs: they have no map %s", d.Name)
		}
		m.Name, m.Pinning = kernelPrefix+d.Name, ebpf.PinNone
		if entries := options[d.Capacity]; entries > 0 {
			m.MaxEntries = entries
		}
	}
	if opts.NodeConfig.Services == 0 { // nobody writes to them then, and all of their room is memory
		spec.Maps[sockets.Name].MaxEntries, spec.Maps[affinity.ClientsName].MaxEntries = 1, 1
	}
	node := opts.NodeConfig
	node.SnatEntries, node.ConntrackEntries = spec.Maps[snat.Name].MaxEntries, spec.Maps[conntrack.Name].MaxEntries
	node.PathLifetime = uint32(pathLifetime)
	if node.HostNetns, err = hostNetns(node); err != nil {
		return nil, err
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

func (l *loader) openTables() (err error) {
	l.tables, err = migrate.Open(l.opts.Dir, l.spec.Maps, l.opts.Log)
	return err
}

// loadPrograms loads the programs, unless they are pinned, and those of the self-test, where there are some. What identifies them is read once: the kernel's
// answer has a whole program in it.
func (l *loader) loadPrograms() error {
	if l.reuse() {
		l.opts.Log.Info("the programs of the last start are used on")
		return nil
	}
	coll, err := loadCollection(l.spec, l.tables.Maps())
	if err != nil {
		return err
	}
	defer coll.Close()
	l.programs, coll.Programs = coll.Programs, nil
	if !l.tables.New() {
		if err := l.loadTested(); err != nil {
			return err
		}
	}
	l.ids = make(map[string]ebpf.ProgramID, len(l.programs))
	for name, p := range l.programs {
		info, err := p.Info()
		if err != nil {
			return fmt.Errorf("read program %s: %w", name, err)
		}
		l.ids[name], _ = info.ID()
	}
	return nil
}

// mostVerified is how many programs are loaded at once: the kernel takes some megabytes for each, and four take most of the time.
const mostVerified = 4

// loadCollection loads programs with those maps, and others that it makes, several at a time: the verifier takes most of a start.
func loadCollection(spec *ebpf.CollectionSpec, replacements map[string]*ebpf.Map) (*ebpf.Collection, error) {
	coll, err := ebpf.NewCollectionWithOptions(with(spec, nil), ebpf.CollectionOptions{MapReplacements: replacements})
	if err != nil {
		return nil, fmt.Errorf("load programs: %w", err)
	}
	all, ctx := errgroup.WithContext(context.Background())
	workers := min(runtime.GOMAXPROCS(0), mostVerified)
	all.SetLimit(workers)
	caches := cachesFor(workers)
	var mu sync.Mutex
	// What takes long is begun first.
	for _, name := range slices.SortedFunc(maps.Keys(spec.Programs), func(a, b string) int {
		return len(spec.Programs[b].Instructions) - len(spec.Programs[a].Instructions)
	}) {
		one := with(spec, map[string]*ebpf.ProgramSpec{name: spec.Programs[name]})
		all.Go(func() error {
			if ctx.Err() != nil {
				return nil // another one has been refused
			}
			cache := <-caches
			defer func() { caches <- cache }()
			alone, err := ebpf.NewCollectionWithOptions(one, ebpf.CollectionOptions{MapReplacements: coll.Maps, Cache: cache})
			if err != nil {
				return fmt.Errorf("load programs: %w", err)
			}
			defer alone.Close()
			mu.Lock()
			defer mu.Unlock()
			coll.Programs[name] = alone.DetachProgram(name)
			return nil
		})
	}
	if err := all.Wait(); err != nil {
		coll.Close()
		return nil, err
	}
	return coll, nil
}

// cachesFor returns a cache of the kernel's types for each worker. Two workers must not share one: where a kfunc belongs to a kernel
// module, as conntrack's do on most distributions, the library decodes the kernel's types without holding their lock.
func cachesFor(workers int) chan *btf.Cache {
	caches := make(chan *btf.Cache, workers)
	for range workers {
		caches <- btf.NewCache()
	}
	return caches
}

// with is a collection with other programs, which shares nothing that loading it changes.
func with(spec *ebpf.CollectionSpec, programs map[string]*ebpf.ProgramSpec) *ebpf.CollectionSpec {
	other := *spec
	other.Programs = programs
	return other.Copy()
}

// fill copies the content of maps that move, before any new program runs.
func (l *loader) fill() error { return l.tables.Fill() }

// finish makes the result of a run that succeeded.
func (l *loader) finish() *Datapath {
	return &Datapath{
		Maps: wrapMaps(l.tables.Release()), opts: l.opts, programs: l.programs, ids: l.ids, qdiscs: l.qdiscs, tcx: l.tcx,
		pods: attach.Watch{Dir: l.opts.Dir, Hook: attach.FromPod},
	}
}

func (l *loader) close() {
	if l.tables != nil {
		l.tables.Close()
	}
	l.closeTested()
	closePrograms(l.programs)
}
