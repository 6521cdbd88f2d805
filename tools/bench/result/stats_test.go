package result

import (
	"math"
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
		"eight keep all": {[]float64{1, 2, 3, 4, 5, 6, 7, 8}, Summary{8, 4.5, 1, 8}},
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

func TestRankProbability(t *testing.T) {
	for name, c := range map[string]struct {
		before, after []float64
		want          float64
	}{
		"3 above 3":      {[]float64{1, 2, 3}, []float64{4, 5, 6}, 1.0 / 20},
		"5 above 5":      {[]float64{1, 2, 3, 4, 5}, []float64{6, 7, 8, 9, 10}, 1.0 / 252},
		"5 below 5":      {[]float64{6, 7, 8, 9, 10}, []float64{1, 2, 3, 4, 5}, 1},
		"one crosses":    {[]float64{1, 2, 4}, []float64{3, 5, 6}, 2.0 / 20},
		"equal is noise": {[]float64{1, 1, 1}, []float64{1, 1, 1}, 0.65},
	} {
		t.Run(name, func(t *testing.T) {
			got := RankProbability(c.before, c.after)
			if math.Abs(got-c.want) > 1e-3 {
				t.Errorf("got %.4f, want %.4f", got, c.want)
			}
		})
	}
}

// The interval between the spread's ranks must hold the median as often as it says.
func TestSpreadRank(t *testing.T) {
	for n := 1; n <= 40; n++ {
		k := spreadRank(n)
		outside := 0.0
		for i := 0; i <= k; i++ {
			outside += 2 * binomial(n, i) / math.Pow(2, float64(n))
		}
		if n >= 5 && 1-outside < confidence && k > 0 {
			t.Errorf("of %d values %d are left out, which holds the median only with %.3f", n, k, 1-outside)
		}
		if more := outside + 2*binomial(n, k+1)/math.Pow(2, float64(n)); n >= 9 && 1-more >= confidence {
			t.Errorf("of %d values one more than %d could be left out", n, k)
		}
	}
}

func TestDistribution(t *testing.T) {
	d := Merge(Each([]float64{3, 1, 2}), Each([]float64{2, 4}))
	if diff := cmp.Diff(Distribution{{1, 1}, {2, 2}, {3, 1}, {4, 1}}, d); diff != "" {
		t.Error(diff)
	}
	for q, want := range map[float64]float64{0: 1, 0.2: 1, 0.5: 2, 0.6: 2, 0.61: 3, 0.99: 4, 1: 4} {
		if got := d.Quantile(q); got != want {
			t.Errorf("quantile %g = %g, want %g", q, got, want)
		}
	}
}
