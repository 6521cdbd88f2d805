// Package report makes a run of the benchmark readable: tables and plots, budgets held against it, and a comparison of two
// runs. It works on package result alone, so that everything can be made once more from bench.json.
package report

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// Write writes a run's whole report into a directory: bench.md with all tables, and the plots in plots/.
func Write(run *result.Run, dir string) error {
	files := plotsOf(run)
	if err := drawAll(files, filepath.Join(dir, "plots")); err != nil {
		return err
	}
	text := append([]byte("# Benchmarks\n\n"+section(run, files, "plots")+"\n"), tables(run)...)
	return result.Replace(filepath.Join(dir, "bench.md"), text)
}

// Publish writes a run into the documents of a checkout: its section of BENCHMARKS.md with the plots, its sentences in README.md, and all
// tables in tools/bench/results. What a run of networks wrote, a run on clusters leaves alone, and the other way round.
func Publish(run *result.Run, root string) error {
	if err := Publishable(root); err != nil {
		return err
	}
	name, mark, headline := "networks.md", "bench", headline
	var files []figure
	if run.Profile == result.ClusterProfile {
		name, mark, headline = "cluster.md", "bench-cluster", clusterHeadline
	} else {
		files = plotsOf(run)
		if err := drawAll(files, filepath.Join(root, "tools/bench/plots")); err != nil {
			return err
		}
	}
	return errors.Join(
		result.Replace(filepath.Join(root, "tools/bench/results", name), tables(run)),
		between(filepath.Join(root, "BENCHMARKS.md"), mark, section(run, files, "tools/bench/plots")),
		between(filepath.Join(root, "README.md"), mark, headline(run)))
}

// Publishable is an error unless a checkout's documents have places for what Publish writes.
func Publishable(root string) error {
	for _, name := range []string{"BENCHMARKS.md", "README.md"} {
		for _, mark := range []string{"bench", "bench-cluster"} {
			if _, _, err := around(filepath.Join(root, name), mark); err != nil {
				return err
			}
		}
	}
	return nil
}

// between replaces what stands between a document's two lines of a mark.
func between(file, mark, text string) error {
	before, after, err := around(file, mark)
	if err != nil {
		return err
	}
	return result.Replace(file, bytes.Join([][]byte{before, []byte(text), after}, nil))
}

func around(file, mark string) (before, after []byte, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, nil, fmt.Errorf("read the document to write into: %w", err)
	}
	begins, ends := "<!-- "+mark+":begin -->\n", "<!-- "+mark+":end -->"
	from, to := bytes.Index(text, []byte(begins)), bytes.Index(text, []byte(ends))
	if from < 0 || to < from {
		return nil, nil, fmt.Errorf("%s has no lines %q and %q, between which the figures go; add them", file, begins, ends)
	}
	return text[:from+len(begins)], text[to:], nil
}
