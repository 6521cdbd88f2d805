package main

import (
	"github.com/spf13/cobra"
)

func newCompletion(o *options) *cobra.Command {
	shells := map[string]func(*cobra.Command) error{
		"bash":       func(root *cobra.Command) error { return root.GenBashCompletionV2(o.stdout, true) },
		"zsh":        func(root *cobra.Command) error { return root.GenZshCompletion(o.stdout) },
		"fish":       func(root *cobra.Command) error { return root.GenFishCompletion(o.stdout, true) },
		"powershell": func(root *cobra.Command) error { return root.GenPowerShellCompletionWithDesc(o.stdout) },
	}
	return &cobra.Command{
		Use:       "completion bash|zsh|fish|powershell",
		Short:     "Print a script that teaches a shell to complete ebpfctl's arguments",
		Example:   "  source <(ebpfctl completion bash)",
		ValidArgs: []string{"bash", "zsh", "fish", "powershell"},
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		RunE: func(cmd *cobra.Command, args []string) error {
			return shells[args[0]](cmd.Root())
		},
	}
}
