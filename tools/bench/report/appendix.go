package report

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// retaken says how often samples were disturbed, by mode: the modes must not differ in it.
func (w *writer) retaken() {
	var lines [][]string
	for _, mode := range w.run.Modes {
		if line := w.disturbed(mode.Name); line != nil {
			lines = append(lines, line)
		}
	}
	w.printf("## Disturbed samples\n\n")
	w.printf("Only what disturbs a generator is a reason to take a sample again; packets that went astray are none. Where every attempt was disturbed, the " +
		"least disturbed one is kept. \"Worst delay\" is the largest share of a sample that counts for which an end waited for its CPU.\n\n")
	w.lines([]string{"mode", "samples", "taken again", "kept though disturbed", "refused", "worst delay", "disturbances"}, lines)
}

func (w *writer) disturbed(mode string) []string {
	samples, again, kept, refused, delay, whys := 0, 0, 0, 0, 0.0, map[string]int{}
	for _, s := range w.run.Samples {
		if s.Mode != mode {
			continue
		}
		samples++
		again += count(len(s.Attempts) > 0)
		kept += count(s.Disturbed != "")
		refused += count(s.Error != "")
		delay = max(delay, s.Values[result.Delayed])
		for _, why := range s.Attempts {
			whys[kind(why)]++
		}
	}
	if samples == 0 {
		return nil
	}
	return []string{
		mode, fmt.Sprint(samples), fmt.Sprint(again), fmt.Sprint(kept), fmt.Sprint(refused), fmt.Sprintf("%.1f %%", 100*delay), counted(whys),
	}
}

func count(holds bool) int {
	if holds {
		return 1
	}
	return 0
}

// brief is the first line of an error, without what each of them begins with.
func brief(why string) string {
	first, _, _ := strings.Cut(why, "\n")
	for _, common := range []string{"it says: ", "sample claims: "} {
		if _, after, found := strings.Cut(first, common); found {
			return after
		}
	}
	return first
}

// kind is what errors have in common that differ in numbers.
func kind(why string) string {
	first, _, _ := strings.Cut(brief(why), ":")
	return strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return 'n'
		}
		return r
	}, first)
}

func counted(whys map[string]int) string {
	var list []string
	for _, why := range slices.Sorted(maps.Keys(whys)) {
		list = append(list, fmt.Sprintf("%d x %s", whys[why], why))
	}
	return strings.Join(list, "; ")
}

// refused lists the samples that did not measure what they claim.
func (w *writer) refused() {
	var lines [][]string
	for _, s := range w.run.Samples {
		if s.Error == "" {
			continue
		}
		what := s.Workload
		if workload, _ := result.Find(s.Workload); workload.Axis != "" {
			what = fmt.Sprintf("%s %d", what, s.Point)
		}
		lines = append(lines, []string{what, s.Path, s.Mode, fmt.Sprint(s.Round), brief(s.Error)})
	}
	w.printf("## Refused samples\n\n")
	if len(lines) == 0 {
		w.printf("None.\n\n")
		return
	}
	w.lines([]string{"workload", "path", "mode", "round", "why"}, lines)
}

func (w *writer) environment() {
	e := w.run.Environment
	lines := [][]string{
		{"command", "`" + w.run.Command + "`"}, {"began", w.run.Started.UTC().Format("2006-01-02 15:04 MST")},
		{"kernel", "Linux " + e.Kernel}, {"CPU", e.CPU}, {"cores", fmt.Sprint(e.Cores)}, {"memory", fmt.Sprintf("%d MiB", e.MemoryMB)},
		{"runs in", dash(e.Virtual)}, {"commit", e.Commit + dirty(e)}, {"load average at the start", fmt.Sprintf("%.2f", e.Load)},
	}
	for _, all := range []map[string]string{e.Versions, e.Sysctls} {
		for _, name := range slices.Sorted(maps.Keys(all)) {
			lines = append(lines, []string{name, all[name]})
		}
	}
	w.printf("%s## Environment\n\n", w.below)
	w.lines([]string{"what", "value"}, lines)
	w.sysctls()
}

// sysctls are those that each network's nodes have for themselves; modes that agree share a cell.
func (w *writer) sysctls() {
	names := map[string]bool{}
	for _, mode := range w.run.Modes {
		for name := range mode.Sysctls {
			names[name] = true
		}
	}
	var lines [][]string
	for _, name := range sorted(names) {
		lines = append(lines, []string{name, w.agreed(name)})
	}
	if len(lines) > 0 {
		w.printf("As the nodes of each mode have them:\n\n")
		w.lines([]string{"sysctl", "value"}, lines)
	}
}

func (w *writer) agreed(name string) string {
	byValue := map[string][]string{}
	var order []string
	for _, mode := range w.run.Modes {
		if mode.Sysctls == nil {
			continue
		}
		value := dash(mode.Sysctls[name])
		if byValue[value] == nil {
			order = append(order, value)
		}
		byValue[value] = append(byValue[value], mode.Name)
	}
	if len(order) == 1 {
		return order[0]
	}
	for i, value := range order {
		order[i] = fmt.Sprintf("%s: %s", strings.Join(byValue[value], ", "), value)
	}
	return strings.Join(order, "; ")
}
