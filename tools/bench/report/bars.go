package report

import (
	"fmt"
	"image/color"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// bars are bars side by side, each with its spread drawn on it and its value above.
type bars struct {
	labels, modes []string
	values        []result.Summary // in the unit of the axis
	// bound is a line that the first bar should stay below; none where it is 0.
	bound float64
}

// add adds a bar, if the run has the row in that mode.
func (b *bars) add(run *result.Run, row result.Row, mode, label string) {
	if s, ok := run.Summary(row, mode); ok {
		b.labels, b.modes = append(b.labels, label), append(b.modes, mode)
		b.values = append(b.values, scaled(s, metricOf(row)))
	}
}

// plot is nil when there is no bar.
func (b bars) plot(title string, metric result.Metric) *plot.Plot {
	if len(b.values) == 0 {
		return nil
	}
	better := "more is better"
	if metric.Lower {
		better = "less is better"
	}
	what := metric.Title + ", "
	if b.labels[0] == metric.Title {
		what = "" // each bar says what it is
	}
	p := newPlot(title, fmt.Sprintf("%s%s (%s)", what, metric.Unit, better))
	p.Add(b)
	p.NominalX(b.labels...)
	p.Y.Min = 0
	return p
}

// Plot implements plot.Plotter.
func (b bars) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	half := min(0.35, 0.06*float64(len(b.values)+1))
	style := p.X.Tick.Label
	style.XAlign, style.YAlign = draw.XCenter, draw.YBottom
	for i, s := range b.values {
		left, right := x(float64(i)-half), x(float64(i)+half)
		c.FillPolygon(colour(b.modes[i]), []vg.Point{{X: left, Y: y(0)}, {X: left, Y: y(s.Median)}, {X: right, Y: y(s.Median)}, {X: right, Y: y(0)}})
		whisker(c, x(float64(i)), y(s.Low), y(s.High))
		c.FillText(style, vg.Point{X: x(float64(i)), Y: y(s.High) + vg.Points(3)}, number(s.Median))
	}
	if b.bound > 0 {
		c.StrokeLine2(draw.LineStyle{Color: color.Black, Width: vg.Points(1), Dashes: []vg.Length{4, 3}}, c.Min.X, y(b.bound), x(0.45), y(b.bound))
		style.XAlign = draw.XLeft
		c.FillText(style, vg.Point{X: c.Min.X + vg.Points(4), Y: y(b.bound) + vg.Points(3)}, fmt.Sprintf("asked: at most %g", b.bound))
	}
}

// DataRange implements plot.DataRanger.
func (b bars) DataRange() (xmin, xmax, ymin, ymax float64) {
	ymax = b.bound
	for _, s := range b.values {
		ymax = max(ymax, s.High)
	}
	return -0.6, float64(len(b.values)) - 0.4, 0, ymax * 1.1
}
