package datapath

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/journal"
	"github.com/ebpf-cni/ebpf-cni/maps/raw"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
)

// Under pressure, of which the program says whether there is any, flows that are not
// established end earlier, and sweeps are more frequent.
const (
	sweepInterval    = 5 * time.Second
	pressureInterval = time.Second
)

// collectProgram removes ended flows from the flow tables.
const collectProgram = "ec_collect"

// CollectStage is what a run of ec_collect does: enum collect_stage.
type CollectStage uint32

// The stages of a sweep; between the first and the last come slices.
const (
	CollectBegin CollectStage = iota
	CollectPairs
	CollectReverse
	CollectRecorded
	CollectEnd
)

// collectArgs is struct collect_args of bpf/collect.c.
type collectArgs struct {
	Now      uint64
	Table    usage.Table
	Pressure uint32
	Stage    CollectStage
	Count    uint32
	Head     uint64
	Scanned  uint64
	Deleted  uint64
	// Left, not 0: all candidates end, whatever their age.
	Left uint64
}

// Swept counts what a sweep did in one flow table, in flows.
type Swept struct {
	Scanned, Deleted uint64
	// Pressure is whether flows of somebody's have ended earlier.
	Pressure bool
}

// SweepResult is what a sweep of both flow tables did.
type SweepResult struct {
	Snat, Conntrack Swept
}

// Sweep removes flows that have ended or have been idle for too long from both
// tables, and returns after how long to call it again: sooner under pressure.
func (d *Datapath) Sweep() (SweepResult, time.Duration, error) {
	now, err := monotonic()
	if err != nil {
		return SweepResult{}, sweepInterval, err
	}
	return d.SweepAt(now)
}

// SweepAt is Sweep with the time of CLOCK_MONOTONIC.
func (d *Datapath) SweepAt(now time.Duration) (result SweepResult, again time.Duration, err error) {
	again = sweepInterval
	for t, swept := range map[usage.Table]*Swept{usage.Snat: &result.Snat, usage.Conntrack: &result.Conntrack} {
		var failed error
		*swept, failed = d.SweepTable(now, t)
		err = errors.Join(err, failed)
		if swept.Pressure {
			again = pressureInterval
		}
	}
	return result, again, err
}

// SweepTable removes the flows of one table that have ended by now, a time of
// CLOCK_MONOTONIC.
func (d *Datapath) SweepTable(now time.Duration, t usage.Table) (Swept, error) {
	args := collectArgs{Now: uint64(now), Table: t}
	var out collectArgs
	err := d.collect(func(c Collector) (err error) {
		out, err = c.sweep(args)
		return err
	})
	if err != nil {
		return Swept{}, fmt.Errorf("sweep table %s: %w", t, err)
	}
	return Swept{Scanned: out.Scanned, Deleted: out.Deleted, Pressure: out.Pressure != 0}, nil
}

// collect uses the collector, which one at a time can.
func (d *Datapath) collect(use func(Collector) error) error {
	d.sweeping.Lock()
	defer d.sweeping.Unlock()
	d.running.RLock()
	defer d.running.RUnlock()
	p := d.programs[collectProgram]
	if p == nil {
		return fmt.Errorf("no program %s is loaded", collectProgram)
	}
	return use(Collector{Program: p, Maps: d.Maps.all})
}

// Collector runs ec_collect over a table in slices.
type Collector struct {
	Program *ebpf.Program
	// Maps are the flow tables and the map of candidates, by name.
	Maps map[string]*ebpf.Map
}

// SweepAt removes the flows of a table that have ended by now (CLOCK_MONOTONIC, ns),
// and returns how many they were. pressure: as if the table was under pressure.
func (c Collector) SweepAt(t usage.Table, now uint64, pressure bool) (int, error) {
	args := collectArgs{Now: now, Table: t}
	if pressure {
		args.Pressure = 1
	}
	out, err := c.sweep(args)
	return int(out.Deleted), err
}

// stages are the maps of each table, by the stage that goes through their keys.
var stages = [usage.Tables]map[CollectStage]string{
	usage.Snat:      {CollectPairs: snat.Name, CollectReverse: snat.ReverseName},
	usage.Conntrack: {CollectRecorded: conntrack.Name},
}

func (c Collector) sweep(args collectArgs) (collectArgs, error) {
	args, err := collect(c.Program, args)
	if err != nil {
		return args, err
	}
	for stage := CollectPairs; stage < CollectEnd; stage++ {
		name, ok := stages[args.Table][stage]
		if !ok {
			continue
		}
		args.Stage = stage
		if err := c.slices(c.Maps[name], &args); err != nil {
			return args, err
		}
	}
	args.Stage = CollectEnd
	return collect(c.Program, args)
}

// slices passes the keys of a map to the program, as many at a time as candidates
// has room for.
func (c Collector) slices(m *ebpf.Map, args *collectArgs) error {
	to := c.Maps[journal.CandidatesName]
	indexes := candidateIndexes(to)
	keys := raw.Records(len(indexes), m.KeySize())
	args.Count = 0
	flush := func() (err error) {
		if args.Count == 0 {
			return nil
		}
		n := int(args.Count)
		if _, err = to.BatchUpdate(indexes[:n], keys.Slice(0, n).Interface(), nil); err != nil {
			return fmt.Errorf("write candidates: %w", err)
		}
		*args, err = collect(c.Program, *args)
		args.Count = 0
		return err
	}
	err := raw.Each(m, func(key []byte, _ raw.Value) error {
		copy(keys.Index(int(args.Count)).Bytes(), key)
		if args.Count++; int(args.Count) < len(indexes) {
			return nil
		}
		return flush()
	})
	if err != nil {
		return err
	}
	return flush()
}

func candidateIndexes(to *ebpf.Map) []uint32 {
	indexes := make([]uint32, to.MaxEntries())
	for i := range indexes {
		indexes[i] = uint32(i)
	}
	return indexes
}

func collect(p *ebpf.Program, args collectArgs) (collectArgs, error) {
	var out collectArgs
	ret, err := p.Run(&ebpf.RunOptions{Context: args, ContextOut: &out})
	if err != nil {
		return out, err
	}
	if ret != 0 {
		return out, fmt.Errorf("program returned %d", int32(ret))
	}
	return out, nil
}

// monotonic reads the clock of the programs' time stamps.
func monotonic() (time.Duration, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0, fmt.Errorf("read monotonic clock: %w", err)
	}
	return time.Duration(ts.Nano()), nil
}
