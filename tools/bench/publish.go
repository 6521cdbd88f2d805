package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/report"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// publication is which of the project's documents show a run.
type publication struct {
	into, headline string
}

func (p *publication) flags(command *cobra.Command) {
	command.Flags().StringVar(&p.into, "into", "", "write this document too, with its plots as SVG in tools/bench/plots beside it")
	command.Flags().StringVar(&p.headline, "headline", "", "put the main figures between the marks in this document, with a link to that of --into")
}

// check finds what would keep a run from being published, before it runs.
func (p *publication) check() error {
	if p.headline == "" {
		return nil
	}
	if p.into == "" {
		return usage(errors.New("--headline takes --into, the document that it links to"))
	}
	return report.CheckHeadline(p.headline)
}

func (p *publication) publish(e env, run *result.Run) error {
	if p.into != "" {
		written, err := report.Write(run, report.Into(p.into))
		if err != nil {
			return err
		}
		fmt.Fprintln(e.stdout, written)
	}
	if p.headline != "" {
		if err := report.Headline(run, p.headline, p.into); err != nil {
			return err
		}
		fmt.Fprintln(e.stdout, p.headline)
	}
	return nil
}

func reportCommand(e env) *cobra.Command {
	var p publication
	command := &cobra.Command{
		Use:   "report FILE",
		Short: "Write tables and plots of a run once more, beside its file, or into documents of the project",
		Args:  exactly(1, "one file, such as bench-out/full/bench.json"),
		RunE: func(_ *cobra.Command, args []string) error {
			if err := p.check(); err != nil {
				return err
			}
			run, err := result.Read(args[0])
			if err != nil {
				return err
			}
			if p.into != "" {
				return p.publish(e, run)
			}
			written, err := report.Write(run, report.Beside(args[0]))
			if err != nil {
				return err
			}
			fmt.Fprintln(e.stdout, written)
			return nil
		},
	}
	p.flags(command)
	return command
}
