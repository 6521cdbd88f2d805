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
	// take takes a sample. An error is one of this sample: the run goes on.
	take func(context.Context, task) (result.Sample, error)
	run  *result.Run
	// save keeps what is finished so far.
	save func() error
	log  *slog.Logger
	// progress is for a person; left is what remains of the plan's estimate.
	progress io.Writer
	left     time.Duration
}

// attempts is how many times a sample is taken before it is given up. What has been refused was disturbed, more often than not.
const attempts = 3

// maxDelayed is the largest share of a sample for which an end may have waited for its CPU: beyond, it says nothing even where there is no better one.
const maxDelayed = 0.2

// rounds runs all rounds, and one more of what is owed after them. What is finished is saved after each, and when the context ends.
func (r *runner) rounds(ctx context.Context) error {
	count := r.plan.profile.rounds
	r.left = r.plan.takes()
	for n := 1; n <= count; n++ {
		if err := r.round(ctx, n, r.plan.in(n)); err != nil {
			return err
		}
		r.run.Rounds = n
		if err := r.save(); err != nil {
			return err
		}
	}
	owed := r.owed()
	if len(owed) == 0 {
		return nil
	}
	r.left = expected(owed)
	if err := r.round(ctx, count+1, owed); err != nil {
		return err
	}
	return r.save()
}

// round takes a sample of each task. In every other round a group's are in the opposite order, so that no mode always comes after the same one.
func (r *runner) round(ctx context.Context, n int, groups []group) error {
	for _, g := range groups {
		if n%2 == 0 {
			g = slices.Clone(g)
			slices.Reverse(g)
		}
		for _, t := range g {
			fmt.Fprintf(r.progress, "round %d, %s left: %s\n", n, max(r.left, 0).Round(time.Second), t)
			r.one(ctx, n, t)
			if err := context.Cause(ctx); err != nil {
				r.run.Interrupted = err.Error()
				return errors.Join(fmt.Errorf("interrupted: %w", err), r.save())
			}
			r.left -= t.takes
		}
	}
	return nil
}

// owed are the groups of one more round: those of which a task lacks a sample. Where all of a task's were refused, another one would be too; and a
// short run is judged by nothing.
func (r *runner) owed() (groups []group) {
	lacking := func(t task) bool {
		refused, _ := r.run.Refused(t.row(), t.mode)
		return refused > 0 && refused < r.plan.profile.rounds && !t.Once
	}
	for _, g := range r.plan.groups {
		if !r.run.Indicative && slices.ContainsFunc(g, lacking) {
			groups = append(groups, g)
		}
	}
	return groups
}

// one takes one sample and files it, with the reasons why it was taken again. A sample that the end of the run has cut short is none.
func (r *runner) one(ctx context.Context, round int, t task) {
	started := time.Now()
	sample, err := r.undisturbed(ctx, t)
	if ctx.Err() != nil {
		return
	}
	sample.Workload, sample.Path, sample.Point = t.Name, t.path, t.point
	sample.Mode, sample.Round, sample.Started = t.mode, round, started
	if err != nil {
		sample.Values, sample.Durations, sample.Error = nil, nil, err.Error()
		r.log.Warn("sample refused", "workload", t.String(), "round", round, "error", err)
	}
	r.run.Samples = append(r.run.Samples, sample)
}

// undisturbed takes a sample, again when something disturbed the generator. Nothing else is worth another try: packets that went astray are a
// finding. Where something else has the CPUs all the time, the least disturbed attempt has to do, and says so.
func (r *runner) undisturbed(ctx context.Context, t task) (sample result.Sample, err error) {
	var kept result.Sample
	var disturbed []string
	for range attempts {
		sample, err = r.take(ctx, t)
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
	return sample.Values != nil && delayed <= maxDelayed && (kept.Values == nil || delayed < kept.Values[result.Delayed])
}
