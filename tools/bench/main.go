// The benchmark measures this network, the classical ones and the machine's own limit side by side in one run, and writes a
// report that people can look at.
//
//	make bench                      the main rows, three rounds: indicative
//	make bench-full                 everything, five rounds, judged by the budgets
//	bench cluster                   what a real Kubernetes shows: pods' first packets, rollouts, the agent
//	bench --modes direct,ebpf,iptables --workloads udp64 --rounds 7
//	bench report bench-out/full/bench.json          tables and plots once more
//	bench report bench-out/full/bench.json --publish .
//	bench compare before.json after.json            a regression, or noise
//
// It needs root, Linux 6.1 or newer with nf_conntrack and br_netfilter, the binaries in bin/, iptables, nft, and Go with this module's dependencies
// for upstream's plugins. All networks stand in namespaces; no packet leaves the machine.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/report"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	context.AfterFunc(ctx, stop) // the next signal is the system's
	os.Exit(execute(ctx, env{args: os.Args[1:], stdout: os.Stdout, stderr: os.Stderr, root: os.Geteuid() == 0}))
}

// env is all that the benchmark takes from its process.
type env struct {
	args           []string
	stdout, stderr io.Writer
	root           bool
}

func (e env) log() *slog.Logger { return slog.New(slog.NewTextHandler(e.stderr, nil)) }

// The exit statuses.
const (
	fine   = 0
	failed = 1
	misuse = 2
)

var (
	// errUsage is matched by what the caller has to write differently.
	errUsage = errors.New("see bench --help")
	// errRegression is what compare ends with when something has become slower.
	errRegression = errors.New("regression")
)

func execute(ctx context.Context, e env) int {
	root := rootCommand(e)
	root.SetArgs(e.args)
	root.SetOut(e.stdout)
	root.SetErr(e.stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return fine
	}
	if !errors.Is(err, errRegression) {
		fmt.Fprintf(e.stderr, "bench: %v\n", err)
	}
	if errors.Is(err, errUsage) {
		return misuse
	}
	return failed
}

func usage(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w (%w)", err, errUsage)
}

// options are the flags of a run.
type options struct {
	profile, out, publish string
	modes, workloads      []string
	rounds                int
}

func rootCommand(e env) *cobra.Command {
	var o options
	root := &cobra.Command{
		Use:   "bench",
		Short: "Measure this network against the classical ones and the machine's limit",
		Args:  exactly(0, "none; the commands are cluster, report and compare"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, ok := map[string]profile{"quick": quick(), "full": full()}[o.profile]
			if !ok {
				return usage(fmt.Errorf("unknown profile %q; there are: quick, full", o.profile))
			}
			if o.rounds > 0 {
				p.rounds = o.rounds
			}
			return measure(cmd.Context(), e, p, o)
		},
		SilenceErrors: true, SilenceUsage: true,
	}
	flags := root.Flags()
	flags.StringVar(&o.profile, "profile", "quick", "quick: the main rows, indicative; full: everything")
	flags.StringSliceVar(&o.modes, "modes", nil, "only these modes: "+strings.Join(result.Modes(), ", "))
	flags.StringSliceVar(&o.workloads, "workloads", nil, "only these workloads: "+strings.Join(result.Names(false), ", "))
	flags.IntVar(&o.rounds, "rounds", 0, "how many rounds; 0: as the profile has it")
	flags.StringVar(&o.out, "out", "", "the directory for bench.json, bench.md and the plots; default bench-out/PROFILE")
	publishFlag(root, &o.publish)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usage(err) })
	root.CompletionOptions.DisableDefaultCmd = true
	root.AddCommand(clusterCommand(e), reportCommand(e), compareCommand(e))
	return root
}

func publishFlag(command *cobra.Command, into *string) {
	command.Flags().StringVar(into, "publish", "", "the checkout whose BENCHMARKS.md, README.md, plots and tools/bench/results the run is written into")
}

func exactly(n int, what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != n {
			return usage(fmt.Errorf("got %d arguments %q, want %s", len(args), args, what))
		}
		return nil
	}
}

// measure carries out a run, from the plan to the report.
func measure(ctx context.Context, e env, p profile, o options) error {
	made, err := newPlan(p, o.modes, o.workloads)
	if err != nil {
		return usage(err)
	}
	if !e.root {
		return errors.New("needs root to make network namespaces and load programs; run it with sudo, or as root")
	}
	run := &result.Run{
		Schema: result.Schema, Profile: p.name, Started: time.Now(), Command: strings.Join(append([]string{"bench"}, e.args...), " "),
		Indicative: p.indicative(), Duration: p.duration.Seconds(), Warmup: p.warmup.Seconds(), Workloads: made.workloads(), Environment: environment(ctx),
	}
	for _, mode := range made.modes {
		run.Modes = append(run.Modes, result.Mode{Name: mode})
	}
	if err := errors.Join(made.ready(), publishable(run, o.publish)); err != nil {
		return err
	}
	// A quick run leaves a full one alone.
	if o.out == "" {
		o.out = filepath.Join("bench-out", p.name)
	}
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return fmt.Errorf("make the directory of --out: %w", err)
	}
	return errors.Join(carryOut(ctx, e, made, run, filepath.Join(o.out, "bench.json")), finish(e, run, o.out, o.publish))
}

