package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/ebpf-cni/ebpf-cni/cmd/internal/cli"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
)

// env is all that a command has of the outside world.
type env struct {
	stdout, stderr io.Writer
	args           []string
	lookup         func(string) (string, bool)
	// terminal: stdout is one, so that a table may be redrawn in place.
	terminal bool
}

// options are the flags of all commands.
type options struct {
	env
	bpffs    bpffs.Dir
	stateDir string
	output   string
}

func (o *options) reader() observe.Reader { return observe.Reader{Dir: o.bpffs, StateDir: o.stateDir} }

// run is the whole program; it returns the exit status.
func run(ctx context.Context, e env) int {
	o := &options{env: e}
	root := &cobra.Command{
		Use:   "ebpfctl",
		Short: "Show what the dataplane of this node is doing",
		Long: `Show what the dataplane of this node is doing, from its pinned maps and its
state directory alone: no agent needs to run.

--bpffs and --state-dir can be given as environment variables, as for the
agent: EBPF_AGENT_BPFFS and EBPF_AGENT_STATE_DIR.

Exit status: 0 fine, 1 something is wrong (and it says what), 2 wrong usage.`,
		Version: versionText(),
	}
	root.SetArgs(e.args)
	root.SetOut(e.stdout)
	root.SetErr(e.stderr)
	cli.Define(root.PersistentFlags(), cli.Variable, cli.BPFFS(&o.bpffs), cli.StateDir(&o.stateDir))
	formats := []string{formatTable, formatJSON, formatYAML}
	cli.Define(root.PersistentFlags(), nil,
		cli.Flag{Name: "output", Short: "o", Default: formatTable, Help: "format of the output", Value: cli.OneOf(&o.output, formats...)})
	_ = root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
	root.AddCommand(newDump(o), newStatus(o), newDockerOpts(o), newVersion(o), newCompletion(o))
	return cli.Run(ctx, root, e.lookup)
}
