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
		Profile: result.ClusterProfile, Indicative: len(args) > 0, Workloads: result.Names(true), Modes: []string{result.KubeProxy, result.IPTables},
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
		err := measureIn(ctx, e, filepath.Join(root, "test/cluster"), args, func(said io.Reader) error { return readSamples(said, run, save) })
		if err != nil {
			run.Interrupted, _, _ = strings.Cut(errors.Join(context.Cause(ctx), err).Error(), "\n")
		}
		return err
	})
}

// measureIn runs the program that makes clusters and measures them. It is of another module, which has Kubernetes' requirements.
func measureIn(ctx context.Context, e env, module string, args []string, read func(io.Reader) error) error {
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
	failed := read(said)
	if failed != nil { // nothing is worth measuring that nobody can read
		_ = play.Process.Signal(unix.SIGTERM)
	}
	if err := play.Wait(); err != nil && failed == nil {
		return fmt.Errorf("measure clusters: %w; why stands above", err)
	}
	return failed
}

// readSamples reads what test/cluster/measure prints to its end: lines of a sample each, or of the versions of a cluster's programs. The run is saved after
// each sample.
func readSamples(from io.Reader, run *result.Run, save func() error) error {
	scanner := bufio.NewScanner(from)
	scanner.Buffer(nil, 1<<20)
	for scanner.Scan() {
		var line struct {
			result.Sample

			Versions map[string]string `json:"versions"`
		}
		if err := json.Unmarshal(scanner.Bytes(), &line); err != nil {
			return fmt.Errorf("read what was measured on a cluster: %w: %.100q", err, scanner.Text())
		}
		if line.Versions != nil {
			maps.Copy(run.Environment.Versions, line.Versions)
			continue
		}
		if err := plausible(line.Sample); err != nil {
			return fmt.Errorf("read what was measured on a cluster: %w", err)
		}
		if delays := line.Durations["delay"]; delays != nil {
			line.Values = result.Delays(delays).Values
		}
		run.Samples = append(run.Samples, line.Sample)
		run.Rounds = max(run.Rounds, line.Round)
		if err := save(); err != nil {
			return err
		}
	}
	if err := scanner.Err(); err != nil {
		return fmt.Errorf("read what was measured on a cluster: %w", err)
	}
	return nil
}

// plausible is an error for a sample that the table of workloads does not know.
func plausible(s result.Sample) error {
	workload, ok := result.Find(s.Workload)
	if !ok {
		return fmt.Errorf("no workload %q", s.Workload)
	}
	if s.Mode == "" || s.Round < 1 || len(s.Values)+len(s.Durations) == 0 {
		return fmt.Errorf("a sample of %s without mode, round or values", s.Workload)
	}
	for name, v := range s.Values {
		if _, ok := workload.Metric(name); !ok || v < 0 {
			return fmt.Errorf("a sample of %s has %q at %g", s.Workload, name, v)
		}
	}
	for name, seconds := range s.Durations {
		if name != "delay" || len(seconds) == 0 {
			return fmt.Errorf("a sample of %s has %d durations %q, of which nothing is known", s.Workload, len(seconds), name)
		}
	}
	return nil
}
