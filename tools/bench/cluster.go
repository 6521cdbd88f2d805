package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/report"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// clusterOptions say how much to measure on real clusters.
type clusterOptions struct {
	publication

	workloads                             []string
	rounds, pods, burst, rollouts, starts int
	rest                                  time.Duration
	nodes                                 []int
	out                                   string
}

// wholeCluster is what a run takes that is judged and published. A hundred pods are the fewest that have a p99. Half of
// the starts are with an empty map.
func wholeCluster() clusterOptions {
	return clusterOptions{workloads: clusterWorkloads(), rounds: 6, pods: 20, burst: 10, rollouts: 6, starts: 10, rest: time.Minute, nodes: []int{2, 500, 5000}}
}

func clusterWorkloads() (names []string) {
	for _, w := range result.ClusterCatalog() {
		names = append(names, w.Name)
	}
	return names
}

func clusterCommand(e env) *cobra.Command {
	o := wholeCluster()
	command := &cobra.Command{
		Use:   "cluster",
		Short: "Measure on real Kubernetes clusters that this machine runs",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return measureCluster(cmd.Context(), e, o) },
	}
	flags := command.Flags()
	flags.StringSliceVar(&o.workloads, "workloads", o.workloads, "only these workloads")
	flags.IntVar(&o.rounds, "rounds", o.rounds, "so many rounds of pods, half of them with the nodes' roles exchanged")
	flags.IntVar(&o.pods, "pods", o.pods, "so many pods of each network in a round, one after the other")
	flags.IntVar(&o.burst, "burst", o.burst, "so many pods at once, of each network in a round")
	flags.IntVar(&o.rollouts, "rollouts", o.rollouts, "so many rollouts")
	flags.IntVar(&o.starts, "starts", o.starts, "so many starts of the agent at each number of Nodes")
	flags.DurationVar(&o.rest, "rest", o.rest, "watch agents at rest for so long")
	flags.IntSliceVar(&o.nodes, "nodes", o.nodes, "measure agents at these numbers of Nodes")
	flags.StringVar(&o.out, "out", filepath.Join("bench-out", result.ClusterProfile), "the directory for bench.json, bench.md and the plots")
	o.flags(command)
	return command
}

// check finds what would keep the run from being made, or published, before it is.
func (o clusterOptions) check(e env, run *result.Run) error {
	for _, name := range o.workloads {
		if !slices.Contains(clusterWorkloads(), name) {
			return usage(fmt.Errorf("unknown workload %q; there are: %s", name, strings.Join(clusterWorkloads(), ", ")))
		}
	}
	if o.rounds < 2 || o.rounds%2 != 0 {
		return usage(fmt.Errorf("--rounds %d: want an even number, for the nodes' roles to be exchanged halfway", o.rounds))
	}
	if err := errors.Join(o.publication.check(result.ClusterProfile), o.fits(run)); err != nil {
		return err
	}
	if !e.root {
		return errors.New("needs root, for clusters' namespaces and cgroups; run it with sudo, or as root")
	}
	return nil
}

// short says that something is measured less often than a judgement takes.
func (o clusterOptions) short() bool {
	whole := wholeCluster()
	return o.rounds < whole.rounds || o.pods < whole.pods || o.burst != whole.burst || o.rollouts < whole.rollouts || o.starts < whole.starts ||
		o.rest < whole.rest || !slices.Equal(o.nodes, whole.nodes)
}

func newClusterRun(ctx context.Context, o clusterOptions) *result.Run {
	run := &result.Run{
		Schema: result.Schema, Profile: result.ClusterProfile, Started: time.Now(), Command: strings.Join(append([]string{"bench"}, os.Args[1:]...), " "),
		Indicative: o.short(), Rounds: o.rounds, Workloads: o.workloads, Environment: environment(ctx),
		Modes: []result.Mode{{Name: "ebpf+kube-proxy"}, {Name: "iptables"}},
	}
	// nft is no part of it: kube-proxy and the classical network's rules are iptables'.
	delete(run.Environment.Versions, "nft")
	return run
}

