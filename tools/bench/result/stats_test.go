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

// The expected values are those of printed tables.
func TestStudentAbove(t *testing.T) {
	for _, c := range []struct{ t, freedom, want float64 }{
		{0, 5, 0.5}, {2.776, 4, 0.025}, {3.355, 8, 0.005}, {4.501, 8, 0.001}, {1.860, 8, 0.05}, {-1.860, 8, 0.95},
		{6.314, 1, 0.05}, {1.645, 1e6, 0.05}, {12.71, 1, 0.025},
	} {
		if got := studentAbove(c.t, c.freedom); math.Abs(got-c.want) > 0.002*c.want {
			t.Errorf("above %g with %g degrees of freedom: %.5f, want %.5f", c.t, c.freedom, got, c.want)
		}
	}
}

func TestWelch(t *testing.T) {
	for name, c := range map[string]struct {
		before, after []float64
		low, high     float64
	}{
		// Means 3 and 13, standard errors of 0.5^0.5 each: t = 10 with 8 degrees of freedom.
		"far above":            {[]float64{1, 2, 3, 4, 5}, []float64{11, 12, 13, 14, 15}, 1e-6, 1e-5},
		"far below":            {[]float64{11, 12, 13, 14, 15}, []float64{1, 2, 3, 4, 5}, 0.99999, 1},
		"nothing":              {[]float64{1, 2, 3}, []float64{3, 1, 2}, 0.5, 0.5},
		"no spread, no change": {[]float64{1, 1}, []float64{1, 1}, 0.5, 0.5},
		"no spread, a change":  {[]float64{1, 1}, []float64{2, 2}, 0, 0},
		"one value":            {[]float64{1}, []float64{5, 5}, 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Welch(c.before, c.after); got < c.low-1e-9 || got > c.high+1e-9 {
				t.Errorf("got %g, want %g to %g", got, c.low, c.high)
			}
		})
	}
}

func TestHolm(t *testing.T) {
	// 0.05/4 = 0.0125, 0.05/3 = 0.0167, 0.05/2 = 0.025: the third one fails, and with it the fourth, small as it is on its own.
	got := Holm([]float64{0.03, 0.01, 0.04, 0.015}, 0.05)
	if diff := cmp.Diff([]bool{false, true, false, true}, got); diff != "" {
		t.Error(diff)
	}
	if got := Holm(nil, 0.05); len(got) != 0 {
		t.Error(got)
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
