package result

// Row is one thing that was measured in several modes: a workload's metric, between two places, at one point of a sweep.
type Row struct {
	Workload, Path, Metric string
	Point                  int
}

// Values are what a mode's samples say of a row, by round.
func (r *Run) Values(row Row, mode string) map[int]float64 {
	values := map[int]float64{}
	for _, s := range r.Samples {
		if s.Error != "" || s.Mode != mode || s.Workload != row.Workload || s.Path != row.Path || s.Point != row.Point {
			continue
		}
		if v, ok := s.Values[row.Metric]; ok {
			values[s.Round] = v
		}
	}
	return values
}

// Summary summarises a row in one mode. ok is false when no sample of it is there.
func (r *Run) Summary(row Row, mode string) (s Summary, ok bool) {
	values := r.Values(row, mode)
	list := make([]float64, 0, len(values))
	for _, v := range values {
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
		if b, ok := base[round]; ok && b > 0 {
			ratios = append(ratios, v/b)
		}
	}
	return ratios
}

// Distribution takes the durations of that name in all rounds together.
func (r *Run) Distribution(workload, path, mode, name string) Distribution {
	var all []Distribution
	for _, s := range r.Samples {
		if s.Workload == workload && s.Path == path && s.Mode == mode && s.Error == "" {
			all = append(all, s.Distributions[name])
		}
	}
	return Merge(all...)
}

// Tail is a quantile of durations that were taken together.
type Tail struct {
	// N is how many durations there are.
	N       uint64
	Seconds float64
	// Slowest says that they are too few for the quantile, and that this is the longest one.
	Slowest bool
}

// Tail is the quantile that a metric of a distribution asks for, over all rounds: the median of rounds' quantiles is another
// number, and a smaller one. ok is false for other metrics, and where there is no duration.
func (r *Run) Tail(row Row, mode string) (t Tail, ok bool) {
	workload, _ := Find(row.Workload)
	metric, _ := workload.Metric(row.Metric)
	if metric.Of == "" {
		return Tail{}, false
	}
	all := r.Distribution(row.Workload, row.Path, mode, metric.Of)
	t = Tail{N: all.Total(), Seconds: all.Quantile(metric.Quantile)}
	// A hundredth of fewer than a hundred is less than one.
	if float64(t.N)*(1-metric.Quantile) < 1-1e-9 {
		t.Slowest, t.Seconds = true, all.Quantile(1)
	}
	return t, t.N > 0
}

// Refused are the samples without values: of them, the reason of the last, by mode.
func (r *Run) Refused(row Row, mode string) (count int, reason string) {
	for _, s := range r.Samples {
		if s.Error != "" && s.Mode == mode && s.Workload == row.Workload && s.Path == row.Path && s.Point == row.Point {
			count++
			reason = s.Error
		}
	}
	return count, reason
}
