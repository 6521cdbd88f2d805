package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	upstream "k8s.io/kubernetes/test/utils/image"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

const head = `# Kubernetes' own tests

All of ` + "`[sig-network]`" + ` in e2e.test of Kubernetes %s but what is [left out](#left-out), on clusters of %d zones without kube-proxy: this network
serves Services. Made by ` + "`make conformance PUBLISH=1`" + `.

`

// document is the page about whole runs.
func document(runs []runOf) string {
	var b strings.Builder
	fmt.Fprintf(&b, head, cluster.KubernetesVersion, zones)
	if missing := unseen(runs); len(missing) > 0 {
		fmt.Fprintf(&b, "Of these clusters there is no such run: %s.\n\n", strings.Join(missing, ", "))
	}
	b.WriteString(summary(runs))
	b.WriteString(reasons("Failed", runs, failed))
	b.WriteString(reasons("Skipped by themselves", runs, skipped))
	b.WriteString(reasons("Left out", runs, left))
	b.WriteString("\n## Images\n\nThere is no registry. Under upstream's names the nodes have:\n\n")
	for _, s := range standIns {
		fmt.Fprintf(&b, "- `%s`: %s\n", upstream.GetE2EImage(s.id), s.says)
	}
	b.WriteString("\n## All that ran\n\n")
	b.WriteString(matrix(runs))
	return b.String()
}

// table is what a person reads at the end of a run: what matters most comes last.
func table(runs []runOf) string {
	all := "\n" + matrix(runs)
	for _, what := range []outcome{left, skipped, notRun, failed} {
		all += reasons(strings.ToUpper(string(what[:1]))+string(what[1:]), runs, what)
	}
	return all + "\n" + summary(runs)
}

// unseen are the usual clusters that no run was made on.
func unseen(runs []runOf) []string {
	return slices.DeleteFunc(strings.Split(usual, ","), func(family string) bool {
		return slices.ContainsFunc(runs, func(r runOf) bool { return r.Family == family })
	})
}

// summary counts, and says what was tested.
func summary(runs []runOf) string {
	all := "| cluster | version | Linux | nodes | passed | failed | skipped by themselves | left out |\n|---|---|---|---:|---:|---:|---:|---:|\n"
	for _, r := range runs {
		all += fmt.Sprintf("| %s | %s | %s | %d | %d | %d | %d | %d |\n", r.Family, r.Version, r.Kernel, r.Nodes,
			r.count(passed), r.count(failed), r.count(skipped), r.count(left))
	}
	return all
}

// reasons is a section about the tests with an outcome, by their reasons; nothing where there are none.
func reasons(title string, runs []runOf, what outcome) string {
	clusters := map[string]map[string][]string{} // by reason and test
	for _, r := range runs {
		for _, one := range r.Results {
			if one.Outcome != what {
				continue
			}
			if clusters[one.Reason] == nil {
				clusters[one.Reason] = map[string][]string{}
			}
			clusters[one.Reason][one.Name] = append(clusters[one.Reason][one.Name], r.Family)
		}
	}
	if len(clusters) == 0 {
		return ""
	}
	all := "\n## " + title + "\n"
	for _, reason := range slices.Sorted(maps.Keys(clusters)) {
		all += fmt.Sprintf("\n%s:\n\n", plain(strings.TrimRight(reason, ".:")))
		for _, test := range slices.Sorted(maps.Keys(clusters[reason])) {
			all += fmt.Sprintf("- %s (%s)\n", plain(test), strings.Join(slices.Compact(clusters[reason][test]), ", "))
		}
	}
	return all
}

// matrix has a line for every test that ran on some cluster, and says what became of it on each.
func matrix(runs []runOf) string {
	cells, ran := map[string][]string{}, map[string]bool{}
	for i, r := range runs {
		for _, one := range r.Results {
			if cells[one.Name] == nil {
				cells[one.Name] = make([]string, len(runs))
			}
			// A few tests of upstream's have the same name: the cell tells of each.
			cells[one.Name][i] = strings.TrimPrefix(cells[one.Name][i]+", "+string(one.Outcome), ", ")
			ran[one.Name] = ran[one.Name] || one.Outcome != left
		}
	}
	all, rule := "| test |", "|---|"
	for _, r := range runs {
		all, rule = all+" "+r.Family+" |", rule+"---|"
	}
	all += "\n" + rule + "\n"
	for _, test := range slices.Sorted(maps.Keys(cells)) {
		if ran[test] {
			all += fmt.Sprintf("| %s | %s |\n", plain(test), strings.Join(cells[test], " | "))
		}
	}
	return all
}

// plain keeps text from being read as Markdown's or HTML's.
func plain(text string) string {
	return strings.NewReplacer("|", `\|`, "<", "&lt;").Replace(text)
}
