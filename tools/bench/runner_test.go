package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/load"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// fake is a sampler that measures nothing.
type fake struct {
	taken   []string
	outcome func(n int) error
	delayed []float64 // of the first samples
}

func (f *fake) take(_ context.Context, t task) (result.Sample, error) {
	f.taken = append(f.taken, t.Name+" "+t.mode)
	sample := result.Sample{Values: map[string]float64{result.Rate: float64(len(f.taken))}}
	if len(f.taken) <= len(f.delayed) {
		sample.Values[result.Delayed] = f.delayed[len(f.taken)-1]
	}
	if f.outcome == nil {
		return sample, nil
	}
	return sample, f.outcome(len(f.taken))
}

// inModes is a group of one workload.
func inModes(workload string, modes ...string) (g group) {
	for _, mode := range modes {
		g = append(g, task{Workload: result.Workload{Name: workload}, mode: mode})
	}
	return g
}

func newRunner(f *fake, rounds int) (r *runner, saved *[]int) {
	saved, run := &[]int{}, &result.Run{}
	return &runner{
		plan: plan{profile: profile{rounds: rounds}, groups: []group{inModes("udp64", "a", "b", "c"), inModes("rr", "a", "c")}},
		take: f.take, run: run, progress: io.Discard, log: slog.New(slog.DiscardHandler),
		save: func() error { *saved = append(*saved, len(run.Samples)); return nil },
	}, saved
}

