package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
)

// The exit statuses.
const (
	exitFine  = 0
	exitWrong = 1 // something is wrong on the node, or could not be read
	exitUsage = 2
)

// env is all that a command has of the outside world.
type env struct {
	stdout, stderr io.Writer
	args           []string
	getenv         func(string) string
	// terminal: stdout is one, so that a table may be redrawn in place.
	terminal bool
}

// options are the flags of all commands.
type options struct {
	env
	bpffs    string
	stateDir string
	output   format
}

func (o *options) reader() observe.Reader { return observe.Reader{Dir: bpffs.Dir(o.bpffs)} }

// errStatus ends a command with exitWrong when everything has been said.
var errStatus = errors.New("something is wrong")

// failure is an error of the work, as opposed to one of the command line.
type failure struct{ error }

func (f failure) Unwrap() error { return f.error }

// work marks the errors of a command's own work.
func work(fn func(cmd *cobra.Command, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		err := fn(cmd, args)
		var usage usageError
		if err == nil || errors.As(err, &usage) {
			return err
		}
		return failure{err}
	}
}

// usageError is a mistake in the command line that only the work finds.
type usageError string

func (e usageError) Error() string { return string(e) }

// run is the whole program; it returns the exit status.
func run(ctx context.Context, e env) int {
	root := newRoot(e)
	root.SetArgs(e.args)
	root.SetOut(e.stdout)
	root.SetErr(e.stderr)
	cmd, err := root.ExecuteContextC(ctx)
	var failed failure
	switch {
	case err == nil:
		return exitFine
	case errors.Is(err, errStatus):
		return exitWrong
	case errors.As(err, &failed):
		fmt.Fprintf(e.stderr, "ebpfctl: %v\n", err)
		return exitWrong
	}
	fmt.Fprintf(e.stderr, "ebpfctl: %v\nSee '%s --help'.\n", err, cmd.CommandPath())
	return exitUsage
}

func newRoot(e env) *cobra.Command {
	o := &options{env: e}
	root := &cobra.Command{
		Use:   "ebpfctl",
		Short: "Show what the dataplane of this node is doing",
		Long: `Show what the dataplane of this node is doing, from its pinned maps and its
state directory alone: it works with the agent dead.

Exit status: 0 fine, 1 something is wrong (and it says what), 2 wrong usage.`,
		Version:       versionText(),
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.CompletionOptions.DisableDefaultCmd = true
	root.SetHelpCommand(&cobra.Command{Hidden: true})
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return explainFlag(err) })
	flags := root.PersistentFlags()
	flags.StringVar(&o.bpffs, "bpffs", fallback(e, "EBPF_AGENT_BPFFS", "/sys/fs/bpf/ebpf-cni"),
		"`directory` of the pins; $EBPF_AGENT_BPFFS, as for the agent, changes the default")
	flags.StringVar(&o.stateDir, "state-dir", fallback(e, "EBPF_AGENT_STATE_DIR", "/run/ebpf-cni"),
		"state `directory`; $EBPF_AGENT_STATE_DIR changes the default")
	flags.VarP(&o.output, "output", "o", "`format`: table, json or yaml")
	_ = root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats(), cobra.ShellCompDirectiveNoFileComp))
	root.AddCommand(newDump(o), newStatus(o), newVersion(o), newCompletion(o))
	return root
}

// explainFlag says what a flag takes where the flag's own parser speaks of itself.
func explainFlag(err error) error {
	var invalid *pflag.InvalidValueError
	if !errors.As(err, &invalid) {
		return err
	}
	var takes string
	switch f := invalid.GetFlag(); f.Value.Type() {
	case "bool":
		takes = "takes no value, true or false"
		if f.Name == "watch" {
			takes += "; --interval says how often"
		}
	case "duration":
		takes = "takes a duration such as 500ms or 2s"
	default:
		return err
	}
	return fmt.Errorf("--%s=%s: %s", invalid.GetFlag().Name, invalid.GetValue(), takes)
}

func fallback(e env, variable, value string) string {
	if v := e.getenv(variable); v != "" {
		return v
	}
	return value
}
