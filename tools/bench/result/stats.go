package result

import (
	"math"
	"slices"

	"golang.org/x/perf/benchmath"
)

// confidence is how sure the spread is to hold the true median. Five rounds can say no more than 1 - 2/2^5.
const confidence = 0.93

// Summary is the median of some values and its spread: the interval between two of the values that holds the true median with at least 93 %
// confidence, whatever the distribution is. Of fewer than five values it is from the lowest to the highest, and less sure: of three, to 75 %.
type Summary struct {
	N                 int
	Median, Low, High float64
}

// Summarise summarises values in any order. ok is false when there are none.
func Summarise(values []float64) (s Summary, ok bool) {
	n := len(values)
	if n == 0 {
		return Summary{}, false
	}
	sample := benchmath.NewSample(slices.Clone(values), &benchmath.DefaultThresholds)
	b := benchmath.AssumeNothing.Summary(sample, confidence)
	return Summary{n, b.Center, max(b.Lo, sample.Values[0]), min(b.Hi, sample.Values[n-1])}, true //nolint:misspell // its name there
}

// In is the summary in a metric's unit.
func (s Summary) In(m Metric) Summary {
	return Summary{N: s.N, Median: s.Median / m.Scale, Low: s.Low / m.Scale, High: s.High / m.Scale}
}

// Same says that the spread of a ratio holds 1.0: the two that were compared cannot be told apart.
func (s Summary) Same() bool { return s.Low <= 1 && s.High >= 1 }

// Row is one thing that was measured in several modes: a workload's metric, between two places, at one point of a sweep.
type Row struct {
	Workload, Path, Metric string
	Point                  int
}

// Of is the row's metric.
func (r Row) Of() Metric {
	w, _ := Find(r.Workload)
	m, _ := w.Metric(r.Metric)
	return m
}

// Samples are a mode's samples of a row, refused ones too.
func (r *Run) samples(row Row, mode string) (all []Sample) {
	for _, s := range r.Samples {
		if s.Mode == mode && s.Workload == row.Workload && s.Path == row.Path && s.Point == row.Point {
			all = append(all, s)
		}
	}
	return all
}

// Values are what a mode's samples say of a row, by round.
func (r *Run) Values(row Row, mode string) map[int]float64 {
	values := map[int]float64{}
	for _, s := range r.samples(row, mode) {
		if v, ok := s.Values[row.Metric]; ok && s.Error == "" {
			values[s.Round] = v
		}
	}
	return values
}

// Pairs divides values by others, round by round: pair by pair, each the two samples of one round, which were taken next to each other. What slows the
// machine for longer than that slows both. Rounds that one of them lacks don't count.
func Pairs(values, base map[int]float64) (ratios []float64) {
	for round, v := range values {
		if b := base[round]; b > 0 {
			ratios = append(ratios, v/b)
		}
	}
	return ratios
}

// Refused is how many samples of a row have no values, and the reason of the last.
func (r *Run) Refused(row Row, mode string) (count int, reason string) {
	for _, s := range r.samples(row, mode) {
		if s.Error != "" {
			count++
			reason = s.Error
		}
	}
	return count, reason
}

// Tail is the 99th percentile of durations that were taken together.
type Tail struct {
	// N is how many durations there are.
	N       int
	Seconds float64
	// Slowest says that they are fewer than a hundred, and that this is the longest one.
	Slowest bool
}

// Tail is the percentile that a metric of durations asks for, over all rounds: the median of rounds' percentiles is another
// number, and a smaller one. ok is false for other metrics, and where there is no duration.
func (r *Run) Tail(row Row, mode string) (t Tail, ok bool) {
	var all []float64
	for _, s := range r.samples(row, mode) {
		if s.Error == "" {
			all = append(all, s.Durations[row.Of().Of]...)
		}
	}
	t = Tail{N: len(all), Seconds: Quantile(all, 0.99)}
	if t.N < 100 {
		t.Slowest, t.Seconds = true, Quantile(all, 1)
	}
	return t, t.N > 0
}

// Delays is a sample of durations that are all of one kind, in seconds.
func Delays(seconds []float64) Sample {
	return Sample{Values: map[string]float64{P50: Quantile(seconds, 0.5)}, Durations: map[string][]float64{"delay": seconds}}
}

// Quantile is a value that the share q of all does not exceed; 0 when there are none.
func Quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return 0
	}
	rank := int(math.Ceil(q*float64(len(values)) - 1e-9))
	return slices.Sorted(slices.Values(values))[max(rank, 1)-1]
}
