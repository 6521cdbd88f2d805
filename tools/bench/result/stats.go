package result

import (
	"fmt"
	"math"
	"slices"
)

// confidence is how sure the spread is to hold the true median. Five rounds can say no more than 1 - 2/2^5.
const confidence = 0.93

// Summary is the median of some values and their spread.
//
// The spread is the narrowest interval between a lowest and a highest rank that holds the true median with at least 93 %
// confidence, whatever the distribution is (order statistics). Up to eight values that is from the lowest to the highest one; with fewer
// than five it is sure to less than 93 %: three rounds, 75 %.
type Summary struct {
	N                 int
	Median, Low, High float64
}

// Summarise summarises values in any order. ok is false when there are none.
func Summarise(values []float64) (s Summary, ok bool) {
	if len(values) == 0 {
		return Summary{}, false
	}
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	left := spreadRank(n)
	return Summary{N: n, Median: median(sorted), Low: sorted[left], High: sorted[n-1-left]}, true
}

func median(sorted []float64) float64 {
	n := len(sorted)
	if n%2 == 1 {
		return sorted[n/2]
	}
	return (sorted[n/2-1] + sorted[n/2]) / 2
}

// spreadRank is how many values may be left out at either end. The interval from rank k to n-1-k misses the median when
// at most k of n fair coins show heads, or at most k tails.
func spreadRank(n int) int {
	outside, k := 0.0, 0
	for ; 2*k < n-1; k++ {
		outside += 2 * binomial(n, k) / math.Pow(2, float64(n))
		if 1-outside < confidence {
			break
		}
	}
	return max(k-1, 0)
}

func binomial(n, k int) float64 {
	product := 1.0
	for i := range k {
		product *= float64(n-i) / float64(i+1)
	}
	return product
}

// Same says that the spread of a ratio holds 1.0: the two that were compared cannot be told apart.
func (s Summary) Same() bool { return s.Low <= 1 && s.High >= 1 }

// Verdict prints a ratio, or that it is none.
func (s Summary) Verdict() string {
	if s.Same() {
		return "no difference"
	}
	return fmt.Sprintf("%.2f x", s.Median)
}

// Quantile is a value that the share q of all durations did not exceed.
func (d Distribution) Quantile(q float64) float64 {
	var total, seen uint64
	for _, step := range d {
		total += step.Count
	}
	rank := max(uint64(math.Ceil(q*float64(total))), 1)
	for _, step := range d {
		if seen += step.Count; seen >= rank {
			return step.Seconds
		}
	}
	return 0
}

// Total is how many durations there are.
func (d Distribution) Total() (n uint64) {
	for _, step := range d {
		n += step.Count
	}
	return n
}

// Merge takes distributions together.
func Merge(all ...Distribution) Distribution {
	counts := map[float64]uint64{}
	for _, d := range all {
		for _, step := range d {
			counts[step.Seconds] += step.Count
		}
	}
	var merged Distribution
	for s, n := range counts {
		merged = append(merged, Step{s, n})
	}
	slices.SortFunc(merged, func(a, b Step) int {
		if a.Seconds < b.Seconds {
			return -1
		}
		return 1
	})
	return merged
}

// Each is the distribution of single durations in seconds.
func Each(seconds []float64) Distribution {
	var d Distribution
	for _, s := range seconds {
		d = append(d, Step{s, 1})
	}
	return Merge(d)
}
