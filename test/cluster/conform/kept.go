package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// runFile is what -kept reads in a family's directory: what came of the run as it was then judged. From ginkgo's report it would
// be judged anew, and a test that has failed could be left out afterwards.
const runFile = "run.json"

// subject is what was tested on what, and which tests were wanted of it.
type subject struct {
	Version    string `json:"version"`
	Kubernetes string `json:"kubernetes"`
	Kernel     string `json:"kernel"`
	Nodes      int    `json:"nodes"`
	Focus      string `json:"focus,omitempty"`
}

func subjectOf(o options) (subject, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return subject{}, fmt.Errorf("read the kernel's release: %w", err)
	}
	return subject{
		Version: o.version, Kubernetes: cluster.KubernetesVersion, Kernel: unix.ByteSliceToString(name.Release[:]),
		Nodes: o.nodes, Focus: o.focus.String(),
	}, nil
}

// whole is an error about tests that could have run and were not wanted.
func (s subject) whole() error {
	if s.Focus != "" || s.Nodes < wholeNodes {
		return fmt.Errorf("only a whole run is published, without -focus and with at least %d nodes", wholeNodes)
	}
	return nil
}

// whole is an error about tests that could have run and did not.
func (r runOf) whole() error {
	if n := r.count(notRun); n > 0 {
		return fmt.Errorf("only a whole run is published, and %d tests of this one did not run", n)
	}
	// Images are named by the Kubernetes of today.
	if r.Kubernetes != cluster.KubernetesVersion {
		return fmt.Errorf("this run's tests are those of Kubernetes %s, and today's are %s", r.Kubernetes, cluster.KubernetesVersion)
	}
	return r.subject.whole()
}

// keep leaves a run for -kept.
func (r runOf) keep(out string) error {
	raw, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return fmt.Errorf("keep what came of a run: %w", err)
	}
	if err := os.WriteFile(filepath.Join(out, r.Family, runFile), append(raw, '\n'), 0o644); err != nil {
		return fmt.Errorf("keep what came of a run: %w", err)
	}
	return nil
}

// keptRuns are what earlier runs have left.
func keptRuns(_ context.Context, o options) (runs []runOf, err error) {
	for _, family := range o.families {
		raw, err := os.ReadFile(filepath.Join(o.out, family, runFile))
		if err != nil {
			return nil, fmt.Errorf("read an earlier run of %s: %w", family, err)
		}
		var one runOf
		if err := json.Unmarshal(raw, &one); err != nil {
			return nil, fmt.Errorf("read an earlier run of %s: %w", family, err)
		}
		runs = append(runs, one)
	}
	return runs, nil
}
