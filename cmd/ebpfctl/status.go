package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebpf-cni/ebpf-cni/cmd/internal/cli"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
)

// problemGrace is how long a problem must last to be one: a pod that is just being
// added or removed looks broken for a moment.
const problemGrace = 300 * time.Millisecond

func newStatus(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show the state of this node and what is wrong with it",
		Long: `Show the agent, the programs and where they are attached, the fill of the maps,
this node and its peers. The exit status is 1 when something is wrong; what it
is stands at the end. The agent being dead is such a thing, and its not being
ready, for the reason that its /readyz gives.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := o.survey(cmd.Context())
			if err != nil {
				return err
			}
			if err := o.writeStatus(s); err != nil {
				return err
			}
			if len(s.Problems) > 0 {
				return cli.ErrReported
			}
			return nil
		},
	}
}

// survey looks twice when the first look finds problems, and keeps those that
// both found.
func (o *options) survey(ctx context.Context) (observe.Status, error) {
	first, err := o.reader().Survey(o.stateDir)
	if err != nil || len(first.Problems) == 0 {
		return first, err
	}
	select {
	case <-ctx.Done():
	case <-time.After(problemGrace):
	}
	second, err := o.reader().Survey(o.stateDir)
	second.KeepLasting(first)
	return second, err
}

func (o *options) writeStatus(s observe.Status) error {
	if o.output == formatJSON || o.output == formatYAML {
		return writeDocument(o.stdout, o.output, s)
	}
	var b bytes.Buffer
	writeSummary(&b, s)
	for _, t := range []typed.Table{programsTable(s), attachmentsTable(s), fillTable(s), peersTable(s)} {
		b.WriteByte('\n')
		if err := t.WriteText(&b); err != nil {
			return err
		}
	}
	writeProblems(&b, s.Problems)
	_, err := o.stdout.Write(b.Bytes())
	return err
}

func writeSummary(w io.Writer, s observe.Status) {
	agent := "not running"
	switch {
	case s.Agent.Ready:
		agent = "running, ready"
	case s.Agent.Running:
		agent = "running, not ready"
	}
	uplinks := make([]string, 0, len(s.Uplinks))
	for _, u := range s.Uplinks {
		uplinks = append(uplinks, strings.TrimSpace(u.Interface+" "+join(u.Addresses)))
	}
	netfilter := "does not translate"
	if s.Node.Netfilter != "" {
		netfilter = "translates: " + s.Node.Netfilter
	}
	for _, line := range [][2]string{
		{"agent", agent},
		{"node", dash(join(s.Node.Addresses))},
		{"pod CIDRs", dash(join(s.Node.PodCIDRs))},
		{"pods", strconv.Itoa(s.Node.Pods)},
		{"uplinks", dash(strings.Join(uplinks, ", "))},
		{"netfilter", netfilter},
		{"routes", s.Node.Routes},
		{"ipsec", s.Node.IPsec},
	} {
		if line[1] == "" {
			continue // only said where it is not as usual
		}
		fmt.Fprintf(w, "%-10s %s\n", line[0], line[1])
	}
}

func join[S fmt.Stringer](all []S) string {
	texts := make([]string, 0, len(all))
	for _, s := range all {
		texts = append(texts, s.String())
	}
	return strings.Join(texts, ", ")
}

func writeProblems(w io.Writer, problems []string) {
	if len(problems) == 0 {
		fmt.Fprintln(w, "\nNo problems.")
		return
	}
	fmt.Fprintln(w, "\nPROBLEMS")
	for _, p := range problems {
		fmt.Fprintf(w, "- %s\n", p)
	}
}

func programsTable(s observe.Status) typed.Table {
	return typed.Table{
		Columns: []typed.Column{{Name: "PROGRAM"}, {Name: "ID", Right: true}, {Name: "TAG"}},
		Len:     len(s.Programs),
		Cells: func(i int) []string {
			p := s.Programs[i]
			return []string{p.Name, strconv.Itoa(int(p.ID)), p.Tag}
		},
	}
}

func attachmentsTable(s observe.Status) typed.Table {
	return typed.Table{
		Columns: []typed.Column{
			{Name: "HOOK"}, {Name: "INTERFACE"}, {Name: "IFINDEX", Right: true}, {Name: "POD"}, {Name: "MODE"}, {Name: "PROGRAM ID", Right: true},
		},
		Len: len(s.Attachments),
		Cells: func(i int) []string {
			a := s.Attachments[i]
			mode, program := "none", "-"
			if a.Mode != "" {
				mode, program = string(a.Mode), strconv.Itoa(int(a.ProgramID))
			}
			return []string{string(a.Hook), dash(a.Interface), strconv.Itoa(a.Ifindex), dash(a.Pod), mode, program}
		},
	}
}

func fillTable(s observe.Status) typed.Table {
	return typed.Table{
		Columns: []typed.Column{
			{Name: "MAP"}, {Name: "ENTRIES", Right: true}, {Name: "CAPACITY", Right: true}, {Name: "FILL", Right: true},
		},
		Len: len(s.Maps),
		Cells: func(i int) []string {
			m := s.Maps[i]
			return []string{
				m.Name, strconv.FormatUint(m.Entries, 10), strconv.FormatUint(m.Capacity, 10),
				strconv.FormatUint(m.Percent(), 10) + " %",
			}
		},
	}
}

func peersTable(s observe.Status) typed.Table {
	return typed.Table{
		Columns: []typed.Column{{Name: "PEER"}, {Name: "ADDRESS"}, {Name: "POD CIDR"}, {Name: "VIA"}, {Name: "MTU", Right: true}},
		Len:     len(s.Peers),
		Cells: func(i int) []string {
			p := s.Peers[i]
			via, mtu := dash(p.Interface), "-"
			if p.MTU > 0 {
				mtu = strconv.FormatUint(uint64(p.MTU), 10)
			}
			if p.PodCIDR != "" && p.Ifindex == 0 {
				via = "off link"
			}
			return []string{dash(p.Name), p.Node.String(), dash(p.PodCIDR), via, mtu}
		},
	}
}
