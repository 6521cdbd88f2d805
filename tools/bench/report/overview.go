package report

import (
	"fmt"
	"image/color"
	"math"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// overview is the figure of all budgets that are ratios.
const overview = "budgets"

// dot is a ratio and what was asked of it, on the line of its row.
type dot struct {
	line  int
	ratio result.Summary
	bound float64
	mode  string // whose colour it has: ours over a classical network, or the limit's
}

// ratios draws each ratio with its spread, and a bar where the budget wants it.
func ratios(run *result.Run) *plot.Plot {
	var all dots
	var titles []string
	for _, b := range budgets() {
		s, ok := run.Ratio(b.row, b.mode, b.base)
		if b.base == "" || !ok {
			continue
		}
		title := b.title()
		if metricOf(b.row).Lower {
			title += " (less is better)"
		}
		line := slices.Index(titles, title)
		if line < 0 {
			line, titles = len(titles), append(titles, title)
		}
		mode := b.mode
		if b.base == "direct" {
			mode = b.base
		}
		all = append(all, dot{line, s, b.bound, mode})
	}
	if len(all) == 0 {
		return nil
	}
	for i := range all { // the first row on top
		all[i].line = len(titles) - 1 - all[i].line
	}
	slices.Reverse(titles)
	p := newPlot("Budgets: this network over another", "")
	p.X.Label.Text = "ratio, with its spread"
	p.Add(all)
	p.NominalY(titles...)
	p.Y.Min, p.Y.Max = -0.6, float64(len(titles))+1.4 // the legend's place
	p.X.Tick.Marker = halves{}
	all.legend(p)
	return p
}

type dots []dot

func (d dots) legend(p *plot.Plot) {
	p.Legend.Add("over the classical network", dotted(colour("ebpf")))
	if slices.ContainsFunc(d, func(one dot) bool { return one.mode == "direct" }) {
		p.Legend.Add("over the machine's limit", dotted(colour("direct")))
	}
	line := &plotter.Line{LineStyle: asked()}
	p.Legend.Add("asked", line)
}

func dotted(c color.Color) *plotter.Scatter {
	return &plotter.Scatter{GlyphStyle: draw.GlyphStyle{Color: c, Radius: vg.Points(4), Shape: draw.CircleGlyph{}}}
}

func asked() draw.LineStyle { return draw.LineStyle{Color: color.Black, Width: vg.Points(2.5)} }

// Plot implements plot.Plotter.
func (d dots) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	c.StrokeLine2(draw.LineStyle{Color: color.Gray{Y: 0x99}, Width: vg.Points(1), Dashes: []vg.Length{4, 3}}, x(1), c.Min.Y, x(1), c.Max.Y)
	for _, one := range d {
		at := y(float64(one.line))
		c.StrokeLine2(asked(), x(one.bound), at-vg.Points(6), x(one.bound), at+vg.Points(6))
		spread := draw.LineStyle{Color: colour(one.mode), Width: vg.Points(2)}
		c.StrokeLine2(spread, x(one.ratio.Low), at, x(one.ratio.High), at)
		c.DrawGlyph(draw.GlyphStyle{Color: colour(one.mode), Radius: vg.Points(4), Shape: draw.CircleGlyph{}}, vg.Point{X: x(one.ratio.Median), Y: at})
	}
}

// halves are ticks at every half.
type halves struct{}

// Ticks implements plot.Ticker.
func (halves) Ticks(low, high float64) (ticks []plot.Tick) {
	for v := math.Ceil(2*low) / 2; v <= high; v += 0.5 {
		ticks = append(ticks, plot.Tick{Value: v, Label: fmt.Sprint(v)})
	}
	return ticks
}

// DataRange implements plot.DataRanger.
func (d dots) DataRange() (xmin, xmax, ymin, ymax float64) {
	for _, one := range d {
		xmax = max(xmax, one.ratio.High, one.bound)
		ymax = max(ymax, float64(one.line))
	}
	return 0, math.Max(xmax*1.1, 1), 0, ymax
}
