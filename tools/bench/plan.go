package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// task is one sample of each round: a workload between two places, at one point, in one mode.
type task struct {
	result.Workload

	path  string
	point int
	mode  string
	// takes is how long the sample is expected to take.
	takes time.Duration
}

func (t task) String() string {
	text := t.Name
	if t.path != "" {
		text += ", " + t.path
	}
	if t.Axis != "" {
		text += fmt.Sprintf(", %d %s", t.point, t.Axis)
	}
	return text + ", " + t.mode
}

func (t task) row() result.Row { return result.Row{Workload: t.Name, Path: t.path, Point: t.point} }

// served says that the client sends to a Service, of which the server is the endpoint.
func (t task) served() bool { return t.Served && (t.Axis == "" || t.point > 0) }

// group are tasks whose samples are divided by each other: they are taken right one after the other, in the opposite order in every other round.
type group []task

// profile is how much of everything is measured.
type profile struct {
	name             string
	rounds           int
	duration, warmup time.Duration
	// sustained is for how long short connections are opened.
	sustained time.Duration
	// pods is how many are added and deleted for a sample, but no fewer than are added at once.
	pods int
	// rest is for how long an agent at rest is watched.
	rest time.Duration
	// changes is how often a Node changes for a sample.
	changes int
	// ipv6 are the workloads that are measured over IPv6 too. Of those that are asked for by name every one is.
	ipv6 []string
}

func quick() profile {
	return profile{name: "quick", rounds: 3, duration: 700 * time.Millisecond, warmup: 200 * time.Millisecond, sustained: 3 * time.Second, pods: 5, rest: 10 * time.Second, changes: 10, ipv6: []string{"crr"}}
}

// full has a hundred of each in five rounds: the least that has a p99.
func full() profile {
	return profile{
		name: "full", rounds: 5, duration: 700 * time.Millisecond, warmup: 200 * time.Millisecond, sustained: 5 * time.Minute, pods: 20, rest: 10 * time.Second, changes: 20,
		ipv6: []string{"udp64", "tcp1", "crr", "flows", "service-udp64"},
	}
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
	groups  []group // of one round
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
	for _, name := range among(result.Names(false), workloads) {
		w, _ := result.Find(name)
		made.groups = append(made.groups, p.groups(w, among(made.modes, w.Modes), len(workloads) > 0)...)
	}
	made.modes = slices.DeleteFunc(made.modes, func(mode string) bool {
		return !slices.ContainsFunc(slices.Concat(made.groups...), func(t task) bool { return t.mode == mode })
	})
	if len(made.groups) == 0 {
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

// groups are a workload's: all modes at one point, or all points in one mode. One that was asked for by name is measured in any profile.
func (p profile) groups(w result.Workload, modes []string, named bool) (groups []group) {
	if w.Named && !named {
		return nil
	}
	paths, points := w.Paths, w.Points
	if p.name == quick().name && (w.Quick != nil || !named) {
		paths = w.Quick
	}
	if points == nil {
		points = []int{0}
	}
	modes = slices.DeleteFunc(modes, func(mode string) bool {
		ipv6 := mode == result.IPv6 || mode == result.IPTablesIPv6
		return !named && ipv6 && !slices.Contains(p.ipv6, w.Name)
	})
	of := func(path string, points []int, modes []string) {
		var g group
		for _, point := range points {
			for _, mode := range modes {
				if !result.Measured(mode, path) {
					continue
				}
				t := task{Workload: w, path: path, point: point, mode: mode, takes: w.Takes}
				switch {
				case w.Kind == result.Closing:
					t.takes += p.sustained
				case path != "":
					t.takes += p.duration + p.warmup + 60*time.Millisecond
				}
				g = append(g, t)
			}
		}
		if len(g) > 0 {
			groups = append(groups, g)
		}
	}
	for _, path := range paths {
		if w.Itself {
			for _, mode := range modes {
				of(path, points, []string{mode})
			}
			continue
		}
		for _, point := range points {
			of(path, []int{point}, modes)
		}
	}
	return groups
}

// takes is how long all rounds are expected to take.
func (p plan) takes() (sum time.Duration) {
	for n := range p.profile.rounds {
		sum += expected(p.in(n + 1))
	}
	return sum
}

// in are the groups of a round, from 1.
func (p plan) in(round int) []group {
	if round == 1 {
		return p.groups
	}
	return slices.DeleteFunc(slices.Clone(p.groups), func(g group) bool { return g[0].Once })
}

func expected(groups []group) (sum time.Duration) {
	for _, t := range slices.Concat(groups...) {
		sum += t.takes
	}
	return sum
}

// workloads are those that the plan has.
func (p plan) workloads() (names []string) {
	for _, g := range p.groups {
		names = append(names, g[0].Name)
	}
	return slices.Compact(names)
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
