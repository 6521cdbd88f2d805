package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// item is one workload between two places at one point: what is measured in all of its modes, one after the other, before
// anything else is.
type item struct {
	workload, path string
	point          int
	modes          []string
	// takes is how long one sample is expected to take.
	takes time.Duration
	// turns is common to neighbours that come in reverse order in every other round.
	turns string
}

func (i item) String() string {
	text := i.workload
	if i.path != "" {
		text += ", " + i.path
	}
	if w, _ := result.Find(i.workload); w.Axis != "" {
		text += fmt.Sprintf(", %d %s", i.point, w.Axis)
	}
	return text
}

// compared is common to the items whose samples are divided by each other.
func (i item) compared() string {
	if i.turns != "" {
		return i.turns
	}
	return i.String()
}

// profile is how much of everything is measured.
type profile struct {
	name             string
	rounds           int
	duration, warmup time.Duration
	// traffic lists workloads by the paths that they take.
	traffic []course
	sweeps  []sweep
	// pods is how many are added and deleted one at a time for a sample; so many times ten at once.
	pods, batches int
	// nodes is how many the agent's list has; changes, how often one of them changes for a sample.
	nodes, changes int
}

type course struct {
	workload string
	paths    []string
}

// sweep measures something while something else grows: all of its workloads at one point, then at the next.
type sweep struct {
	workloads []string
	path      string
	points    []int
	modes     []string
	// within says that a mode is compared with itself: each goes through all points before the next mode does, and back in every other round.
	within bool
}

func all() []string { return result.Paths() }

func quick() profile {
	return profile{
		name: "quick", rounds: 3, duration: 700 * time.Millisecond, warmup: 200 * time.Millisecond,
		traffic: []course{
			{"udp64", all()},
			{"tcp1", []string{result.SameNode, result.AcrossNodes}},
			{"rr", []string{result.AcrossNodes}},
			{"crr", []string{result.AcrossNodes}},
			{"flows", []string{result.Egress}},
		},
		pods: 5, batches: 0, nodes: 5000, changes: 10,
	}
}

func full() profile {
	return profile{
		name: "full", rounds: 5, duration: 850 * time.Millisecond, warmup: 200 * time.Millisecond,
		traffic: []course{
			{"udp64", all()}, {"udp1400", all()}, {"tcp1", all()}, {"tcp4", all()}, {"rr", all()}, {"crr", all()},
			{"flows", []string{result.Egress}}, {"bpf", all()},
		},
		sweeps: []sweep{
			// The two points that are compared stand side by side.
			{[]string{"nodes"}, result.AcrossNodes, []int{2, 5000, 1000, 100}, []string{modes.EBPF, modes.IPTables}, true},
			{[]string{"services", "services-udp"}, result.AcrossNodes, []int{0, 1000, 10000, 20000},
				[]string{modes.EBPF, modes.EBPFKubeProxy, modes.IPTables, modes.NFTables}, false},
			{[]string{"live"}, result.Egress, []int{1, 1000, 50000}, []string{modes.EBPF, modes.IPTables}, false},
		},
		// A hundred of each in five rounds: the least that has a p99.
		pods: 20, batches: 2, nodes: 5000, changes: 20,
	}
}

// selection is what somebody wants out of a profile.
type selection struct {
	modes, workloads []string
	rounds           int
	duration, warmup time.Duration
}

// plan is a run before it runs.
type plan struct {
	profile profile
	modes   []string // those that exist
	items   []item   // of one round
}

// newPlan makes the plan of a profile, as far as it is selected. Every name that nobody knows is an error.
func newPlan(p profile, want selection) (plan, error) {
	if err := known("mode", want.modes, modes.Names()); err != nil {
		return plan{}, err
	}
	var workloads []string
	for _, w := range result.Catalog() {
		workloads = append(workloads, w.Name)
	}
	if err := known("workload", want.workloads, workloads); err != nil {
		return plan{}, err
	}
	if want.rounds < 0 || want.duration < 0 || want.warmup < 0 {
		return plan{}, fmt.Errorf("--rounds, --duration and --warmup take no negative values")
	}
	p.rounds, p.duration = or(want.rounds, p.rounds), or(want.duration, p.duration)
	p.warmup = or(want.warmup, p.warmup)
	made := plan{profile: p}
	for _, name := range modes.Names() {
		if selected(want.modes, name) && modes.Missing(name) == "" {
			made.modes = append(made.modes, name)
		}
	}
	made.items = p.items(made.modes, want.workloads)
	if len(made.items) == 0 {
		return plan{}, fmt.Errorf("nothing to measure: no workload of profile %s is left for the modes and workloads chosen", p.name)
	}
	return made, nil
}

