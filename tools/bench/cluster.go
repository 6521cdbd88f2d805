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
	var o options
	command := &cobra.Command{
		Use:   "cluster [-- FLAGS]",
		Short: "Measure on real Kubernetes clusters that this machine runs; FLAGS are those of test/cluster's `play measure`, and make the run a short one",
		RunE:  func(cmd *cobra.Command, args []string) error { return measureCluster(cmd.Context(), e, o, args) },
	}
	outFlags(command, &o)
	return command
}

// measureCluster measures on clusters.
func measureCluster(ctx context.Context, e env, o options, args []string) error {
	run := &result.Run{
		Profile: result.ClusterProfile, Indicative: len(args) > 0, Workloads: result.Names(true), Modes: []result.Mode{{Name: result.KubeProxy}, {Name: result.IPTables}},
	}
	root, err := lab.Checkout()
	if err != nil {
		return err
	}
	ready := func() error { return nil } // that is for test/cluster to find out
	return carryOut(ctx, e, run, o, ready, func(save func() error) error {
		delete(run.Environment.Versions, "nft") // kube-proxy and the classical network's rules are iptables'
		compare := record(run, []string{filepath.Join(root, "bin/ebpf-agent"), filepath.Join(root, "bin/ebpf-cni")})
		defer compare()
		err := measureIn(ctx, e, filepath.Join(root, "test/cluster"), args, lines{run: run, save: save})
		if err != nil {
			run.Interrupted, _, _ = strings.Cut(errors.Join(context.Cause(ctx), err).Error(), "\n")
		}
		return err
	})
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
			delays := result.Delays(seconds)
			one.Values, one.Distributions = delays.Values, delays.Distributions
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
