package report

import (
	"fmt"
	"math"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// distribution draws which share of all durations was over within which time.
func distribution(run *result.Run, workload, path, name, title string) *plot.Plot {
	p := newPlot(title, "share of all, %")
	all := map[string]result.Distribution{}
	low, high := math.Inf(1), 0.0
	for _, m := range run.Modes {
		if d := run.Distribution(workload, path, m.Name, name); d.Quantile(1) > 0 {
			all[m.Name] = d
			low, high = min(low, d[0].Seconds), max(high, d.Quantile(shown))
		}
	}
	if len(all) == 0 || low <= 0 {
		return nil
	}
	unit, scale := "µs", 1e-6
	if low >= 1e-3 {
		unit, scale = "ms", 1e-3
	}
	for _, m := range run.Modes {
		if len(all[m.Name]) == 0 {
			continue
		}
		line, err := plotter.NewLine(cumulative(all[m.Name], scale))
		if err != nil {
			return nil
		}
		line.Color, line.Width = colour(m.Name), vg.Points(2)
		line.StepStyle = plotter.PostStep
		p.Add(line)
		p.Legend.Add(m.Name, line)
	}
	p.X.Label.Text = unit + ", logarithmic (further left is better)"
	p.X.Scale = plot.LogScale{}
	p.X.Tick.Marker = decades{}
	// From one tick to another, so that there are two at least.
	p.X.Min, p.X.Max = below(low/scale), 1/below(scale/high)
	p.Y.Min, p.Y.Max = 0, 100
	p.Legend.Top, p.Legend.Left = false, false
	return p
}

// steps is how many steps a line has at most: more than can be seen, and a plot stays small.
const steps = 400

// shown is the share of all durations that a line shows: the tail of the last thousandth would be most of the axis.
const shown = 0.999

// cumulative is the share of durations up to each, in percent.
func cumulative(d result.Distribution, scale float64) (xys plotter.XYs) {
	total, seen, drawn, end := float64(d.Total()), uint64(0), 0.0, d.Quantile(shown)
	for _, step := range d {
		seen += step.Count
		share := float64(seen) / total
		if step.Seconds > end || share-drawn < 1.0/steps && step.Seconds < end {
			continue
		}
		drawn = share
		xys = append(xys, plotter.XY{X: step.Seconds / scale, Y: 100 * share})
	}
	return xys
}

// below is the largest of 1, 2 and 5 times a power of ten that is not above v. The reciprocals of such numbers are such numbers.
func below(v float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(v)))
	for _, factor := range []float64{5, 2} {
		if power*factor <= v*(1+1e-9) {
			return power * factor
		}
	}
	return power
}

// decades are ticks at 1, 2 and 5 times the powers of ten.
type decades struct{}

// Ticks implements plot.Ticker.
func (decades) Ticks(low, high float64) (ticks []plot.Tick) {
	for power := math.Pow(10, math.Floor(math.Log10(low))); power <= high*(1+1e-9); power *= 10 {
		for _, factor := range []float64{1, 2, 5} {
			if v := power * factor; v >= low*(1-1e-9) && v <= high*(1+1e-9) {
				ticks = append(ticks, plot.Tick{Value: v, Label: fmt.Sprintf("%.0f", v)})
			}
		}
	}
	return ticks
}
