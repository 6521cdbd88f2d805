package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// plugins adds pods and deletes them again: one after the other, or so many at once, as often as the profile says. One by one the first is not
// counted: its program comes from the disk.
func (m *machine) plugins(ctx context.Context, network *modes.Network, atOnce int) (result.Sample, error) {
	batches, count := max(1, m.profile.pods/atOnce), atOnce
	if atOnce == 1 {
		batches, count = 1, m.profile.pods+1
	}
	var adds, dels []float64
	for range batches {
		a, d, err := m.batch(ctx, network, count, atOnce)
		if err != nil {
			return result.Sample{}, err
		}
		adds, dels = append(adds, a...), append(dels, d...)
	}
	if atOnce == 1 {
		adds, dels = adds[1:], dels[1:]
	}
	pairs := make([]float64, len(adds))
	for i := range pairs {
		pairs[i] = adds[i] + dels[i]
	}
	values := map[string]float64{"last": slices.Max(adds)} // they began at once
	for name, seconds := range map[string][]float64{"pair-p50": pairs, "add-p50": adds, "del-p50": dels} {
		values[name] = result.Quantile(seconds, 0.5)
	}
	return result.Sample{Values: values, Durations: map[string][]float64{"add": adds, "del": dels}}, nil
}

// batch adds pods, at most so many at once, and then deletes those that were added: also when the run ends here, since nothing may stay.
func (m *machine) batch(ctx context.Context, network *modes.Network, count, atOnce int) (adds, dels []float64, err error) {
	first := m.pods
	m.pods += count
	there := make([]*lab.Pod, count)
	adds, err = each(count, atOnce, func(i int) (took time.Duration, err error) {
		there[i], took, err = network.Add(ctx, first+i)
		return took, err
	})
	dels, deleted := each(count, atOnce, func(i int) (time.Duration, error) {
		if there[i] == nil {
			return 0, nil
		}
		return network.Del(context.WithoutCancel(ctx), there[i])
	})
	if deleted != nil {
		err = errors.Join(err, fmt.Errorf("delete pods: %w", deleted))
	}
	return adds, dels, err
}

// each calls fn for so many numbers from 0 on, at most so many at once, and returns how long each took, in seconds, and the first error.
func each(count, atOnce int, fn func(i int) (time.Duration, error)) ([]float64, error) {
	took := make([]float64, count)
	var running errgroup.Group
	running.SetLimit(atOnce)
	for i := range count {
		running.Go(func() error {
			d, err := fn(i)
			took[i] = d.Seconds()
			return err
		})
	}
	return took, running.Wait()
}
