package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/ebpf-cni/ebpf-cni/pkg/agent"
)

// env is the world as the command line sees it, so that tests can make one.
type env struct {
	stdout, stderr io.Writer
	args           []string
	lookup         func(string) (string, bool)
	hostname       func() (string, error)
	executable     func() (string, error)
	run            func(context.Context, agent.Config) error
	cleanup        func(context.Context, agent.Directories, *slog.Logger) error
}

// The exit statuses.
const (
	fine = iota
	failed
	misused
)

// usageError is a command line that can't be followed.
type usageError struct{ error }

// run is the whole program.
func run(ctx context.Context, e env) int {
	err := e.command().ExecuteContext(ctx)
	var wrong usageError
	switch {
	case err == nil:
		return fine
	case errors.As(err, &wrong):
		_, _ = fmt.Fprintf(e.stderr, "ebpf-agent: %v\n", err)
		return misused
	}
	_, _ = fmt.Fprintf(e.stderr, "ebpf-agent: %v\n", err)
	return failed
}

func (e env) command() *cobra.Command {
	given := newValues(flags())
	root := &cobra.Command{
		Use:   "ebpf-agent",
		Short: "Keep this node's pod network",
		Long: "ebpf-agent loads the dataplane of this node, keeps it in step with the cluster's Nodes\n" +
			"and repairs what is removed under it. It runs until SIGTERM and leaves the dataplane running.\n\n" +
			"Every flag can be given as an environment variable: --nodes-file as EBPF_AGENT_NODES_FILE.",
		Version:       version,
		SilenceErrors: true, SilenceUsage: true,
		Args: e.noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return e.serve(cmd, given) },
	}
	cleanable := newValues(append(directoryFlags(), stayFlag()))
	cleanup := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove everything that agent and plugin ever made on this node, live pods' links included",
		Long: "cleanup removes everything that agent and plugin ever made on this node: programs, maps, live pods' links,\n" +
			"routes, addresses, files. It refuses while an agent runs. Sysctls are put back where they still hold our\n" +
			"value; ip_forward stays on.\n\n" +
			"Of the agent's flags it takes those that say where things are, and they must say the same.",
		SilenceErrors: true, SilenceUsage: true,
		Args: e.noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return e.clean(cmd, cleanable) },
	}
	root.AddCommand(cleanup)
	root.CompletionOptions.DisableDefaultCmd = true
	root.SetArgs(e.args)
	root.SetOut(e.stdout)
	root.SetErr(e.stderr)
	given.define(root.Flags())
	cleanable.define(cleanup.Flags())
	for _, c := range []*cobra.Command{root, cleanup} {
		c.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
			var unknown *pflag.NotExistError
			if errors.As(err, &unknown) && later()[unknown.GetSpecifiedName()] != "" {
				return usageError{notYet("--" + unknown.GetSpecifiedName())}
			}
			return usageError{fmt.Errorf("%w; --help lists the flags", err)}
		})
	}
	return root
}

// noArguments says what may have been meant by an argument.
func (e env) noArguments(_ *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if i := slices.Index(e.args, args[0]); i > 0 && strings.HasPrefix(e.args[i-1], "--") && !strings.Contains(e.args[i-1], "=") {
		return usageError{fmt.Errorf("unknown argument %q; %s takes its value as in %[2]s=%[1]s", args[0], e.args[i-1])}
	}
	if args[0] == "version" {
		return usageError{errors.New("unknown command \"version\"; --version tells it")}
	}
	return usageError{fmt.Errorf("unknown command %q; the only one is cleanup", args[0])}
}

func (e env) serve(cmd *cobra.Command, given values) error {
	var o options
	if err := given.read(cmd.Flags(), e.lookup, &o); err != nil {
		return usageError{err}
	}
	if err := o.dismiss(e.lookup); err != nil {
		return usageError{err}
	}
	if err := o.complete(e); err != nil {
		return err
	}
	o.config.Log = o.logger(e.stderr)
	o.remark()
	return e.run(cmd.Context(), o.config)
}

func (e env) clean(cmd *cobra.Command, given values) error {
	var o options
	if err := given.read(cmd.Flags(), e.lookup, &o); err != nil {
		return usageError{err}
	}
	if err := o.findPlugin(e); err != nil {
		return err
	}
	log := o.logger(e.stderr)
	if err := e.cleanup(cmd.Context(), o.config.Directories, log); err != nil || !o.stay {
		return err
	}
	log.Info("waiting for SIGTERM, as --stay says")
	<-cmd.Context().Done()
	return nil
}

// findPlugin looks for the plugin beside our own executable.
func (o *options) findPlugin(e env) error {
	self, err := e.executable()
	if err != nil {
		return fmt.Errorf("find our own executable, beside which the plugin is: %w", err)
	}
	o.config.Plugin = filepath.Join(filepath.Dir(self), agent.Plugin)
	return nil
}

func (o *options) logger(w io.Writer) *slog.Logger {
	opts := &slog.HandlerOptions{Level: o.level}
	if o.json {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}
