// The benchmark measures this network, the classical ones and the machine's own limit side by side in one run, and writes a
// report that people can look at.
//
//	make bench                      the main rows, three rounds: indicative
//	make bench-full                 everything, five rounds, judged by the budgets
//	bench cluster                   what a real Kubernetes shows: pods' first packets, rollouts, the agent
//	bench --modes direct,ebpf,iptables --workloads udp64 --rounds 7
//	bench report bench-out/full/bench.json          tables and plots once more
//	bench report bench-out/full/bench.json --into BENCHMARKS.md --headline README.md
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
	"os"
	"os/signal"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/load"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/report"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == load.WorkerCommand {
		os.Exit(load.Worker())
	}
	ctx, stop := withSignals(context.Background())
	status := execute(ctx, env{args: os.Args[1:], stdout: os.Stdout, stderr: os.Stderr, root: os.Geteuid() == 0, terminal: isTerminal(os.Stderr)})
	stop()
	os.Exit(status)
}

// withSignals ends the context at the first SIGINT or SIGTERM. The next one is the system's.
func withSignals(parent context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(parent)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, unix.SIGTERM)
	go func() {
		select {
		case got := <-signals:
			signal.Stop(signals)
			cancel(fmt.Errorf("got %s", got))
		case <-ctx.Done():
		}
	}()
	return ctx, func() { signal.Stop(signals); cancel(nil) }
}

// env is all that the benchmark takes from its process.
type env struct {
	args           []string
	stdout, stderr io.Writer
	root, terminal bool
}

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

func rootCommand(e env) *cobra.Command {
	run := runCommand(e)
	root := &cobra.Command{
		Use:           "bench",
		Short:         "Measure this network against the classical ones and the machine's limit",
		Args:          noArgs,
		RunE:          run.RunE,
		SilenceErrors: true, SilenceUsage: true,
	}
	root.Flags().AddFlagSet(run.Flags())
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usage(err) })
	root.CompletionOptions.DisableDefaultCmd = true
	root.AddCommand(run, clusterCommand(e), reportCommand(e), compareCommand(e))
	return root
}

func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usage(fmt.Errorf("unexpected argument %q; commands are run, cluster, report and compare", args[0]))
	}
	return nil
}

func exactly(n int, what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != n {
			return usage(fmt.Errorf("got %d arguments, want %s", len(args), what))
		}
		return nil
	}
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

func isTerminal(file *os.File) bool {
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
	return err == nil && os.Getenv("TERM") != "dumb"
}

func rounded(d time.Duration) time.Duration { return d.Round(time.Second) }
