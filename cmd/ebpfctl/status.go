package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebpf-cni/ebpf-cni/cmd/internal/cli"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
)

// problemGrace is how long a problem must last to be one: a pod that is just being
// added or removed looks broken for a moment.
const problemGrace = 300 * time.Millisecond

// maxProblems is how many problems are printed: a node that has lost its uplink may have thousands.
const maxProblems = 20

func newStatus(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show the state of this node and what is wrong with it",
		Long: `Show the agent, this node, its programs, maps and peers on one screen, and at the
end what is wrong and what to do about it. Then the exit status is 1, as it is
when no agent runs, or one that hangs, or that is not ready, for the reason that
its /readyz gives.

degraded  which controllers have problems that keep no pod from being carried
api server the one that the agent goes by, and of how many
pods      also how many have a larger MTU than the ways to other nodes: they
          work, and are told of what does not fit (TOO_BIG in the map drops)
attached  how many hooks of interfaces have their program, by mechanism
maps      the one that is fullest
peers     how many other nodes have podCIDRs, by how their pods are reached: a
          node whose families go different ways counts for each

As JSON and YAML each program, attachment, map and peer is an object.`,
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

// survey looks twice when the first look finds problems, and keeps those that both found. If they found different ones, it looks
// once more.
func (o *options) survey(ctx context.Context) (observe.Status, error) {
	s, err := o.reader().Survey()
	for range 2 {
		if err != nil || len(s.Problems) == 0 {
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(problemGrace):
		}
		earlier := s
		s, err = o.reader().Survey()
		lasting := s
		if lasting.KeepLasting(earlier); len(lasting.Problems) > 0 {
			return lasting, err
		}
	}
	return s, err
}

func (o *options) writeStatus(s observe.Status) error {
	if o.output == formatJSON || o.output == formatYAML {
		return writeDocument(o.stdout, o.output, s)
	}
	var b bytes.Buffer
	for _, line := range summary(s) {
		if line[1] != "" { // what most nodes have in common is left out
			fmt.Fprintf(&b, "%-10s %s\n", line[0], line[1])
		}
	}
	writeProblems(&b, s.Problems)
	_, err := o.stdout.Write(b.Bytes())
	return err
}

// summary is what there is to know of a node, a line each; JSON and YAML have it in full.
func summary(s observe.Status) [][2]string {
	agent := "not running"
	switch {
	case s.Agent.Stuck:
		agent = "running, stuck"
	case s.Agent.Ready:
		agent = "running, ready"
	case s.Agent.Running:
		agent = "running, not ready"
	}
	if len(s.Agent.Degraded) > 0 {
		agent += ", degraded: " + strings.Join(s.Agent.Degraded, ", ")
	}
	var uplinks, bridges, programs []string
	for _, u := range s.Uplinks {
		uplinks = append(uplinks, strings.TrimSpace(u.Interface+" "+join(u.Addresses)))
	}
	for _, b := range s.Bridges {
		bridges = append(bridges, strings.TrimSpace(b.Interface+" "+join(b.Subnets)))
	}
	for _, p := range s.Programs {
		programs = append(programs, fmt.Sprintf("%s %d", p.Name, p.ID))
	}
	netfilter := "does not translate"
	if s.Node.Netfilter != "" {
		netfilter = map[bool]string{true: "masquerades, but no pod's packets: ", false: "translates: "}[s.Node.NetfilterLevel == observe.Masquerades] + s.Node.Netfilter
	}
	return [][2]string{
		{"agent", agent},
		{"api server", s.Agent.APIServer},
		{"node", dash(join(s.Node.Addresses))},
		{"pod CIDRs", dash(join(s.Node.PodCIDRs))},
		{"pods", pods(s.Node)},
		{"uplinks", dash(strings.Join(uplinks, ", "))},
		{"bridges", strings.Join(bridges, ", ")},
		{"routing", s.Node.Routing},
		{"snat ports", s.Node.SNATPorts},
		{"services", s.Node.Services},
		{"host ports", hostPorts(s.Node)},
		{"netfilter", netfilter},
		{"routes", s.Node.Routes},
		{"ipsec", s.Node.IPsec},
		{"programs", dash(strings.Join(programs, ", "))},
		{"attached", count(s.Attachments, mechanism)},
		{"maps", fullest(s.Maps)},
		{"peers", count(nodes(s.Peers), way)},
	}
}

// pods are how many there are, and how many send what does not fit: such as those from before a change of the routing mode.
func pods(n observe.Node) string {
	if n.PodsAbove == 0 {
		return strconv.Itoa(n.Pods)
	}
	return fmt.Sprintf("%d, %d of them with a larger MTU than the ways to other nodes (%d)", n.Pods, n.PodsAbove, n.MTU)
}

// hostPorts are how many pods have; empty: none, as on most nodes.
func hostPorts(n observe.Node) string {
	if n.HostPorts == 0 {
		return ""
	}
	return fmt.Sprintf("%d, served by the programs; ebpfctl dump hostports lists them", n.HostPorts)
}

// mechanism is by what a hook has its program.
func mechanism(a observe.Attachment) string { return cmp.Or(string(a.Mode), "missing") }

// nodes are the other nodes that have a podCIDR, as far as their names are known: once each, or once for each way if that of one
// family is another. What else there is are addresses, of these nodes too.
func nodes(peers []observe.Peer) (once []observe.Peer) {
	type reached struct{ node, way string }
	seen := map[reached]bool{}
	for _, p := range peers {
		if node := (reached{cmp.Or(p.Name, p.Node.String()), way(p)}); p.PodCIDR != "" && !seen[node] {
			seen[node] = true
			once = append(once, p)
		}
	}
	return once
}

// way is how another node's pods are reached.
func way(p observe.Peer) string {
	if p.Way == destinations.None {
		return "off link"
	}
	return string(p.Way)
}

// count says how many there are of each kind, such as "2 direct, 1 off link".
func count[T any](all []T, kind func(T) string) string {
	by := map[string]int{}
	for _, one := range all {
		by[kind(one)]++
	}
	var texts []string
	for _, name := range slices.Sorted(maps.Keys(by)) {
		texts = append(texts, fmt.Sprintf("%d %s", by[name], name))
	}
	return dash(strings.Join(texts, ", "))
}

// fullest is the map that will be full first.
func fullest(all []observe.Fill) string {
	if len(all) == 0 {
		return "-"
	}
	m := slices.MaxFunc(all, func(a, b observe.Fill) int { return cmp.Compare(a.Percent(), b.Percent()) })
	return fmt.Sprintf("at most %d %% full: %s, %d of %d", m.Percent(), m.Name, m.Entries, m.Capacity)
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
	for i, p := range problems {
		if i == maxProblems {
			fmt.Fprintf(w, "and %d more; -o json has all\n", len(problems)-i)
			return
		}
		fmt.Fprintf(w, "- %s\n", p)
	}
}
