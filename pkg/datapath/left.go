package datapath

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/journal"
	"github.com/ebpf-cni/ebpf-cni/maps/raw"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Left says whether the container that had an address behind a bridge has left it, so that another one may get it.
type Left func(bridge uint32, address wire.Addr) bool

// EndFlows ends what containers have of addresses that they have left: their flows, and those that they are the backends of. However
// many have left, the tables are read once.
func (d *Datapath) EndFlows(left Left) error {
	now, err := monotonic()
	if err == nil {
		err = d.collect(func(c Collector) error {
			_, err := c.EndFlows(uint64(now), left)
			return err
		})
	}
	if err != nil {
		return fmt.Errorf("end the flows of containers that have left: %w", err)
	}
	return nil
}

// EndFlows is what Datapath's function of that name does, at a time (CLOCK_MONOTONIC, ns); it returns how many flows have ended.
func (c Collector) EndFlows(now uint64, left Left) (ended int, err error) {
	for table := range usage.Tables {
		for stage := CollectPairs; stage < CollectEnd; stage++ {
			name, ok := stages[table][stage]
			if !ok {
				continue
			}
			keys, err := leaving(c.Maps[name], stage, left)
			if err != nil {
				return ended, fmt.Errorf("read map %s: %w", name, err)
			}
			n, err := c.end(collectArgs{Now: now, Table: table, Stage: stage, Left: 1}, keys)
			if ended += n; err != nil {
				return ended, err
			}
		}
	}
	return ended, nil
}

// leaving are the keys of flows that end.
func leaving(m *ebpf.Map, stage CollectStage, left Left) ([]wire.Tuple, error) {
	if stage == CollectRecorded {
		return keysOf(m, func(k conntrack.Key, v conntrack.Value) bool { return left(v.Ifindex, k.Src) })
	}
	return keysOf(m, func(k snat.Key, v snat.Value) bool {
		source := k.Src
		if stage == CollectReverse {
			source = v.ToAddress
		}
		return left(v.Ifindex, source) || left(v.Pod, v.FarAddress)
	})
}

// keysOf are the keys of the entries of a flow table that are wanted.
func keysOf[V any](m *ebpf.Map, wanted func(wire.Tuple, V) bool) (all []wire.Tuple, err error) {
	var keys []wire.Tuple
	var values []V
	err = raw.Batches(m, func(size int) (any, any) {
		keys, values = make([]wire.Tuple, size), make([]V, size)
		return keys, values
	}, func(n int) error {
		for i := range n {
			if wanted(keys[i], values[i]) {
				all = append(all, keys[i])
			}
		}
		return nil
	})
	return all, err
}

// end passes keys to the program, as many at a time as candidates has room for.
func (c Collector) end(args collectArgs, keys []wire.Tuple) (int, error) {
	to := c.Maps[journal.CandidatesName]
	indexes := candidateIndexes(to)
	for len(keys) > 0 {
		n := min(len(keys), len(indexes))
		if _, err := to.BatchUpdate(indexes[:n], keys[:n], nil); err != nil {
			return int(args.Deleted), fmt.Errorf("write candidates: %w", err)
		}
		var err error
		args.Count = uint32(n)
		if args, err = collect(c.Program, args); err != nil {
			return int(args.Deleted), err
		}
		keys = keys[n:]
	}
	return int(args.Deleted), nil
}
