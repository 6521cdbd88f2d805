package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// together is how many pods come at once.
const together = 10

// oneByOne adds pods one after the other, then deletes them. The first one is not counted: its program comes from the disk.
func (m *machine) oneByOne(ctx context.Context, network *modes.Network) (result.Sample, error) {
	first := m.reserve(m.profile.pods + 1)
	adds, dels, err := batch(ctx, network, first, m.profile.pods+1, 1)
	if err != nil {
		return result.Sample{}, err
	}
	return plugin(adds[1:], dels[1:]), nil
}

// tenAtOnce adds ten pods at once and deletes them at once, as often as the profile says.
func (m *machine) tenAtOnce(ctx context.Context, network *modes.Network) (result.Sample, error) {
	var adds, dels []float64
	for range m.profile.batches {
		a, d, err := batch(ctx, network, m.reserve(together), together, together)
		if err != nil {
			return result.Sample{}, err
		}
		adds, dels = append(adds, a...), append(dels, d...)
	}
	return plugin(adds, dels), nil
}

func (m *machine) reserve(n int) (first int) {
	first = m.pods
	m.pods += n
	return first
}

// batch adds pods, at most so many at once, and then deletes those that were added.
func batch(ctx context.Context, network *modes.Network, first, count, atOnce int) (adds, dels []float64, err error) {
	there := make([]bool, count)
	adds, err = each(count, atOnce, func(i int) (time.Duration, error) {
		took, err := network.Add(ctx, first+i)
		there[i] = err == nil
		return took, err
	})
	if err != nil {
		err = fmt.Errorf("add pods: %w", err)
	}
	// Also when the run ends here: nothing may stay.
	dels, deleted := each(count, atOnce, func(i int) (time.Duration, error) {
		if !there[i] {
			return 0, nil
		}
		return network.Del(context.WithoutCancel(ctx), first+i)
	})
	if deleted != nil {
		err = errors.Join(err, fmt.Errorf("delete pods: %w", deleted))
	}
	return adds, dels, err
}

// each calls fn for so many numbers from 0 on, at most so many at once, and returns how long each took, in seconds.
func each(count, atOnce int, fn func(i int) (time.Duration, error)) ([]float64, error) {
	took, errs := make([]float64, count), make([]error, count)
	free := make(chan struct{}, atOnce)
	var running sync.WaitGroup
	for i := range count {
		free <- struct{}{}
		running.Go(func() {
			defer func() { <-free }()
			d, err := fn(i)
			took[i], errs[i] = d.Seconds(), err
		})
	}
	running.Wait()
	return took, errors.Join(errs...)
}

func plugin(adds, dels []float64) result.Sample {
	pairs := make([]float64, len(adds))
	for i := range pairs {
		pairs[i] = adds[i] + dels[i]
	}
	add, del := result.Each(adds), result.Each(dels)
	return result.Sample{
		Values: map[string]float64{
			"pair-p50": result.Each(pairs).Quantile(0.5),
			"add-p50":  add.Quantile(0.5),
			"del-p50":  del.Quantile(0.5),
		},
		Distributions: map[string]result.Distribution{"add": add, "del": del},
	}
}
