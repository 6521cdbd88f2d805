// Package report makes a run of the benchmark readable: tables and plots, budgets held against it, and a comparison of two
// runs. It works on package result alone, so that everything can be made once more from bench.json.
package report

import (
	"bytes"
	"fmt"
	"path/filepath"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// Target says where a report goes.
type Target struct {
	// Document is the file with the tables; Plots the directory for the plots.
	Document, Plots string
	// PNG: as PNG too, beside SVG.
	PNG bool
	// shared: the document shows a run of networks and one of clusters, and each leaves the other's alone.
	shared bool
}

// Beside is bench.md and plots/ in the directory of a bench.json.
func Beside(json string) Target {
	dir := filepath.Dir(json)
	return Target{Document: filepath.Join(dir, "bench.md"), Plots: filepath.Join(dir, "plots"), PNG: true}
}

// Into is a document at the top of the project, such as BENCHMARKS.md, and its plots where the project keeps them.
func Into(document string) Target {
	return Target{Document: document, Plots: filepath.Join(filepath.Dir(document), "tools", "bench", "plots"), shared: true}
}

// Write writes a report and returns the document's name.
func Write(run *result.Run, to Target) (string, error) {
	if run.Profile == result.ClusterProfile {
		return writeCluster(run, to)
	}
	figures, err := Figures(run, to.Plots, to.PNG)
	if err != nil {
		return "", err
	}
	below, err := filepath.Rel(filepath.Dir(to.Document), to.Plots)
	if err != nil {
		return "", fmt.Errorf("link from %s to its plots: %w", to.Document, err)
	}
	var text bytes.Buffer
	(&writer{run: run, figures: figures, plots: filepath.ToSlash(below), kept: to.shared}).document(&text)
	if to.shared {
		section, err := keptCluster(to.Document)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&text, "\n%s", section)
	}
	return to.Document, result.Replace(to.Document, text.Bytes())
}
