package report

import (
	"fmt"
	"math"
	"os"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// Figure is a plot that was written.
type Figure struct {
	Name, Title string
	workload    string
}

// Figures draws all that a run has values for into a directory, as SVG, and with png as PNG too.
func Figures(run *result.Run, dir string, png bool) ([]Figure, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make a directory for plots: %w", err)
	}
	var figures []Figure
	for _, d := range drawings(run) {
		if d.plot == nil {
			continue
		}
		if err := save(d.plot, dir, d.Name, png); err != nil {
			return nil, err
		}
		figures = append(figures, d.Figure)
	}
	return figures, nil
}

// drawing is a figure and its plot, which is nil where the run has no values.
type drawing struct {
	Figure
	plot *plot.Plot
}

func drawings(run *result.Run) (all []drawing) {
	for _, w := range result.Catalog() {
		switch {
		case w.Axis != "":
			all = append(all, drawing{Figure{"sweep-" + w.Name, w.Title, w.Name}, lines(run, w)})
			continue
		case w.Name == "agent" || w.Name == "change" || w.Name == "bpf":
			continue
		}
		for _, path := range append(result.Paths(), "") {
			title := join(w.Title, path)
			all = append(all, drawing{Figure{slug(w.Name, path), title, w.Name}, barsOf(run, w, path, title)})
			for _, name := range []string{"rtt", "add", "del"} {
				about := map[string]string{"rtt": "latency", "add": "ADD", "del": "DEL"}[name]
				figure := Figure{slug(w.Name, path, name), title + ": " + about, w.Name}
				all = append(all, drawing{figure, distribution(run, w.Name, path, name, figure.Title)})
			}
		}
	}
	return all
}

func barsOf(run *result.Run, w result.Workload, path, title string) *plot.Plot {
	metric := w.Metrics[0]
	var b bars
	for _, m := range run.Modes {
		s, ok := run.Summary(result.Row{Workload: w.Name, Path: path, Metric: metric.Name}, m.Name)
		if ok {
			b.modes, b.values = append(b.modes, m.Name), append(b.values, scaled(s, metric))
		}
	}
	if len(b.modes) == 0 {
		return nil
	}
	better := "more is better"
	if metric.Lower {
		better = "less is better"
	}
	p := newPlot(title, fmt.Sprintf("%s, %s (%s)", metric.Title, metric.Unit, better))
	p.Add(b)
	p.NominalX(b.modes...)
	p.Y.Min = 0
	return p
}

// lines draws a sweep: cost by mode over the axis, whose points stand side by side at equal distances.
func lines(run *result.Run, w result.Workload) *plot.Plot {
	points := Points(run, w.Name)
	metric := w.Metrics[0]
	p := newPlot(fmt.Sprintf("%s by %s", metric.Title, w.Title), metric.Unit+" (less is better)")
	drawn, top := false, 0.0
	for _, m := range run.Modes {
		for _, path := range result.Paths() {
			xys, spreads := series(run, result.Row{Workload: w.Name, Path: path, Metric: metric.Name}, m.Name, points)
			if len(xys) == 0 {
				continue
			}
			line, err := plotter.NewLine(xys)
			if err != nil {
				return nil
			}
			line.Color, line.Width = colour(m.Name), vg.Points(2)
			p.Add(line, band{xys: xys, spreads: spreads, mode: m.Name})
			p.Legend.Add(m.Name+", "+path, line)
			drawn = true
			for _, s := range spreads {
				top = max(top, s.High)
			}
		}
	}
	if !drawn {
		return nil
	}
	p.X.Label.Text = w.Axis
	names := make([]string, 0, len(points))
	for _, point := range points {
		names = append(names, fmt.Sprint(point))
	}
	p.NominalX(names...)
	p.X.Min, p.X.Max = -0.3, float64(len(points))-0.7
	p.Y.Min, p.Y.Max = 0, top*1.35 // the legend's place
	return p
}

func series(run *result.Run, row result.Row, mode string, points []int) (xys plotter.XYs, spreads []result.Summary) {
	for i, point := range points {
		row.Point = point
		if s, ok := run.Summary(row, mode); ok {
			s = scaled(s, metricOf(row))
			xys = append(xys, plotter.XY{X: float64(i), Y: s.Median})
			spreads = append(spreads, s)
		}
	}
	return xys, spreads
}

// band marks each point of a line, and its spread.
type band struct {
	xys     plotter.XYs
	spreads []result.Summary
	mode    string
}

// Plot implements plot.Plotter.
func (b band) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	for i, xy := range b.xys {
		whisker(c, x(xy.X), y(b.spreads[i].Low), y(b.spreads[i].High))
		c.DrawGlyph(draw.GlyphStyle{Color: colour(b.mode), Radius: vg.Points(3), Shape: draw.CircleGlyph{}}, vg.Point{X: x(xy.X), Y: y(xy.Y)})
	}
}

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

// cumulative is the share of durations up to each, in percent by microseconds, without the last thousandth: its tail would be most of the
// axis.
func cumulative(d result.Distribution) (xys plotter.XYs) {
	total, seen, end := d.Total(), uint64(0), d.Quantile(0.999)
	for _, step := range d {
		seen += step.Count
		if step.Seconds > 0 && step.Seconds <= end {
			xys = append(xys, plotter.XY{X: step.Seconds * 1e6, Y: 100 * float64(seen) / float64(total)})
		}
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

// Points are those of a sweep, in ascending order.
func Points(run *result.Run, workload string) (points []int) {
	for _, s := range run.Samples {
		if s.Workload == workload && !slices.Contains(points, s.Point) {
			points = append(points, s.Point)
		}
	}
	slices.Sort(points)
	return points
}

func join(title, path string) string {
	if path == "" {
		return title
	}
	return title + ", " + path
}

func slug(parts ...string) string {
	var filled []string
	for _, part := range parts {
		if part != "" {
			filled = append(filled, strings.ReplaceAll(part, " ", "-"))
		}
	}
	return strings.Join(filled, "-")
}
