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

// Summary summarises a row in one mode. ok is false when no sample of it is there.
func (r *Run) Summary(row Row, mode string) (s Summary, ok bool) {
	var list []float64
	for _, v := range r.Values(row, mode) {
		list = append(list, v)
	}
	return Summarise(list)
}

// Ratio divides a row in one mode by the same row in another: pair by pair, each the two samples of one round, which were
// taken next to each other. What slows the machine for longer than that slows both.
func (r *Run) Ratio(row Row, mode, base string) (s Summary, ok bool) {
	return Summarise(Pairs(r.Values(row, mode), r.Values(row, base)))
}

// PointRatio divides a row in one mode at one point of a sweep by the same mode at another, round by round.
func (r *Run) PointRatio(row Row, mode string, base int) (s Summary, ok bool) {
	other := row
	other.Point = base
	return Summarise(Pairs(r.Values(row, mode), r.Values(other, mode)))
}

// Pairs are the ratios of the rounds that both have.
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

// Tail is the percentile that a metric of a distribution asks for, over all rounds: the median of rounds' percentiles is another
// number, and a smaller one. ok is false for other metrics, and where there is no duration.
func (r *Run) Tail(row Row, mode string) (t Tail, ok bool) {
	of := row.Of().Of
	if of == "" {
		return Tail{}, false
	}
	var all []Step
	for _, s := range r.samples(row, mode) {
		if s.Error == "" {
			all = append(all, s.Distributions[of]...)
		}
	}
	d := Merge(all)
	t = Tail{N: d.Total(), Seconds: d.Quantile(0.99)}
	if t.N < 100 {
		t.Slowest, t.Seconds = true, d.Quantile(1)
	}
	return t, t.N > 0
}

// Distribution is a list of durations in ascending order, equal ones taken together.
type Distribution []Step

// Step is so many durations, in seconds.
type Step struct {
	Seconds float64 `json:"s"`
	Count   int     `json:"n"`
}

// Durations is the distribution of single durations in seconds, to three digits.
func Durations(seconds []float64) Distribution {
	steps := make([]Step, len(seconds))
	for i, s := range seconds {
		digits := math.Pow(10, math.Floor(math.Log10(max(s, 1e-9)))-2)
		steps[i] = Step{math.Round(s/digits) * digits, 1}
	}
	return Merge(steps)
}

// Delays is a sample of durations that are all of one kind.
func Delays(seconds []float64) Sample {
	d := Durations(seconds)
	return Sample{Values: map[string]float64{P50: d.Quantile(0.5)}, Distributions: map[string]Distribution{"delay": d}}
}

// Merge sorts steps, and takes equal ones together.
func Merge(steps []Step) (merged Distribution) {
	slices.SortFunc(steps, func(a, b Step) int {
		if a.Seconds < b.Seconds {
			return -1
		}
		return 1
	})
	for _, s := range steps {
		if last := len(merged) - 1; last >= 0 && merged[last].Seconds == s.Seconds {
			merged[last].Count += s.Count
		} else {
			merged = append(merged, s)
		}
	}
	return merged
}

// Quantile is a duration that the share q of all did not exceed; 0 when there are none.
func (d Distribution) Quantile(q float64) float64 {
	rank, seen := max(int(math.Ceil(q*float64(d.Total())-1e-9)), 1), 0
	for _, step := range d {
		if seen += step.Count; seen >= rank {
			return step.Seconds
		}
	}
	return 0
}

// Total is how many durations there are.
func (d Distribution) Total() (n int) {
	for _, step := range d {
		n += step.Count
	}
	return n
}
