// Command bench measures this network, the classical ones and the machine's own limit side by side in one run, and writes a
// report that people can look at.
//
//	make bench                      the main rows, three rounds: indicative
//	make bench-full                 everything, five rounds, judged by the budgets
//	bench cluster                   what a real Kubernetes shows: pods' first packets, rollouts, the agent
//	bench soak --for 1h             one busy agent in a large cluster: its log, metrics and status
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
		Args:  exactly(0, "none; the commands are cluster, soak, report and compare"),
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
	outFlags(root, &o)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usage(err) })
	root.CompletionOptions.DisableDefaultCmd = true
	root.AddCommand(clusterCommand(e), soakCommand(e), reportCommand(e), compareCommand(e))
	return root
}

func outFlags(command *cobra.Command, o *options) {
	command.Flags().StringVar(&o.out, "out", "", "the directory for bench.json, bench.md and the plots; default bench-out/PROFILE")
	publishFlag(command, &o.publish)
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

// measure measures networks, from the plan to the report.
func measure(ctx context.Context, e env, p profile, o options) error {
	made, err := newPlan(p, o.modes, o.workloads)
	if err != nil {
		return usage(err)
	}
	run := &result.Run{
		Profile: p.name, Indicative: p.indicative(), Duration: p.duration.Seconds(), Warmup: p.warmup.Seconds(), Workloads: made.workloads(),
		Modes: made.modes,
	}
	return carryOut(ctx, e, run, o, made.ready, func(save func() error) (err error) {
		fmt.Fprintf(e.stderr, "building %d networks; the samples take about %s\n", len(made.modes), made.takes().Round(time.Second))
		m, err := newMachine(ctx, made, e.log())
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, m.close()) }()
		compare := record(run, m.binaries(run))
		defer compare()
		for _, warning := range run.Environment.Warnings {
			e.log().Warn("the figures may be worth less", "because", warning)
		}
		return (&runner{plan: made, take: m.take, run: run, save: save, log: e.log(), progress: e.stderr}).rounds(ctx)
	})
}

// carryOut carries out a run if the machine is ready for it and it can be published as it is to be; then it writes and reports what was measured. A run that
// ended before its time is no document's.
func carryOut(ctx context.Context, e env, run *result.Run, o options, ready func() error, samples func(save func() error) error) error {
	if !e.root {
		return errors.New("needs root, to make namespaces and load programs; run it with sudo, or as root")
	}
	run.Schema, run.Started, run.Command = result.Schema, time.Now(), strings.Join(append([]string{"bench"}, e.args...), " ")
	run.Environment = environment(ctx)
	if err := errors.Join(ready(), publishable(run, o.publish)); err != nil {
		return err
	}
	if o.out == "" { // a quick run leaves a full one alone
		o.out = filepath.Join("bench-out", run.Profile)
	}
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return fmt.Errorf("make the directory of --out: %w", err)
	}
	save := func() error {
		run.Finished = time.Now()
		return run.Write(filepath.Join(o.out, "bench.json"))
	}
	err := samples(save)
	if len(run.Samples) == 0 {
		return err
	}
	err = errors.Join(err, save(), report.Write(run, o.out))
	fmt.Fprintf(e.stdout, "%s in %s\n", filepath.Join(o.out, "bench.md"), run.Finished.Sub(run.Started).Round(time.Second))
	if o.publish != "" && err == nil {
		err = report.Publish(run, o.publish)
	}
	refused := slices.DeleteFunc(slices.Clone(run.Samples), func(s result.Sample) bool { return s.Error == "" })
	if len(refused) > 0 {
		err = errors.Join(err, fmt.Errorf("%d of %d samples did not measure what they claim; the report lists them", len(refused), len(run.Samples)))
	}
	return err
}

// publishable is an error for a run that the project's documents don't show: they show whole ones only. Before a run it is known too.
func publishable(run *result.Run, into string) error {
	if into == "" {
		return nil
	}
	whole := result.Whole(run.Profile == result.ClusterProfile)
	if run.Profile != result.ClusterProfile {
		whole = append(result.Modes(), whole...)
	}
	missing := slices.DeleteFunc(whole, func(name string) bool {
		return slices.Contains(run.Modes, name) || slices.Contains(run.Workloads, name)
	})
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
			after, err2 := result.Read(args[1])
			if err := errors.Join(err, err2); err != nil {
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
