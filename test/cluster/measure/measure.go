// Package measure measures this project on real clusters, and the classical network beside it. It prints what it finds as it finds it, for
// tools/bench, which is of another module and makes a report of it.
package measure

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// What can be measured, by the names that tools/bench has for it.
const (
	FirstPacket = "first-packet"
	Burst       = "burst"
	Rollout     = "rollout"
	Agent       = "agent-cluster"
	Image       = "image"
)

// Workloads are all of them, in the order in which they are measured.
func Workloads() []string { return []string{FirstPacket, Burst, Image, Rollout, Agent} }

// The networks, by the names that tools/bench has for them: every node runs kube-proxy.
const (
	ours      = "ebpf+kube-proxy"
	classical = "iptables"
)

// Options say how much to measure.
type Options struct {
	// Only are the workloads to measure.
	Only []string
	// Rounds are those of first packets and bursts, half of them with the nodes' roles exchanged; Pods are those of a network in a
	// round, and Burst those that are created at once.
	Rounds, Pods, Burst int
	// Rollouts of the DaemonSet.
	Rollouts int
	// Nodes are the numbers of Node objects, in ascending order; at each the agent starts Starts times, and rests for Rest.
	Nodes  []int
	Starts int
	Rest   time.Duration
}

// Sample is one measurement, as a line of the output.
type Sample struct {
	Workload string    `json:"workload"`
	Path     string    `json:"path,omitempty"`
	Mode     string    `json:"mode"`
	Point    int       `json:"point,omitempty"`
	Round    int       `json:"round"`
	Started  time.Time `json:"started"`
	// Values are in seconds, bytes and packets, by name.
	Values map[string]float64 `json:"values,omitempty"`
	// Durations are single ones in seconds, by the name of their distribution.
	Durations map[string][]float64 `json:"durations,omitempty"`
}

// about is the first line of the output.
type about struct {
	// Versions are those of the programs that make the cluster.
	Versions map[string]string `json:"versions"`
}

// printer writes lines of JSON to one place and of progress to another.
type printer struct {
	out, progress io.Writer
	started       time.Time
}

func (p *printer) line(v any) error { return json.NewEncoder(p.out).Encode(v) }

func (p *printer) say(format string, args ...any) {
	fmt.Fprintf(p.progress, "%4.0f s  %s\n", time.Since(p.started).Seconds(), fmt.Sprintf(format, args...))
}

// Run makes clusters and measures them.
func Run(ctx context.Context, o Options, out, progress io.Writer) error {
	p := &printer{out: out, progress: progress, started: time.Now()}
	wants := func(names ...string) bool {
		return slices.ContainsFunc(names, func(name string) bool { return slices.Contains(o.Only, name) })
	}
	if wants(FirstPacket, Burst) {
		half := (o.Rounds + 1) / 2
		// The second time ours is on the node that was the classical one.
		for i, rounds := range [][2]int{{1, half}, {half + 1, o.Rounds}} {
			if err := sideBySide(ctx, o, p, i, rounds); err != nil {
				return err
			}
		}
	}
	if wants(Rollout, Agent, Image) {
		return alone(ctx, o, p)
	}
	return nil
}

// with makes a cluster for as long as f runs.
func with(ctx context.Context, p *printer, nodes int, f func(*cluster.Cluster) error) (err error) {
	p.say("starting a cluster of %d nodes", nodes)
	c, err := cluster.New(ctx, cluster.Options{Nodes: nodes})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close(context.WithoutCancel(ctx))) }()
	versions, err := versionsOf(ctx, c)
	if err != nil {
		return err
	}
	if err := p.line(about{versions}); err != nil {
		return err
	}
	return f(c)
}

// alone measures a cluster of two nodes that has no network but ours.
func alone(ctx context.Context, o Options, p *printer) error {
	return with(ctx, p, 2, func(c *cluster.Cluster) error {
		if slices.Contains(o.Only, Image) {
			if err := image(c, p); err != nil {
				return err
			}
		}
		if !slices.Contains(o.Only, Rollout) && !slices.Contains(o.Only, Agent) {
			return nil
		}
		if err := c.Install(ctx); err != nil {
			return err
		}
		if slices.Contains(o.Only, Rollout) {
			if err := rollouts(ctx, o, c, p); err != nil {
				return err
			}
		}
		if slices.Contains(o.Only, Agent) {
			return agents(ctx, o, c, p)
		}
		return nil
	})
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
