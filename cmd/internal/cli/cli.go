// Package cli is what the command lines of the commands have in common. A Flag is declared in one place, given on the command
// line or as an environment variable, and refused by its name with what was given and what it takes.
package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
)

// The exit statuses.
const (
	Fine    = iota
	Failed  // the work failed, or found something wrong
	Misused // the command line can't be followed
)

// ErrReported ends a command with the status Failed when its output has said why.
var ErrReported = errors.New("reported")

// misuse is an error of the command line that a command's work finds.
type misuse struct{ error }

// Misuse returns the error of a command line that can't be followed.
func Misuse(format string, args ...any) error { return misuse{fmt.Errorf(format, args...)} }

// Run executes the command line that root has been given and returns the exit status. What goes wrong before a command's RunE
// is Misused; in it, Failed, unless it is of Misuse. Errors are a line each on root's stderr.
func Run(ctx context.Context, root *cobra.Command, lookup func(variable string) (string, bool)) int {
	status := Misused
	for _, c := range append(root.Commands(), root) {
		if work := c.RunE; work != nil {
			c.RunE = func(cmd *cobra.Command, args []string) error {
				if err := read(cmd.Flags(), lookup); err != nil {
					return err
				}
				status = Failed
				return work(cmd, args)
			}
		}
	}
	root.SilenceErrors, root.SilenceUsage = true, true
	root.CompletionOptions.DisableDefaultCmd = true
	cmd, err := root.ExecuteContextC(ctx)
	var wrong misuse
	switch {
	case err == nil:
		return Fine
	case errors.Is(err, ErrReported):
		return Failed
	case status == Misused, errors.As(err, &wrong):
		_, _ = fmt.Fprintf(root.ErrOrStderr(), "%s: %v; see '%s --help'\n", root.Name(), err, cmd.CommandPath())
		return Misused
	}
	_, _ = fmt.Fprintf(root.ErrOrStderr(), "%s: %v\n", root.Name(), err)
	return Failed
}
