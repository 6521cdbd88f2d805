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
	drawn := false
	low, high := math.Inf(1), 0.0
	for _, m := range run.Modes {
		xys := cumulative(run.Distribution(workload, path, m.Name, name))
		if len(xys) == 0 {
			continue
		}
		line, err := plotter.NewLine(xys)
		if err != nil {
			return nil
		}
		low, high = min(low, xys[0].X), max(high, xys[len(xys)-1].X)
		line.Color, line.Width = colour(m.Name), vg.Points(2)
		line.StepStyle = plotter.PostStep
		p.Add(line)
		p.Legend.Add(m.Name, line)
		drawn = true
	}
	if !drawn {
		return nil
	}
	p.X.Label.Text = "µs, logarithmic (further left is better)"
	p.X.Scale = plot.LogScale{}
	p.X.Tick.Marker = decades{}
	// From one tick to another, so that there are two at least.
	p.X.Min, p.X.Max = below(low), 1/below(1/high)
	p.Y.Min, p.Y.Max = 0, 100
	p.Legend.Top, p.Legend.Left = false, false
	return p
}

// steps is how many steps a line has at most: more than can be seen, and a plot stays small.
const steps = 400

// cumulative is the share of durations up to each, in percent by microseconds, without the last thousandth: its tail would be most of the
// axis.
func cumulative(d result.Distribution) (xys plotter.XYs) {
	total, seen, drawn, end := float64(d.Total()), uint64(0), 0.0, d.Quantile(0.999)
	for _, step := range d {
		seen += step.Count
		share := float64(seen) / total
		if step.Seconds <= 0 || step.Seconds > end || share-drawn < 1.0/steps && step.Seconds < end {
			continue
		}
		drawn = share
		xys = append(xys, plotter.XY{X: step.Seconds * 1e6, Y: 100 * share})
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
