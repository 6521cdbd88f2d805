package main

import (
	"fmt"
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
	for _, name := range result.Names(false) {
		if !slices.Contains(p.workloads(), name) {
			t.Errorf("%s is in the table and not in the full profile", name)
		}
	}
	if p.profile.rounds < 5 {
		t.Errorf("%d rounds are not judged", p.profile.rounds)
	}
}

func TestPlanSelects(t *testing.T) {
	p, err := newPlan(full(), []string{result.IPTables, result.Direct}, []string{"udp64", "cni", "nodes", "agent"})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, i := range p.items {
		got = append(got, i.String()+": "+strings.Join(i.modes, " "))
	}
	want := []string{
		"udp64, same node: direct iptables", "udp64, across nodes: direct iptables", "udp64, egress: direct iptables",
		"cni: iptables", // no plugin in direct, and no agent in either
		"nodes, across nodes, 2 nodes: iptables", "nodes, across nodes, 5000 nodes: iptables",
		"nodes, across nodes, 1000 nodes: iptables", "nodes, across nodes, 100 nodes: iptables",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s", strings.Join(got, "\n"))
	}
}

// What a budget divides by is measured next to it.
func TestJudgedModesAreNeighbours(t *testing.T) {
	p, err := newPlan(full(), nil, []string{"udp64"})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Join(p.items[0].modes, " "), "direct ebpf iptables ebpf+kube-proxy ptp nftables"; got != want {
		t.Errorf("%s, want %s", got, want)
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
		1: "nodes ebpf 2, 5000, 1000, 100; nodes iptables 2, 5000, 1000, 100; ",
		2: "nodes ebpf 100, 1000, 5000, 2; nodes iptables 100, 1000, 5000, 2; ",
		3: "nodes ebpf 2, 5000, 1000, 100; nodes iptables 2, 5000, 1000, 100; ",
	} {
		want += "services ebpf iptables 0, 1000, 10000, 20000; "
		var got strings.Builder
		last := ""
		for _, i := range p.round(round) {
			if what := i.Name + " " + strings.Join(i.modes, " "); what != last {
				fmt.Fprintf(&got, "; %s %d", what, i.point)
				last = what
			} else {
				fmt.Fprintf(&got, ", %d", i.point)
			}
		}
		if text := strings.TrimPrefix(got.String(), "; ") + "; "; !strings.HasPrefix(text, want) {
			t.Errorf("round %d: %s", round, text)
		}
	}
}

// A p99 takes a hundred values.
func TestFullProfileHasAHundredOfEach(t *testing.T) {
	p := full()
	if p.rounds*p.pods < 100 || p.rounds*p.batches*10 < 100 || p.rounds*p.changes < 100 {
		t.Errorf("%d rounds of %d pods, %d times ten and %d changes", p.rounds, p.pods, p.batches, p.changes)
	}
}
