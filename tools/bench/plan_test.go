package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

func TestProfilesEndInTime(t *testing.T) {
	for name, limit := range map[string]time.Duration{"quick": 7 * time.Minute, "full": 25 * time.Minute} {
		p, err := newPlan(map[string]profile{"quick": quick(), "full": full()}[name], nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if takes := p.takes(); takes > limit || takes < limit/8 {
			t.Errorf("%s is expected to take %s, its limit is %s", name, takes, limit)
		}
	}
}

func TestFullProfileMeasuresEverything(t *testing.T) {
	p, err := newPlan(full(), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range result.Whole(false) {
		if !slices.Contains(p.workloads(), name) {
			t.Errorf("%s is in the table and not in the full profile", name)
		}
	}
	if p.profile.rounds < 5 {
		t.Errorf("%d rounds are not judged", p.profile.rounds)
	}
}

func TestPlanSelects(t *testing.T) {
	p, err := newPlan(full(), []string{result.IPTables, result.Direct}, []string{"udp64", "cni", "service-udp64", "agent"})
	if err != nil {
		t.Fatal(err)
	}
	got := described(p)
	want := []string{
		"udp64, same node, direct; udp64, same node, iptables", "udp64, across nodes, direct; udp64, across nodes, iptables",
		"udp64, egress, direct; udp64, egress, iptables",
		"cni, iptables", // no plugin in direct, and no agent in either
		"service-udp64, same node, 0 Services, iptables; service-udp64, same node, 1 Services, iptables",
		"service-udp64, across nodes, 0 Services, iptables; service-udp64, across nodes, 1 Services, iptables",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s", strings.Join(got, "\n"))
	}
}

// described are the tasks of a plan, a line for each group.
func described(p plan) (lines []string) {
	for _, g := range p.groups {
		var tasks []string
		for _, task := range g {
			tasks = append(tasks, task.String())
		}
		lines = append(lines, strings.Join(tasks, "; "))
	}
	return lines
}

// What a budget divides by is measured next to it.
func TestJudgedModesAreNeighbours(t *testing.T) {
	p, err := newPlan(full(), nil, []string{"udp64"})
	if err != nil {
		t.Fatal(err)
	}
	want := "udp64, same node, direct; udp64, same node, ebpf; udp64, same node, iptables; udp64, same node, ebpf+ipv6; udp64, same node, iptables+ipv6; " +
		"udp64, same node, ebpf+kube-proxy; udp64, same node, ptp; udp64, same node, nftables"
	if got := described(p)[0]; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// IPv6 is measured where the profile says, and in whatever was asked for by name.
func TestPlanOfIPv6(t *testing.T) {
	for name, c := range map[string]struct {
		profile profile
		named   []string
		want    []string
	}{
		"quick": {quick(), nil, []string{"crr, across nodes, ebpf+ipv6"}},
		"full": {full(), nil, []string{
			"udp64, same node, ebpf+ipv6", "udp64, across nodes, ebpf+ipv6", "udp64, egress, ebpf+ipv6",
			"tcp1, same node, ebpf+ipv6", "tcp1, across nodes, ebpf+ipv6",
			"crr, across nodes, ebpf+ipv6", "flows, across nodes, ebpf+ipv6", "flows, egress, ebpf+ipv6",
			"service-udp64, same node, 0 Services, ebpf+ipv6; service-udp64, same node, 1 Services, ebpf+ipv6",
			"service-udp64, across nodes, 0 Services, ebpf+ipv6; service-udp64, across nodes, 1 Services, ebpf+ipv6",
		}},
		"by name": {quick(), []string{"rr", "cni"}, []string{"rr, across nodes, ebpf+ipv6"}},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := newPlan(c.profile, []string{result.IPv6}, c.named)
			if err != nil {
				t.Fatal(err)
			}
			if got := described(p); !slices.Equal(got, c.want) {
				t.Errorf("got\n%s", strings.Join(got, "\n"))
			}
		})
	}
}

// What only a name asks for is in no profile.
func TestPlanOfNamed(t *testing.T) {
	for name, c := range map[string]struct {
		named []string
		want  bool
	}{"whole": {nil, false}, "by name": {[]string{"udp64", "cni10"}, true}} {
		t.Run(name, func(t *testing.T) {
			p, err := newPlan(full(), nil, c.named)
			if err != nil {
				t.Fatal(err)
			}
			if got := slices.Contains(p.workloads(), "cni10"); got != c.want {
				t.Errorf("the plan has %v", p.workloads())
			}
		})
	}
}

// A sample that lasts for minutes is taken in the first round, and the plan's time says so.
func TestPlanOfOnce(t *testing.T) {
	p, err := newPlan(full(), []string{result.EBPF}, []string{"snat-fin-client", "udp64"})
	if err != nil {
		t.Fatal(err)
	}
	taken := map[string]int{}
	take := func(_ context.Context, task task) (result.Sample, error) {
		taken[fmt.Sprintf("%s %d", task.Name, task.point)]++
		return result.Sample{Values: map[string]float64{result.Rate: 1}}, nil
	}
	r := &runner{plan: p, take: take, run: &result.Run{}, save: func() error { return nil }, progress: io.Discard}
	if err := r.rounds(t.Context()); err != nil {
		t.Fatal(err)
	}
	if taken["snat-fin-client 1"] != 1 || taken["snat-fin-client 10"] != 1 || taken["udp64 0"] != 5*len(result.Paths()) {
		t.Errorf("samples were taken: %v", taken)
	}
	if takes := p.takes(); takes < 10*time.Minute || takes > 11*time.Minute {
		t.Errorf("it is expected to take %s, want twice five minutes and little more", takes)
	}
}

func TestPlanRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		modes, workloads []string
		want             string
	}{
		"unknown mode":     {[]string{"cilium"}, nil, `unknown mode "cilium"; there are: direct, ebpf`},
		"unknown workload": {nil, []string{"udp65"}, `unknown workload "udp65"; there are: udp64`},
		"a cluster's":      {nil, []string{result.Image}, `unknown workload "image"`},
		"nothing left":     {[]string{result.Direct}, []string{"cni"}, "nothing to measure"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := newPlan(full(), c.modes, c.workloads); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// Both points of a ratio follow each other, in both orders, and no other mode comes between them.
func TestPointsTakeTurns(t *testing.T) {
	p, err := newPlan(full(), []string{result.EBPF, result.IPTables}, []string{"nodes", "services"})
	if err != nil {
		t.Fatal(err)
	}
	for round, want := range map[int]string{
		1: "nodes ebpf 2, 5000; services ebpf 0; services iptables 0; ",
		2: "nodes ebpf 5000, 2; services iptables 0; services ebpf 0; ",
		3: "nodes ebpf 2, 5000; services ebpf 0; services iptables 0; ",
	} {
		var got strings.Builder
		last := ""
		take := func(_ context.Context, task task) (result.Sample, error) {
			if what := task.Name + " " + task.mode; what != last {
				fmt.Fprintf(&got, "; %s %d", what, task.point)
				last = what
			} else {
				fmt.Fprintf(&got, ", %d", task.point)
			}
			return result.Sample{}, nil
		}
		r := &runner{plan: p, take: take, run: &result.Run{}, progress: io.Discard}
		if err := r.round(t.Context(), round, p.groups); err != nil {
			t.Error(err)
		}
		if text := strings.TrimPrefix(got.String(), "; ") + "; "; !strings.HasPrefix(text, want) {
			t.Errorf("round %d: %s", round, text)
		}
	}
}
