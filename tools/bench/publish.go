package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
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

// check finds what would keep a run of a profile from being published, before it runs.
func (p *publication) check(profile string) error {
	if p.headline == "" {
		return nil
	}
	if p.into == "" {
		return usage(errors.New("--headline takes --into, the document that it links to"))
	}
	return report.CheckHeadline(p.headline, profile)
}

// fits is an error for a run that the project's documents don't show: they show whole ones only. Before a run it is known too.
func (p *publication) fits(run *result.Run) error {
	var why string
	switch {
	case p.into == "":
		return nil
	case run.Interrupted != "":
		why = "it was interrupted: " + run.Interrupted
	case run.Indicative:
		why = "it is a short one, by which nothing is judged"
	case run.Environment.Dirty:
		why = "the checkout has changes that no commit has"
	case len(left(run)) > 0:
		why = "it leaves out " + strings.Join(left(run), ", ")
	default:
		return nil
	}
	target := "bench-full"
	if run.Profile == result.ClusterProfile {
		target = "bench-cluster"
	}
	return fmt.Errorf("this run is not for %s: %s; make %s DOCUMENT=%s measures all that it takes", p.into, why, target, filepath.Base(p.into))
}

// left are the modes and workloads that a run has not measured.
func left(run *result.Run) (names []string) {
	if run.Profile == result.ClusterProfile {
		for _, name := range clusterWorkloads() {
			if !slices.Contains(run.Workloads, name) {
				names = append(names, name)
			}
		}
		return names
	}
	for _, name := range modes.Names() {
		if _, ok := run.Mode(name); !ok {
			names = append(names, name)
		}
	}
	for _, name := range workloadNames() {
		if !slices.Contains(run.Workloads, name) {
			names = append(names, name)
		}
	}
	return names
}

func (p *publication) publish(e env, run *result.Run) error {
	if err := p.fits(run); err != nil {
		return err
	}
	if p.into != "" {
		for _, warning := range run.Environment.Warnings {
			fmt.Fprintf(e.stderr, "published with a warning: %s\n", warning)
		}
	}
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
			if p.into == "" && p.headline != "" {
				return p.check("")
			}
			run, err := result.Read(args[0])
			if err != nil {
				return err
			}
			if err := p.check(run.Profile); err != nil {
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
