package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"time"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// line is one of those that test/cluster/measure prints: a sample, or the versions of a cluster's programs.
type line struct {
	Versions map[string]string `json:"versions"`

	Workload  string               `json:"workload"`
	Path      string               `json:"path"`
	Mode      string               `json:"mode"`
	Point     int                  `json:"point"`
	Round     int                  `json:"round"`
	Started   time.Time            `json:"started"`
	Values    map[string]float64   `json:"values"`
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
		sample, err := one.sample()
		if err != nil {
			return fmt.Errorf("read what was measured on a cluster: %w", err)
		}
		l.run.Samples = append(l.run.Samples, sample)
		l.run.Finished = time.Now()
		if err := l.save(); err != nil {
			return err
		}
	}
	if err := scanner.Err(); err != nil {
		return fmt.Errorf("read what was measured on a cluster: %w", err)
	}
	return nil
}

// sample is what a line says, if the catalog knows it.
func (l line) sample() (result.Sample, error) {
	workload, ok := result.Find(l.Workload)
	if !ok {
		return result.Sample{}, fmt.Errorf("no workload %q", l.Workload)
	}
	if l.Mode == "" || l.Round < 1 || len(l.Values)+len(l.Durations) == 0 {
		return result.Sample{}, fmt.Errorf("a sample of %s without mode, round or values", l.Workload)
	}
	for name, v := range l.Values {
		if _, ok := workload.Metric(name); !ok || v < 0 {
			return result.Sample{}, fmt.Errorf("a sample of %s has %q at %g", l.Workload, name, v)
		}
	}
	s := result.Sample{
		Workload: l.Workload, Path: l.Path, Mode: l.Mode, Point: l.Point, Round: l.Round, Started: l.Started, Values: l.Values,
	}
	for name, seconds := range l.Durations {
		if name != "delay" || len(seconds) == 0 {
			return result.Sample{}, fmt.Errorf("a sample of %s has %d durations %q, of which nothing is known", l.Workload, len(seconds), name)
		}
		all := result.Each(seconds)
		s.Distributions = map[string]result.Distribution{name: all}
		s.Values = map[string]float64{result.P50: all.Quantile(0.5)}
	}
	return s, nil
}