// measureCluster carries out a run on clusters, from the flags to the report.
func measureCluster(ctx context.Context, e env, o clusterOptions) error {
	run := newClusterRun(ctx, o)
	if err := o.check(e, run); err != nil {
		return err
	}
	root, err := checkout(ctx)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return fmt.Errorf("make the directory of --out: %w", err)
	}
	log := slog.New(slog.NewTextHandler(e.stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))
	json := filepath.Join(o.out, "bench.json")
	files := []string{filepath.Join(root, "bin/ebpf-agent"), filepath.Join(root, "bin/ebpf-cni")}
	measured := contents(files)
	maps.Copy(run.Environment.Versions, builds(files))
	run.Environment.Warnings = append(run.Environment.Warnings, strangers(run.Environment)...)
	for _, warning := range run.Environment.Warnings {
		log.Warn("the figures may be worth less", "because", warning)
	}
	err = measureIn(ctx, e, o, filepath.Join(root, "test/cluster"), lines{run: run, save: func() error { return run.Write(json) }})
	run.Finished = time.Now()
	run.Environment.Warnings = append(run.Environment.Warnings, changed(measured, contents(files))...)
	if err != nil {
		run.Interrupted = brief(ctx, err)
	}
	if len(run.Samples) == 0 {
		return err
	}
	if saved := run.Write(json); saved != nil {
		return errors.Join(err, saved)
	}
	_, reported := report.Write(run, report.Beside(json))
	fmt.Fprintf(e.stdout, "%s in %s\n", report.Beside(json).Document, rounded(run.Finished.Sub(run.Started)))
	if run.Interrupted == "" {
		reported = errors.Join(reported, o.publish(e, run))
	}
	return errors.Join(err, reported)
}

// brief is why a run ended early, in one line.
func brief(ctx context.Context, err error) string {
	if ctx.Err() != nil {
		return context.Cause(ctx).Error()
	}
	first, _, _ := strings.Cut(err.Error(), "\n")
	return first
}

// checkout is the directory of the project, which the working directory is part of.
func checkout(ctx context.Context) (string, error) {
	module := output(ctx, "go", "env", "GOMOD")
	if filepath.Base(module) != "go.mod" {
		return "", errors.New("the working directory is not in a checkout of the project, which the clusters are made from")
	}
	return filepath.Dir(module), nil
}

// measureIn runs the program that makes clusters and measures them. It is of another module, which has Kubernetes' requirements.
func measureIn(ctx context.Context, e env, o clusterOptions, module string, into lines) (err error) {
	dir, err := os.MkdirTemp("", "bench-cluster-")
	if err != nil {
		return fmt.Errorf("make a directory for the program that makes clusters: %w", err)
	}
	defer os.RemoveAll(dir)
	program := filepath.Join(dir, "play")
	build := exec.CommandContext(ctx, "go", "build", "-o", program, "./play")
	build.Dir = module
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build the program that makes clusters, in %s: %w\n%s", module, err, out)
	}
	play := exec.CommandContext(ctx, program, o.args()...)
	play.Dir, play.Stderr = module, e.stderr
	// It has clusters to end first.
	play.Cancel, play.WaitDelay = func() error { return play.Process.Signal(unix.SIGTERM) }, time.Minute
	said, err := play.StdoutPipe()
	if err != nil {
		return err
	}
	if err := play.Start(); err != nil {
		return fmt.Errorf("measure clusters: %w", err)
	}
	read := into.read(said)
	if read != nil { // nothing is worth measuring that nobody can read
		_ = play.Process.Signal(unix.SIGTERM)
	}
	if err := play.Wait(); err != nil && read == nil {
		return fmt.Errorf("measure clusters: %w; why stands above", err)
	}
	return read
}

func (o clusterOptions) args() []string {
	var nodes []string
	for _, n := range o.nodes {
		nodes = append(nodes, fmt.Sprint(n))
	}
	args := []string{"measure", "-only", strings.Join(o.workloads, ","), "-nodes", strings.Join(nodes, ","), "-rest", o.rest.String()}
	for name, n := range map[string]int{"rounds": o.rounds, "pods": o.pods, "burst": o.burst, "rollouts": o.rollouts, "starts": o.starts} {
		args = append(args, fmt.Sprintf("-%s=%d", name, n))
	}
	return args
}
