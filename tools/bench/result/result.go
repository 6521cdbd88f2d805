// Package result holds what a run of the benchmark has measured: the samples, where they were taken, and the statistics
// over them. It is the format of bench.json. It measures nothing and draws nothing.
//
//	run, err := result.Read("bench-out/full/bench.json")
//	ratio, ok := result.Summarise(result.Pairs(run.Values(row, "ebpf"), run.Values(row, "iptables")))
//	fmt.Println(ratio.Median, ratio.Low, ratio.High)
package result

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// Schema is the version of the format. A file of another version is refused.
const Schema = 2

// Sample is one measurement: one workload, between two places, in one mode, in one round.
type Sample struct {
	Workload string `json:"workload"`
	// Path is between which places; empty where that makes no difference.
	Path string `json:"path,omitempty"`
	Mode string `json:"mode"`
	// Point is where on the axis of a sweep; 0 outside of sweeps too.
	Point int `json:"point"`
	// Round counts from 1. Samples of one round were taken closely one after the other.
	Round   int       `json:"round"`
	Started time.Time `json:"started"`
	// Values are by the names of the workload's metrics, in their units.
	Values map[string]float64 `json:"values,omitempty"`
	// Durations are in seconds, by name.
	Durations map[string][]float64 `json:"durations,omitempty"`
	// Attempts are the reasons why it was taken again, or given up: something disturbed each of these attempts.
	Attempts []string `json:"attempts,omitempty"`
	// Disturbed says what was wrong with the attempt that the values are of: it was the least disturbed one, and none was better.
	Disturbed string `json:"disturbed,omitempty"`
	// Error says why there are no values: the sample did not measure what it claims.
	Error string `json:"error,omitempty"`
}

// Run is one run of the benchmark.
type Run struct {
	Schema  int    `json:"schema"`
	Profile string `json:"profile"`
	Command string `json:"command"`
	// Indicative runs are too short for a judgement: no budget is held against them.
	Indicative bool      `json:"indicative"`
	Started    time.Time `json:"started"`
	Finished   time.Time `json:"finished"`
	// Interrupted says why the run ended before its plan did; empty when it did not.
	Interrupted string `json:"interrupted,omitempty"`
	Rounds      int    `json:"rounds"`
	// Duration and Warmup are of one sample, in seconds.
	Duration    float64     `json:"duration"`
	Warmup      float64     `json:"warmup"`
	Modes       []string    `json:"modes"`
	Workloads   []string    `json:"workloads"`
	Environment Environment `json:"environment"`
	Samples     []Sample    `json:"samples"`
}

// Environment is what a figure depends on beside the code that it measures.
type Environment struct {
	Kernel   string            `json:"kernel"`
	CPU      string            `json:"cpu"`
	Cores    int               `json:"cores"`
	MemoryMB int               `json:"memory_mb"`
	Commit   string            `json:"commit"`
	Dirty    bool              `json:"dirty"`
	Versions map[string]string `json:"versions"`
	// Load is the machine's load average over one minute when the run began, its own work not yet in it.
	Load     float64  `json:"load"`
	Warnings []string `json:"warnings,omitempty"`
}

// Ours are the programs of this project that a run measures, as Environment.Versions names them. Their version is a commit.
func Ours() []string { return []string{"ebpf-agent", "ebpf-cni"} }

// Read reads a file that Write wrote.
func Read(path string) (*Run, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s does not exist; `make bench` writes bench-out/quick/bench.json", path)
	}
	if err != nil {
		return nil, fmt.Errorf("read a run: %w", err)
	}
	var run Run
	err = json.Unmarshal(data, &run)
	if _, otherwise := errors.AsType[*json.UnmarshalTypeError](err); err != nil && !otherwise {
		return nil, fmt.Errorf("%s is no run of the benchmark, which is a JSON object: %w", path, err)
	}
	if run.Schema != Schema {
		return nil, fmt.Errorf("%s has schema version %d, this build reads %d; use the build that wrote it, or run the benchmark anew", path, run.Schema, Schema)
	}
	if err != nil {
		return nil, fmt.Errorf("read the run in %s: %w", path, err)
	}
	return &run, nil
}

// Write replaces a file by rename: whoever reads it sees the run as it was, or as it is.
func (r *Run) Write(path string) error {
	data, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return fmt.Errorf("encode the run: %w", err)
	}
	return Replace(path, append(data, '\n'))
}

// Replace gives a file new content by rename.
func Replace(path string, content []byte) (err error) {
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			os.Remove(file.Name()) //nolint:errcheck // what is given up
		}
	}()
	_, err = file.Write(content)
	err = errors.Join(err, file.Chmod(0o644), file.Close())
	if err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
