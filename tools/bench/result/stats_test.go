package result

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSummarise(t *testing.T) {
	for name, c := range map[string]struct {
		values []float64
		want   Summary
	}{
		"one":            {[]float64{7}, Summary{1, 7, 7, 7}},
		"even":           {[]float64{4, 1, 2, 8}, Summary{4, 3, 1, 8}},
		"five, shuffled": {[]float64{9, 1, 5, 2, 4}, Summary{5, 4, 1, 9}},
		"nine leave one": {[]float64{1, 2, 3, 4, 5, 6, 7, 8, 100}, Summary{9, 5, 2, 8}},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := Summarise(c.values)
			if !ok || got != c.want {
				t.Errorf("Summarise(%v) = %+v, %v, want %+v", c.values, got, ok, c.want)
			}
		})
	}
	if _, ok := Summarise(nil); ok {
		t.Error("nothing has a summary")
	}
}

func TestSummariseLeavesItsInputAlone(t *testing.T) {
	values := []float64{3, 1, 2}
	Summarise(values)
	if diff := cmp.Diff([]float64{3, 1, 2}, values); diff != "" {
		t.Error(diff)
	}
}

func TestQuantile(t *testing.T) {
	values := []float64{3, 1, 2, 2, 4}
	for q, want := range map[float64]float64{0: 1, 0.2: 1, 0.5: 2, 0.6: 2, 0.61: 3, 0.99: 4, 1: 4} {
		if got := Quantile(values, q); got != want {
			t.Errorf("quantile %g = %g, want %g", q, got, want)
		}
	}
	if values[0] != 3 || Quantile(nil, 0.5) != 0 {
		t.Error("the values were moved, or nothing has a quantile")
	}
}

// Every workload has a name of its own, and metrics with units.
func TestTableOfWorkloads(t *testing.T) {
	seen := map[string]bool{}
	for _, w := range Workloads() {
		if seen[w.Name] || len(w.Metrics) == 0 || w.Kind == "" {
			t.Errorf("%+v", w)
		}
		seen[w.Name] = true
		for _, m := range w.Metrics {
			if m.Unit == "" || m.Scale <= 0 || m.Title == "" {
				t.Errorf("%s: %+v", w.Name, m)
			}
		}
	}
}
