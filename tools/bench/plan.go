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
	result.Workload

	path  string
	point int
	modes []string
	// takes is how long one sample is expected to take.
	takes time.Duration
	// turns is common to neighbours that come in reverse order in every other round.
	turns string
}

func (i item) String() string {
	text := i.Name
	if i.path != "" {
		text += ", " + i.path
	}
	if i.Axis != "" {
		text += fmt.Sprintf(", %d %s", i.point, i.Axis)
	}
	return text
}

func (i item) row() result.Row { return result.Row{Workload: i.Name, Path: i.path, Point: i.point} }

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
	// pods is how many are added and deleted one at a time for a sample; batches, how often ten at once.
	pods, batches int
	// changes is how often a Node changes for a sample.
	changes int
}

func quick() profile {
	return profile{name: "quick", rounds: 3, duration: 700 * time.Millisecond, warmup: 200 * time.Millisecond, pods: 5, changes: 10}
}

// full has a hundred of each in five rounds: the least that has a p99.
func full() profile {
	return profile{name: "full", rounds: 5, duration: 850 * time.Millisecond, warmup: 200 * time.Millisecond, pods: 20, batches: 2, changes: 20}
}

// indicative says that a profile measures less than the full one, whatever it is called.
func (p profile) indicative() bool {
	whole := full()
	return p.name != whole.name || p.rounds < whole.rounds
}

// plan is a run before it runs.
type plan struct {
	profile profile
	modes   []string
	items   []item // of one round
}

// newPlan makes the plan of a profile, of some modes and workloads only if there are any. Every name that nobody knows is an error.
func newPlan(p profile, only, workloads []string) (plan, error) {
	if err := known("mode", only, result.Modes()); err != nil {
		return plan{}, err
	}
	if err := known("workload", workloads, result.Names(false)); err != nil {
		return plan{}, err
	}
	made := plan{profile: p, modes: among(result.Modes(), only)}
	for _, w := range result.Workloads() {
		if w.Kind != result.Cluster && len(among([]string{w.Name}, workloads)) > 0 {
			made.items = append(made.items, p.items(w, among(made.modes, w.Modes))...)
		}
	}
	if len(made.items) == 0 {
		return plan{}, fmt.Errorf("nothing to measure: no workload of profile %s is left for the modes and workloads chosen", p.name)
	}
	return made, nil
}

// among are the names that are among others, or all where there are none.
func among(names, others []string) (both []string) {
	for _, name := range names {
		if len(others) == 0 || slices.Contains(others, name) {
			both = append(both, name)
		}
	}
	return both
}

func known(what string, names, all []string) error {
	for _, name := range names {
		if !slices.Contains(all, name) {
			return fmt.Errorf("unknown %s %q; there are: %s", what, name, strings.Join(all, ", "))
		}
	}
	return nil
}

// items are a workload's in the first round. Modes stand next to each other, so that two samples whose ratio is taken are seconds apart.
func (p profile) items(w result.Workload, modes []string) (items []item) {
	paths, points, groups := w.Paths, w.Points, [][]string{modes}
	if p.name == quick().name {
		paths = w.Quick
	}
	if points == nil {
		points = []int{0}
	}
	if w.Itself {
		groups = slices.Collect(slices.Chunk(modes, 1))
	}
	for _, group := range groups {
		for _, point := range points {
			for _, path := range paths {
				i := item{Workload: w, path: path, point: point, modes: group, takes: w.Takes}
				if path != "" {
					i.takes += p.duration + p.warmup + 60*time.Millisecond
				}
				if w.Itself {
					i.turns = w.Name + " " + group[0]
				}
				if len(group) > 0 {
					items = append(items, i)
				}
			}
		}
	}
	return items
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

// takes is how long all rounds are expected to take.
func (p plan) takes() time.Duration { return time.Duration(p.profile.rounds) * expected(p.items) }

func expected(items []item) (sum time.Duration) {
	for _, i := range items {
		sum += time.Duration(len(i.modes)) * i.takes
	}
	return sum
}

// workloads are those that the plan has.
func (p plan) workloads() (names []string) {
	for _, i := range p.items {
		if !slices.Contains(names, i.Name) {
			names = append(names, i.Name)
		}
	}
	return names
}

// ready is an error unless the machine has all that the plan takes.
func (p plan) ready() error {
	for _, mode := range p.modes {
		if err := modes.Ready(mode); err != nil {
			return err
		}
	}
	return nil
}
