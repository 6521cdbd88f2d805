package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"time"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/load"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// runner carries out a plan.
type runner struct {
	plan plan
	// take measures an item in one mode. An error is one of this sample: the run goes on.
	take func(ctx context.Context, i item, mode string) (result.Sample, error)
	run  *result.Run
	// save keeps what is finished so far.
	save func(*result.Run) error
	log  *slog.Logger
	// progress is for a person; left is what remains of the plan's estimate.
	progress io.Writer
	left     time.Duration
}

// attempts is how many times a sample is taken before it is given up. What has been refused was disturbed, more often than not.
const attempts = 3

// hopeless is the share of a sample for which an end waited for its CPU, from which on it says nothing even where there is no better one.
const hopeless = 0.2

// rounds runs all rounds, and one more of what is owed after them. What is finished is saved after each, and when the context ends.
func (r *runner) rounds(ctx context.Context) error {
	count := r.plan.profile.rounds
	r.left = r.plan.takes()
	for n := 1; n <= count; n++ {
		if err := r.round(ctx, n, r.plan.round(n)); err != nil {
			return err
		}
		r.run.Rounds = n
		if err := r.save(r.run); err != nil {
			return err
		}
	}
	owed := r.owed(count + 1)
	if len(owed) == 0 {
		return nil
	}
	r.left = expected(owed)
	if err := r.round(ctx, count+1, owed); err != nil {
		return err
	}
	return r.save(r.run)
}

// round takes a sample of each item in all of its modes: in the opposite order in every other round, so that no mode always comes after the same one.
func (r *runner) round(ctx context.Context, n int, items []item) error {
	for _, i := range items {
		fmt.Fprintf(r.progress, "round %d, %s left: %s\n", n, max(r.left, 0).Round(time.Second), i)
		modes := slices.Clone(i.modes)
		if n%2 == 0 {
			slices.Reverse(modes)
		}
		for _, mode := range modes {
			r.one(ctx, n, i, mode)
			if err := context.Cause(ctx); err != nil {
				r.run.Interrupted = err.Error()
				return errors.Join(fmt.Errorf("interrupted: %w", err), r.save(r.run))
			}
			r.left -= i.takes
		}
	}
	return nil
}

// owed are the items of one more round: those of which a mode lacks a sample, with all that they are compared with. Where all of a mode's were
// refused, another one would be too; and a short run is judged by nothing.
func (r *runner) owed(round int) (items []item) {
	if r.run.Indicative {
		return nil
	}
	lacking := map[string]bool{}
	for _, i := range r.plan.items {
		for _, mode := range i.modes {
			refused, _ := r.run.Refused(i.row(), mode)
			if refused > 0 && refused < r.plan.profile.rounds {
				lacking[i.compared()] = true
			}
		}
	}
	for _, i := range r.plan.round(round) {
		if lacking[i.compared()] {
			items = append(items, i)
		}
	}
	return items
}

// one takes one sample and files it, with the reasons why it was taken again. A sample that the end of the run has cut short is none.
func (r *runner) one(ctx context.Context, round int, i item, mode string) {
	started := time.Now()
	sample, err := r.patiently(ctx, i, mode)
	if ctx.Err() != nil {
		return
	}
	sample.Workload, sample.Path, sample.Point = i.Name, i.path, i.point
	sample.Mode, sample.Round, sample.Started = mode, round, started
	if err != nil {
		sample.Values, sample.Distributions, sample.Error = nil, nil, err.Error()
		r.log.Warn("sample refused", "workload", i.String(), "mode", mode, "round", round, "error", err)
	}
	r.run.Samples = append(r.run.Samples, sample)
}

// patiently takes a sample, again when something disturbed the generator. Nothing else is worth another try: packets that went astray are a
// finding. Where something else has the CPUs all the time, the least disturbed attempt has to do, and says so.
func (r *runner) patiently(ctx context.Context, i item, mode string) (sample result.Sample, err error) {
	var kept result.Sample
	var disturbed []string
	for range attempts {
		sample, err = r.take(ctx, i, mode)
		if !errors.Is(err, load.ErrNotMeasured) || ctx.Err() != nil {
			sample.Attempts = disturbed
			return sample, err
		}
		disturbed = append(disturbed, err.Error())
		if errors.Is(err, load.ErrStarved) && better(sample, kept) {
			kept, kept.Disturbed = sample, err.Error()
		}
	}
	if kept.Values != nil {
		err = nil
	}
	kept.Attempts = disturbed
	return kept, err
}

// better says that a sample that was starved may be kept, in place of another one or of none.
func better(sample, kept result.Sample) bool {
	delayed := sample.Values[result.Delayed]
	return sample.Values != nil && delayed <= hopeless && (kept.Values == nil || delayed < kept.Values[result.Delayed])
}
