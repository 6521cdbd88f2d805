package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

func clusterCommand(e env) *cobra.Command {
	o := options{out: filepath.Join("bench-out", result.ClusterProfile)}
	command := &cobra.Command{
		Use:   "cluster [-- FLAGS]",
		Short: "Measure on real Kubernetes clusters that this machine runs; FLAGS are those of test/cluster's `play measure`, and make the run a short one",
		RunE:  func(cmd *cobra.Command, args []string) error { return measureCluster(cmd.Context(), e, o, args) },
	}
	command.Flags().StringVar(&o.out, "out", o.out, "the directory for bench.json and bench.md")
	publishFlag(command, &o.publish)
	return command
}

// measureCluster carries out a run on clusters, from the flags to the report.
func measureCluster(ctx context.Context, e env, o options, args []string) error {
	if !e.root {
		return errors.New("needs root, for clusters' namespaces and cgroups; run it with sudo, or as root")
	}
	run := &result.Run{
		Schema: result.Schema, Profile: result.ClusterProfile, Started: time.Now(), Command: strings.Join(append([]string{"bench"}, e.args...), " "),
		Indicative: len(args) > 0, Workloads: result.Names(true), Environment: environment(ctx), Modes: []result.Mode{{Name: result.KubeProxy}, {Name: result.IPTables}},
	}
	// kube-proxy and the classical network's rules are iptables'.
	delete(run.Environment.Versions, "nft")
	root, err := lab.Checkout()
	if err := errors.Join(err, publishable(run, o.publish), os.MkdirAll(o.out, 0o755)); err != nil {
		return err
	}
	files := []string{filepath.Join(root, "bin/ebpf-agent"), filepath.Join(root, "bin/ebpf-cni")}
	maps.Copy(run.Environment.Versions, builds(files))
	run.Environment.Warnings = append(run.Environment.Warnings, strangers(run.Environment)...)
	stop := watch(run, files)
	save := func() error {
		run.Finished = time.Now()
		return run.Write(filepath.Join(o.out, "bench.json"))
	}
	err = measureIn(ctx, e, filepath.Join(root, "test/cluster"), args, lines{run: run, save: save})
	stop()
	if err != nil {
		run.Interrupted, _, _ = strings.Cut(errors.Join(context.Cause(ctx), err).Error(), "\n")
	}
	return errors.Join(err, finish(e, run, o.out, o.publish))
}

// measureIn runs the program that makes clusters and measures them. It is of another module, which has Kubernetes' requirements.
func measureIn(ctx context.Context, e env, module string, args []string, into lines) error {
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
	play := exec.CommandContext(ctx, program, append([]string{"measure"}, args...)...)
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

// line is one of those that test/cluster/measure prints: a sample, or the versions of a cluster's programs.
type line struct {
	result.Sample

	Versions  map[string]string    `json:"versions"`
	Durations map[string][]float64 `json:"durations"`
}

// lines takes them into a run.
type lines struct {
	run  *result.Run
	save func() error
}

// read reads to the end, and saves the run after each sample.
func (l lines) read(from io.Reader) error {
	scanner := bufio.NewScanner(from)
	scanner.Buffer(nil, 1<<20)
	for scanner.Scan() {
		var one line
		if err := json.Unmarshal(scanner.Bytes(), &one); err != nil {
			return fmt.Errorf("read what was measured on a cluster: %w: %.100q", err, scanner.Text())
		}
		if one.Versions != nil {
			maps.Copy(l.run.Environment.Versions, one.Versions)
			continue
		}
		if err := one.check(); err != nil {
			return fmt.Errorf("read what was measured on a cluster: %w", err)
		}
		if seconds := one.Durations["delay"]; seconds != nil {
			all := result.Durations(seconds)
			one.Distributions = map[string]result.Distribution{"delay": all}
			one.Values = map[string]float64{result.P50: all.Quantile(0.5)}
		}
		l.run.Samples = append(l.run.Samples, one.Sample)
		l.run.Rounds = max(l.run.Rounds, one.Round)
		if err := l.save(); err != nil {
			return err
		}
	}
	if err := scanner.Err(); err != nil {
		return fmt.Errorf("read what was measured on a cluster: %w", err)
	}
	return nil
}

// check is an error for a sample that the table of workloads does not know.
func (l line) check() error {
	workload, ok := result.Find(l.Workload)
	if !ok {
		return fmt.Errorf("no workload %q", l.Workload)
	}
	if l.Mode == "" || l.Round < 1 || len(l.Values)+len(l.Durations) == 0 {
		return fmt.Errorf("a sample of %s without mode, round or values", l.Workload)
	}
	for name, v := range l.Values {
		if _, ok := workload.Metric(name); !ok || v < 0 {
			return fmt.Errorf("a sample of %s has %q at %g", l.Workload, name, v)
		}
	}
	for name, seconds := range l.Durations {
		if name != "delay" || len(seconds) == 0 {
			return fmt.Errorf("a sample of %s has %d durations %q, of which nothing is known", l.Workload, len(seconds), name)
		}
	}
	return nil
}