func TestModesAreInterleaved(t *testing.T) {
	f := &fake{}
	r, saved := newRunner(f, 2)
	if err := r.rounds(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []string{"udp64 a", "udp64 b", "udp64 c", "rr a", "rr c", "udp64 c", "udp64 b", "udp64 a", "rr c", "rr a"}
	if !slices.Equal(f.taken, want) {
		t.Errorf("taken: %v", f.taken)
	}
	if !slices.Equal(*saved, []int{5, 10}) || r.run.Rounds != 2 {
		t.Errorf("saved with %v samples, %d rounds; want it after each round", *saved, r.run.Rounds)
	}
	if last := r.run.Samples[9]; last.Round != 2 || last.Mode != "a" || last.Workload != "rr" {
		t.Errorf("%+v", last)
	}
}

func TestRefusedSampleIsTakenAgainThenFiled(t *testing.T) {
	disturbed := fmt.Errorf("%w: disturbed", load.ErrNotMeasured)
	f := &fake{outcome: func(n int) error {
		if n == 1 || n >= 3 && n < 3+attempts {
			return disturbed
		}
		return nil
	}}
	r, _ := newRunner(f, 1)
	if err := r.rounds(t.Context()); err != nil {
		t.Fatal(err)
	}
	first, second := r.run.Samples[0], r.run.Samples[1]
	why := disturbed.Error()
	if first.Error != "" || first.Values[result.Rate] != 2 || !slices.Equal(first.Attempts, []string{why}) {
		t.Errorf("the second attempt was fine: %+v", first)
	}
	if second.Error != why || second.Values != nil || !slices.Equal(second.Attempts, []string{why, why, why}) {
		t.Errorf("no attempt was fine: %+v", second)
	}
}

// A machine that is busy all the time measures something too.
func TestLeastDisturbedAttemptIsKept(t *testing.T) {
	f := &fake{
		outcome: func(n int) error { return fmt.Errorf("%w: attempt %d", load.ErrStarved, n) },
		delayed: []float64{0.15, 0.05, 0.1},
	}
	r, _ := newRunner(f, 1)
	if err := r.rounds(t.Context()); err != nil {
		t.Fatal(err)
	}
	first := r.run.Samples[0]
	if first.Error != "" || first.Values[result.Rate] != 2 || !strings.HasSuffix(first.Disturbed, "attempt 2") || len(first.Attempts) != attempts {
		t.Errorf("%+v", first)
	}
}

// Of a sample that something else had the CPU for, no attempt is good enough.
func TestHopelessAttemptsAreNone(t *testing.T) {
	f := &fake{
		outcome: func(n int) error { return fmt.Errorf("%w: attempt %d", load.ErrStarved, n) },
		delayed: []float64{0.3, 0.21, 0.5},
	}
	r, _ := newRunner(f, 1)
	if err := r.rounds(t.Context()); err != nil {
		t.Fatal(err)
	}
	if first := r.run.Samples[0]; !strings.HasSuffix(first.Error, "attempt 3") || first.Values != nil || len(first.Attempts) != attempts {
		t.Errorf("%+v", first)
	}
}

// Another try would hide that packets went astray.
func TestPacketsAstrayAreFinal(t *testing.T) {
	f := &fake{outcome: func(n int) error {
		if n == 1 {
			return errors.New("three packets were dropped")
		}
		return nil
	}}
	r, _ := newRunner(f, 1)
	if err := r.rounds(t.Context()); err != nil {
		t.Fatal(err)
	}
	if first := r.run.Samples[0]; first.Error != "three packets were dropped" || first.Values != nil || len(first.Attempts) > 0 {
		t.Errorf("%+v", first)
	}
}

// A row is judged by five samples: one that lacks some gets another round, with all that it is compared with, and keeps what was refused.
func TestRefusedSamplesAreOwed(t *testing.T) {
	astray := errors.New("three packets were dropped")
	for name, c := range map[string]struct {
		refused    func(n int) bool
		indicative bool
		want       []string
	}{
		"none":        {func(int) bool { return false }, false, nil},
		"one":         {func(n int) bool { return n == 2 }, false, []string{"udp64 a", "udp64 b", "udp64 c"}},
		"a sweep's":   {func(n int) bool { return n == 4 }, false, []string{"nodes a", "nodes a"}},
		"again":       {func(n int) bool { return n == 2 || n > 10 }, false, []string{"udp64 a", "udp64 b", "udp64 c"}},
		"all":         {func(n int) bool { return n == 2 || n == 7 }, false, nil}, // b's in both rounds
		"a short run": {func(n int) bool { return n == 2 }, true, nil},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fake{outcome: func(n int) error {
				if c.refused(n) {
					return astray
				}
				return nil
			}}
			r, saved := newRunner(f, 2)
			r.run.Indicative = c.indicative
			sweep := inModes("nodes", "a", "a")
			sweep[0].point, sweep[1].point = 2, 5000
			r.plan.groups = []group{inModes("udp64", "a", "b", "c"), sweep}
			if err := r.rounds(t.Context()); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(f.taken[10:], c.want) {
				t.Errorf("taken once more: %v, want %v", f.taken[10:], c.want)
			}
			if last := (*saved)[len(*saved)-1]; last != len(f.taken) || r.run.Rounds != 2 {
				t.Errorf("%d of %d samples are saved, %d rounds", last, len(f.taken), r.run.Rounds)
			}
			if extra := r.run.Samples[10:]; len(extra) > 0 && extra[0].Round != 3 {
				t.Errorf("filed as round %d", extra[0].Round)
			}
		})
	}
}

func TestInterruptKeepsWhatIsFinished(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	f := &fake{}
	f.outcome = func(n int) error {
		if n == 7 { // in the middle of the second round
			cancel(errors.New("got interrupt"))
			return context.Canceled
		}
		return nil
	}
	r, saved := newRunner(f, 3)
	err := r.rounds(ctx)
	if err == nil || !strings.Contains(err.Error(), "got interrupt") || r.run.Interrupted != "got interrupt" {
		t.Errorf("error %v, run says %q", err, r.run.Interrupted)
	}
	if len(r.run.Samples) != 6 || !slices.Equal(*saved, []int{5, 6}) || r.run.Rounds != 1 || len(f.taken) != 7 {
		t.Errorf("%d samples, saved %v, %d rounds, %d taken", len(r.run.Samples), *saved, r.run.Rounds, len(f.taken))
	}
}
