package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/load"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

const (
	// betweenAdds is for what an agent does about a pod that has come or gone.
	betweenAdds = 200 * time.Millisecond
	// leastChanges is the share of the changes asked for without which an agent was not under them.
	leastChanges = 0.9
)

// crowd measures on a node full of pods in a large cluster, or beside it on one that is empty. Its agent is started for each sample.
func (m *machine) crowd(ctx context.Context, t task) (sample result.Sample, err error) {
	if m.scale == nil {
		if m.scale, err = newScale(ctx, t.Size, t.Pods); err != nil {
			return result.Sample{}, err
		}
	}
	node := m.scale.full
	if t.Kind == result.Crowd && t.point == 1 {
		node = m.scale.empty
	}
	defer func() {
		_, stopped := node.StopAgent()
		if err = errors.Join(err, stopped); err != nil {
			err = fmt.Errorf("%w; the agent says:\n%s", err, node.LogTail(5))
		}
	}()
	if err := m.scale.start(ctx, node); err != nil {
		return result.Sample{}, err
	}
	if err := pause(ctx, afterStart); err != nil {
		return result.Sample{}, err
	}
	switch t.Kind {
	case result.Status:
		started := time.Now()
		out, err := node.Ebpfctl(ctx, "status")
		took := time.Since(started)
		if _, said := errors.AsType[*exec.ExitError](err); said && len(out) > 0 {
			err = nil // it has found something that is wrong, as the machine's small table of neighbours
		}
		return result.Sample{Values: map[string]float64{"took": took.Seconds()}}, err
	case result.Crowd:
		return adds(ctx, node, m.profile.pods)
	}
	return rest(ctx, node, t, m.profile.rest)
}

// rest measures an agent to which nothing happens but that kubelets renew their Nodes and, where the workload says so, that foreign routes come and go.
func rest(ctx context.Context, node *lab.Node, t task, window time.Duration) (result.Sample, error) {
	others, err := newForeign(node)
	if err != nil {
		return result.Sample{}, err
	}
	changing, stop := context.WithCancel(ctx)
	defer stop()
	var group errgroup.Group
	begun, changes := time.Now(), 0
	group.Go(func() (err error) {
		changes, err = others.change(changing, t.Changes)
		return err
	})
	if err := pause(ctx, window/5); err != nil {
		return result.Sample{}, err
	}
	before, err := spentBy(node)
	if err != nil {
		return result.Sample{}, err
	}
	if err := pause(ctx, window); err != nil {
		return result.Sample{}, err
	}
	after, err := spentBy(node)
	stop()
	asked := t.Changes * time.Since(begun).Seconds()
	if err := errors.Join(err, group.Wait()); err != nil {
		return result.Sample{}, err
	}
	if float64(changes) < leastChanges*asked {
		return result.Sample{}, fmt.Errorf("%w: there were %d changes of routes and not %.0f", load.ErrNotMeasured, changes, asked)
	}
	now, peak, err := memory(node.AgentPID())
	cpu, lines := after.since(before)
	return result.Sample{Values: map[string]float64{"cpu": cpu, "memory": now, "peak": peak, "lines": lines}}, err
}

// adds adds and deletes one pod after the other. A node that is full makes room for it first, and is full again afterwards.
func adds(ctx context.Context, node *lab.Node, count int) (result.Sample, error) {
	full := len(node.Pods()) > 0
	var added, deleted []float64
	timed := func(into *[]float64, fn func() error) error {
		started := time.Now()
		err := fn()
		*into = append(*into, time.Since(started).Seconds())
		return errors.Join(err, pause(ctx, betweenAdds))
	}
	if full {
		if err := node.DelPod(ctx, node.Pods()[0]); err != nil {
			return result.Sample{}, err
		}
	}
	for i := range count + 1 {
		pod, err := node.NewPod(fmt.Sprintf("a%d", i), lab.PodOptions{})
		if err != nil {
			return result.Sample{}, err
		}
		if err := timed(&added, func() error { return pod.Add(ctx) }); err != nil {
			return result.Sample{}, errors.Join(err, node.LosePod(pod))
		}
		if full && i == count {
			break // the last one stays
		}
		err = timed(&deleted, func() error { return pod.Del(ctx) })
		if err := errors.Join(err, node.LosePod(pod)); err != nil {
			return result.Sample{}, err
		}
	}
	added = added[1:] // the plugin came from the disk
	return result.Sample{Values: map[string]float64{"add-p50": result.Quantile(added, 0.5), "del-p50": result.Quantile(deleted, 0.5)},
		Durations: map[string][]float64{"add": added, "del": deleted}}, nil
}