func or[T int | time.Duration](value, otherwise T) T {
	if value == 0 {
		return otherwise
	}
	return value
}

func selected(list []string, name string) bool { return len(list) == 0 || slices.Contains(list, name) }

func known(what string, names, all []string) error {
	for _, name := range names {
		if !slices.Contains(all, name) {
			return fmt.Errorf("unknown %s %q; there are: %s", what, name, strings.Join(all, ", "))
		}
	}
	return nil
}

// round is the order of a round, counted from 1.
func (p plan) round(n int) []item {
	ordered := slices.Clone(p.items)
	if n%2 == 1 {
		return ordered
	}
	for from := 0; from < len(ordered); {
		to := from + 1
		for to < len(ordered) && ordered[from].turns != "" && ordered[to].turns == ordered[from].turns {
			to++
		}
		slices.Reverse(ordered[from:to])
		from = to
	}
	return ordered
}

// items is the first round. Modes stand next to each other, so that two samples whose ratio is taken are seconds apart.
func (p profile) items(have, workloads []string) (items []item) {
	have = judgedTogether(have)
	add := func(i item, among ...string) {
		for _, name := range have {
			if len(among) == 0 || slices.Contains(among, name) {
				i.modes = append(i.modes, name)
			}
		}
		if len(i.modes) > 0 && selected(workloads, i.workload) {
			items = append(items, i)
		}
	}
	sample := p.duration + p.warmup + 60*time.Millisecond
	for _, c := range p.traffic {
		for _, path := range c.paths {
			if c.workload == "bpf" {
				add(item{workload: c.workload, path: path, takes: sample}, ours()...)
			} else {
				add(item{workload: c.workload, path: path, takes: sample})
			}
		}
	}
	for _, s := range p.sweeps {
		groups := [][]string{s.modes}
		if s.within {
			groups = slices.Collect(slices.Chunk(s.modes, 1))
		}
		for _, among := range groups {
			for _, point := range s.points {
				for _, workload := range s.workloads {
					i := item{workload: workload, path: s.path, point: point, takes: sample + 700*time.Millisecond}
					if s.within {
						i.turns = workload + " " + among[0]
					}
					add(i, among...)
				}
			}
		}
	}
	plugins := without(have, modes.Direct)
	if len(plugins) > 0 {
		add(item{workload: "cni", takes: time.Duration(p.pods) * 160 * time.Millisecond}, plugins...)
		if p.batches > 0 {
			add(item{workload: "cni10", takes: time.Duration(p.batches) * 800 * time.Millisecond}, plugins...)
		}
	}
	add(item{workload: "agent", takes: 3 * time.Second}, modes.EBPF)
	add(item{workload: "agent-api", takes: 4 * time.Second}, modes.EBPF)
	add(item{workload: "change", takes: time.Duration(p.changes)*60*time.Millisecond + time.Second}, modes.EBPF)
	add(item{workload: "change5000", takes: time.Duration(p.changes)*550*time.Millisecond + 2500*time.Millisecond}, modes.EBPF)
	add(item{workload: "change-api", takes: time.Duration(p.changes)*350*time.Millisecond + 3*time.Second}, modes.EBPF)
	return items
}

// judgedTogether has the mode beside kube-proxy after the classical one: budgets divide ours without it by that, so the two are to be neighbours.
func judgedTogether(have []string) []string {
	ordered := without(have, modes.EBPFKubeProxy)
	if len(ordered) == len(have) {
		return ordered
	}
	at := slices.Index(ordered, modes.IPTables) + 1
	if at == 0 {
		return have
	}
	return slices.Insert(ordered, at, modes.EBPFKubeProxy)
}

// ours are the modes with programs of this project.
func ours() []string { return []string{modes.EBPF, modes.EBPFKubeProxy, modes.EBPFVXLAN} }

func without(names []string, name string) (rest []string) {
	for _, n := range names {
		if n != name {
			rest = append(rest, n)
		}
	}
	return rest
}

// takes is how long all rounds are expected to take.
func (p plan) takes() (sum time.Duration) {
	for _, i := range p.items {
		sum += time.Duration(len(i.modes)*p.profile.rounds) * i.takes
	}
	return sum
}

// workloads are those that the plan has.
func (p plan) workloads() (names []string) {
	for _, i := range p.items {
		if !slices.Contains(names, i.workload) {
			names = append(names, i.workload)
		}
	}
	return names
}
