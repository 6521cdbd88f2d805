package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/load"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// sampler takes one sample.
type sampler interface {
	// take measures an item in one mode. An error is one of this sample: the run goes on.
	take(ctx context.Context, i item, mode string) (result.Sample, error)
}

// runner carries out a plan.
type runner struct {
	plan     plan
	sampler  sampler
	run      *result.Run
	progress *progress
	// save keeps what is finished so far.
	save func(*result.Run) error
	now  func() time.Time
	log  *slog.Logger
}

// attempts is how many times a sample is taken before it is given up. What has been refused was disturbed, more often than not.
const attempts = 3

// rounds runs all rounds. What is finished is saved after each, and when the context ends.
func (r *runner) rounds(ctx context.Context) error {
	for round := 1; round <= r.plan.profile.rounds; round++ {
		for _, i := range r.plan.items {
			for _, mode := range i.modes {
				if err := context.Cause(ctx); err != nil {
					return r.interrupted(err)
				}
				r.one(ctx, round, i, mode)
			}
		}
		if ctx.Err() == nil {
			r.run.Rounds = round
		}
		if err := r.save(r.run); err != nil {
			return err
		}
	}
	if err := context.Cause(ctx); err != nil {
		return r.interrupted(err)
	}
	return nil
}

// one takes one sample and files it. A sample that the end of the run has cut short is none.
func (r *runner) one(ctx context.Context, round int, i item, mode string) {
	started := r.now()
	r.progress.at(round, i, mode)
	var sample result.Sample
	var err error
	for range attempts {
		sample, err = r.sampler.take(ctx, i, mode)
		// Only what disturbed the generator is worth another try: packets that went astray are a finding.
		if !errors.Is(err, load.ErrNotMeasured) || ctx.Err() != nil {
			break
		}
		r.log.Warn("sample disturbed", "workload", i.String(), "mode", mode, "round", round, "error", err)
	}
	if ctx.Err() != nil {
		return
	}
	sample.Workload, sample.Path, sample.Point = i.workload, i.path, i.point
	sample.Mode, sample.Round, sample.Started = mode, round, started
	if err != nil {
		sample.Values, sample.Distributions, sample.Error = nil, nil, err.Error()
		r.log.Warn("sample refused", "workload", i.String(), "mode", mode, "round", round, "error", err)
	}
	r.run.Samples = append(r.run.Samples, sample)
	r.progress.done(i.takes, r.now().Sub(started))
}

func (r *runner) interrupted(cause error) error {
	r.run.Interrupted = cause.Error()
	err := fmt.Errorf("interrupted: %w", cause)
	return errors.Join(err, r.save(r.run))
}
