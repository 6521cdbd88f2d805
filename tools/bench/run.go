package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/report"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

type options struct {
	selection
	publication

	profile, out string
}

func runCommand(e env) *cobra.Command {
	var o options
	command := &cobra.Command{
		Use:   "run",
		Short: "Measure (what bench does without a command)",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return measure(cmd.Context(), e, o) },
	}
	flags := command.Flags()
	flags.StringVar(&o.profile, "profile", "quick", "quick: the main rows, indicative; full: everything")
	flags.StringSliceVar(&o.modes, "modes", nil, "only these modes: "+strings.Join(modes.Names(), ", "))
	flags.StringSliceVar(&o.workloads, "workloads", nil, "only these workloads: "+strings.Join(workloadNames(), ", "))
	flags.IntVar(&o.rounds, "rounds", 0, "so many rounds; 0: as the profile has it")
	flags.DurationVar(&o.duration, "duration", 0, "so long a sample; 0: as the profile has it")
	flags.DurationVar(&o.warmup, "warmup", 0, "so long a warm-up of each sample; 0: as the profile has it")
	flags.StringVar(&o.out, "out", "", "the directory for bench.json, bench.md and the plots; none: bench-out/PROFILE")
	o.flags(command)
	return command
}

func workloadNames() (names []string) {
	for _, w := range result.Catalog() {
		names = append(names, w.Name)
	}
	return names
}

func profiles() map[string]profile { return map[string]profile{"quick": quick(), "full": full()} }

// measure carries out a run, from the flags to the report.
func measure(ctx context.Context, e env, o options) error {
	p, ok := profiles()[o.profile]
	if !ok {
		return usage(fmt.Errorf("unknown profile %q; there are: quick, full", o.profile))
	}
	made, err := newPlan(p, o.selection)
	if err != nil {
		return usage(err)
	}
	run := newRun(ctx, made, o)
	if err := errors.Join(checkMachine(e, made), o.check(o.profile), o.fits(run)); err != nil {
		return err
	}
	// A quick run leaves a full one alone.
	if o.out == "" {
		o.out = filepath.Join("bench-out", o.profile)
	}
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return fmt.Errorf("make the directory of --out: %w", err)
	}
	log := slog.New(slog.NewTextHandler(e.stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))
	json := filepath.Join(o.out, "bench.json")
	err = carryOut(ctx, e, made, run, json, log)
	run.Environment.Warnings = append(run.Environment.Warnings, late(made.profile, time.Since(run.Started))...)
	if len(run.Samples) == 0 {
		return err
	}
	run.Finished = time.Now()
	if saved := run.Write(json); saved != nil {
		return errors.Join(err, saved)
	}
	_, reported := report.Write(run, report.Beside(json))
	fmt.Fprintf(e.stdout, "%s in %s\n", report.Beside(json).Document, rounded(run.Finished.Sub(run.Started)))
	// A run that ended before its time is no document's.
	if run.Interrupted == "" {
		reported = errors.Join(reported, o.publish(e, run))
	}
	return errors.Join(err, reported, refusals(run))
}

// late says that a run took much longer than its profile promises: what its plan expects is made of constants.
func late(p profile, took time.Duration) []string {
	promised := map[string]time.Duration{"quick": 10 * time.Minute, "full": 30 * time.Minute}[p.name]
	if took <= promised || promised == 0 || p.rounds > profiles()[p.name].rounds || p.duration > profiles()[p.name].duration {
		return nil
	}
	return []string{fmt.Sprintf("the run took %s, and a %s one is to take %s at most: samples were taken again and again, or something else was running",
		rounded(took), p.name, promised)}
}

// carryOut builds the networks, runs the plan on them and removes them.
func carryOut(ctx context.Context, e env, made plan, run *result.Run, json string, log *slog.Logger) (err error) {
	fmt.Fprintf(e.stderr, "building %d networks; the samples take about %s\n", len(made.modes), rounded(made.takes()))
	m, err := newMachine(ctx, made, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.close()) }()
	record(run, m.networks)
	measured := contents(files(m.networks))
	for _, warning := range run.Environment.Warnings {
		log.Warn("the figures may be worth less", "because", warning)
	}
	fmt.Fprintf(e.stderr, "networks stand after %s; about %s to go\n", rounded(time.Since(run.Started)), rounded(made.takes()))
	shown := &progress{w: e.stderr, terminal: e.terminal, rounds: made.profile.rounds, left: made.takes()}
	defer shown.end()
	r := runner{
		plan: made, sampler: m, run: run, progress: shown, now: time.Now, log: log,
		save: func(run *result.Run) error {
			run.Finished = time.Now()
			return run.Write(json)
		},
	}
	err = r.rounds(ctx)
	run.Environment.Warnings = append(run.Environment.Warnings, changed(measured, contents(files(m.networks)))...)
	return err
}

func newRun(ctx context.Context, p plan, o options) *result.Run {
	run := &result.Run{
		Schema: result.Schema, Profile: p.profile.name, Started: time.Now(),
		Command:    strings.Join(append([]string{"bench"}, os.Args[1:]...), " "),
		Indicative: indicative(p.profile),
		Duration:   p.profile.duration.Seconds(), Warmup: p.profile.warmup.Seconds(),
		Workloads: p.workloads(), Environment: environment(ctx),
	}
	for _, name := range modes.Names() {
		if len(o.modes) == 0 || slices.Contains(o.modes, name) {
			run.Modes = append(run.Modes, result.Mode{Name: name, Missing: modes.Missing(name)})
		}
	}
	return run
}

// indicative says that a profile measures less of something than the full one, whatever it is called.
func indicative(p profile) bool {
	whole := full()
	return p.name != whole.name || p.rounds < whole.rounds || p.duration < whole.duration || p.warmup < whole.warmup
}

// refusals is an error when samples are missing: the report says which.
func refusals(run *result.Run) error {
	count := 0
	for _, s := range run.Samples {
		if s.Error != "" {
			count++
		}
	}
	if count == 0 {
		return nil
	}
	return fmt.Errorf("%d of %d samples did not measure what they claim; the report lists them", count, len(run.Samples))
}

// checkMachine says what is missing before anything is built.
func checkMachine(e env, p plan) error {
	if !e.root {
		return errors.New("needs root to make network namespaces and load programs; run it with sudo, or as root")
	}
	for _, mode := range p.modes {
		if err := modes.Ready(mode); err != nil {
			return err
		}
	}
	return nil
}