// carryOut builds the networks, runs the plan on them and removes them.
func carryOut(ctx context.Context, e env, made plan, run *result.Run, json string) (err error) {
	log := e.log()
	fmt.Fprintf(e.stderr, "building %d networks; the samples take about %s\n", len(made.modes), made.takes().Round(time.Second))
	m, err := newMachine(ctx, made, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.close()) }()
	files := binaries(run, m.networks)
	compare := watch(run, files)
	defer compare()
	for _, warning := range run.Environment.Warnings {
		log.Warn("the figures may be worth less", "because", warning)
	}
	save := func(run *result.Run) error {
		run.Finished = time.Now()
		return run.Write(json)
	}
	return (&runner{plan: made, take: m.take, run: run, save: save, log: log, progress: e.stderr}).rounds(ctx)
}

// finish writes what a run has measured, and its report. A run that ended before its time is no document's.
func finish(e env, run *result.Run, out, publish string) error {
	if len(run.Samples) == 0 {
		return nil
	}
	run.Finished = time.Now()
	if err := errors.Join(run.Write(filepath.Join(out, "bench.json")), report.Write(run, out)); err != nil {
		return err
	}
	fmt.Fprintf(e.stdout, "%s in %s\n", filepath.Join(out, "bench.md"), run.Finished.Sub(run.Started).Round(time.Second))
	if publish != "" && run.Interrupted == "" {
		if err := report.Publish(run, publish); err != nil {
			return err
		}
	}
	refused := 0
	for _, s := range run.Samples {
		if s.Error != "" {
			refused++
		}
	}
	if refused > 0 {
		return fmt.Errorf("%d of %d samples did not measure what they claim; the report lists them", refused, len(run.Samples))
	}
	return nil
}

// publishable is an error for a run that the project's documents don't show: they show whole ones only. Before a run it is known too.
func publishable(run *result.Run, into string) error {
	if into == "" {
		return nil
	}
	var missing []string
	if run.Profile != result.ClusterProfile {
		for _, mode := range result.Modes() {
			if !run.Measures(mode) {
				missing = append(missing, mode)
			}
		}
	}
	for _, name := range result.Names(run.Profile == result.ClusterProfile) {
		if !slices.Contains(run.Workloads, name) {
			missing = append(missing, name)
		}
	}
	switch {
	case run.Interrupted != "":
		return fmt.Errorf("this run is not for publishing: it was interrupted: %s", run.Interrupted)
	case run.Indicative:
		return errors.New("this run is not for publishing: it is a short one, by which nothing is judged")
	case run.Environment.Dirty:
		return errors.New("this run is not for publishing: the checkout has changes that no commit has")
	case len(missing) > 0:
		return fmt.Errorf("this run is not for publishing: it leaves out %s", strings.Join(missing, ", "))
	}
	return report.Publishable(into)
}

func reportCommand(e env) *cobra.Command {
	var publish string
	command := &cobra.Command{
		Use:   "report FILE",
		Short: "Write tables and plots of a run once more, beside its file, or into the project's documents",
		Args:  exactly(1, "one file, such as bench-out/full/bench.json"),
		RunE: func(_ *cobra.Command, args []string) error {
			run, err := result.Read(args[0])
			if err != nil {
				return err
			}
			if publish == "" {
				return report.Write(run, filepath.Dir(args[0]))
			}
			if err := publishable(run, publish); err != nil {
				return err
			}
			for _, warning := range run.Environment.Warnings {
				fmt.Fprintf(e.stderr, "published with a warning: %s\n", warning)
			}
			return report.Publish(run, publish)
		},
	}
	publishFlag(command, &publish)
	return command
}

func compareCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "compare A B",
		Short: "Tell a regression from A to B from noise; the exit status is 1 when there is one",
		Args:  exactly(2, "two files, the older one first"),
		RunE: func(_ *cobra.Command, args []string) error {
			before, err := result.Read(args[0])
			if err != nil {
				return err
			}
			after, err := result.Read(args[1])
			if err != nil {
				return err
			}
			c, err := report.Compare(before, after)
			if err != nil {
				return err
			}
			c.Print(e.stdout)
			if c.Regressed() {
				return errRegression
			}
			return nil
		},
	}
}
