package report

import (
	"bytes"
	"fmt"
	"image/color"
	"os"
	"path/filepath"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// figure is a plot of a run: what it is called, and what it shows.
type figure struct {
	name, title string
	data        interface {
		plot.Plotter
		plot.DataRanger
		// frame sets the axes up; entries are what the legend says below them.
		frame(*plot.Plot)
		entries() []entry
	}
}

// entry is one of a legend.
type entry struct {
	text   string
	colour color.Color
}

// drawAll writes plots as SVG. What another run has left in the directory is removed: a plot that nothing links to tells of
// nothing.
func drawAll(figures []figure, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make a directory for plots: %w", err)
	}
	old, _ := filepath.Glob(filepath.Join(dir, "*.svg"))
	for _, file := range old {
		if err := os.Remove(file); err != nil {
			return fmt.Errorf("remove the plot of another run: %w", err)
		}
	}
	for _, f := range figures {
		var svg bytes.Buffer
		canvas := vgsvg.New(width, height)
		f.onto(draw.New(canvas))
		if _, err := canvas.WriteTo(&svg); err != nil {
			return fmt.Errorf("draw %s: %w", f.name, err)
		}
		if err := result.Replace(filepath.Join(dir, f.name+".svg"), svg.Bytes()); err != nil {
			return err
		}
	}
	return nil
}

// Sizes in which text stays legible at a page's width. The legend has a strip of its own below the axes.
const (
	width  = 8 * vg.Inch
	height = 4 * vg.Inch
	strip  = vg.Length(24)
)

func (f figure) onto(c draw.Canvas) {
	p := plot.New()
	p.Title.Text = f.title
	p.Title.TextStyle.Font.Size = font.Length(13)
	p.Title.Padding = vg.Points(8)
	p.BackgroundColor = color.White
	for _, style := range []*font.Font{
		&p.Title.TextStyle.Font, &p.X.Label.TextStyle.Font, &p.X.Tick.Label.Font, &p.Y.Label.TextStyle.Font, &p.Y.Tick.Label.Font,
	} {
		style.Variant = "Sans"
	}
	grid := plotter.NewGrid()
	grid.Vertical.Width = 0
	grid.Horizontal.Color = color.Gray{Y: 0xdd}
	p.Add(grid, f.data)
	f.data.frame(p)
	c.SetColor(color.White)
	c.Fill(c.Rectangle.Path())
	p.Draw(draw.Crop(c, vg.Points(4), -vg.Points(12), strip, -vg.Points(4)))
	style := p.X.Tick.Label
	style.XAlign, style.YAlign = draw.XLeft, draw.YBottom
	total := vg.Length(0)
	for _, e := range f.data.entries() {
		total += style.Width(e.text) + vg.Points(32)
	}
	x := c.Min.X + (c.Max.X-c.Min.X-total)/2
	for _, e := range f.data.entries() {
		at := vg.Point{X: x, Y: c.Min.Y + vg.Points(8)}
		c.FillPolygon(e.colour, []vg.Point{at, {X: at.X + 10, Y: at.Y}, {X: at.X + 10, Y: at.Y + 10}, {X: at.X, Y: at.Y + 10}})
		c.FillText(style, vg.Point{X: x + vg.Points(15), Y: at.Y}, e.text)
		x += style.Width(e.text) + vg.Points(32)
	}
}

// colours are the modes': the same in every plot, ours warm, the limit grey, the others cold. They can be told apart without seeing
// red and green.
var colours = map[string]color.Color{
	result.Direct: color.RGBA{0x99, 0x99, 0x99, 0xff}, result.EBPF: color.RGBA{0xd5, 0x5e, 0x00, 0xff}, result.KubeProxy: color.RGBA{0xe6, 0x9f, 0x00, 0xff},
	result.IPTables: color.RGBA{0x00, 0x72, 0xb2, 0xff}, result.PTP: color.RGBA{0x00, 0x9e, 0x73, 0xff}, result.NFTables: color.RGBA{0x33, 0x33, 0x66, 0xff},
}

func legend(modes []string) (entries []entry) {
	for _, mode := range modes {
		entries = append(entries, entry{mode, colours[mode]})
	}
	return entries
}

// plotsOf are the plots of a run, as far as it has values for them.
func plotsOf(run *result.Run) (all []figure) {
	paths := func(name, workload, metric string) {
		w, _ := result.Find(workload)
		b := newBars(result.Row{Workload: workload, Metric: metric}.Of())
		for _, path := range result.Paths() {
			b.group(run, path, result.Row{Workload: workload, Path: path, Metric: metric})
		}
		all = append(all, figure{name, w.Title + ": " + b.metric.Title, b})
	}
	if r := ratios(run); len(r.all) > 0 {
		all = append(all, figure{"budgets", "Budgets: this network over another", r})
	}
	paths("udp", "udp64", result.Rate)
	paths("connections", "crr", result.Rate)
	paths("latency", "rr", result.P99)
	cni := newBars(result.Row{Workload: "cni", Metric: "add-p50"}.Of())
	for _, metric := range []string{"add-p50", "del-p50", "pair-p50"} {
		row := result.Row{Workload: "cni", Metric: metric}
		cni.group(run, row.Of().Title, row)
	}
	cni.metric.Title = "time"
	services := newBars(result.Row{Workload: "services", Metric: result.Cost}.Of())
	for _, point := range pointsOf(run, "services") {
		services.group(run, fmt.Sprintf("%d Services", point), result.Row{Workload: "services", Path: result.AcrossNodes, Metric: result.Cost, Point: point})
	}
	all = append(all, figure{"cni", "CNI, one pod at a time", cni}, figure{"services", "Service rules: time per connection", services})
	return slices.DeleteFunc(all, func(f figure) bool { return len(f.data.entries()) == 0 })
}

// bars are groups of bars, one for each mode, each with its spread drawn on it and its value above.
type bars struct {
	metric result.Metric
	groups []string
	values []map[string]result.Summary // of a group by mode, in the unit of the metric
}

func newBars(m result.Metric) *bars { return &bars{metric: m} }

// group adds a row, if the run has it in any mode.
func (b *bars) group(run *result.Run, title string, row result.Row) {
	values := map[string]result.Summary{}
	for _, mode := range result.Modes() {
		if s, ok := run.Summary(row, mode); ok {
			values[mode] = s.In(row.Of())
		}
	}
	if len(values) > 0 {
		b.groups, b.values = append(b.groups, title), append(b.values, values)
	}
}

func (b *bars) modes() (modes []string) {
	for _, mode := range result.Modes() {
		if slices.ContainsFunc(b.values, func(values map[string]result.Summary) bool { return values[mode].N > 0 }) {
			modes = append(modes, mode)
		}
	}
	return modes
}

func (b *bars) entries() []entry { return legend(b.modes()) }

func (b *bars) frame(p *plot.Plot) {
	better := "more is better"
	if b.metric.Lower {
		better = "less is better"
	}
	p.Y.Label.Text = fmt.Sprintf("%s, %s (%s)", b.metric.Title, b.metric.Unit, better)
	p.NominalX(b.groups...)
	p.Y.Min, p.Y.Tick.Marker = 0, whole{}
}

// whole are the usual ticks, labelled with whole numbers.
type whole struct{ plot.DefaultTicks }

// Ticks implements plot.Ticker.
func (w whole) Ticks(low, high float64) []plot.Tick {
	ticks := w.DefaultTicks.Ticks(low, high)
	for i := range ticks {
		if ticks[i].Label != "" {
			ticks[i].Label = fmt.Sprintf("%.0f", ticks[i].Value)
		}
	}
	return ticks
}

// Plot implements plot.Plotter.
func (b *bars) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	style := p.X.Tick.Label
	style.Font.Size = 8
	style.XAlign, style.YAlign = draw.XCenter, draw.YBottom
	modes := b.modes()
	wide := 0.86 / float64(len(modes))
	for g, values := range b.values {
		for i, mode := range modes {
			s, ok := values[mode]
			if !ok {
				continue
			}
			at := float64(g) + (float64(i)-float64(len(modes)-1)/2)*wide
			left, right := x(at-wide*0.45), x(at+wide*0.45)
			c.FillPolygon(colours[mode], []vg.Point{{X: left, Y: y(0)}, {X: left, Y: y(s.Median)}, {X: right, Y: y(s.Median)}, {X: right, Y: y(0)}})
			whisker(c, x(at), y(s.Low), y(s.High))
			c.FillText(style, vg.Point{X: x(at), Y: y(s.High) + vg.Points(2)}, compact(s.Median))
		}
	}
}

// compact prints a number as narrow as a bar.
func compact(v float64) string {
	if v >= 10000 {
		return fmt.Sprintf("%.0fk", v/1000)
	}
	return number(v)
}

// DataRange implements plot.DataRanger.
func (b *bars) DataRange() (xmin, xmax, ymin, ymax float64) {
	for _, values := range b.values {
		for _, s := range values {
			ymax = max(ymax, s.High)
		}
	}
	return -0.5, float64(len(b.groups)) - 0.5, 0, ymax * 1.08
}

func whisker(c draw.Canvas, x, low, high vg.Length) {
	line := draw.LineStyle{Color: color.Black, Width: vg.Points(0.8)}
	c.StrokeLine2(line, x, low, x, high)
	for _, y := range []vg.Length{low, high} {
		c.StrokeLine2(line, x-vg.Points(3), y, x+vg.Points(3), y)
	}
}

// dots are ratios with their spreads, and a bar where the budget wants each: a line for each row, the first on top.
type dots struct {
	all    []dot
	titles []string
}

type dot struct {
	title string
	ratio result.Summary
	bound float64
	base  string
}

func ratios(run *result.Run) *dots {
	var d dots
	for _, b := range budgets() {
		if s, ok := run.Ratio(b.row, b.mode, b.base); ok && b.base != "" {
			d.add(b, s)
		}
	}
	return &d
}

func (d *dots) add(b budget, s result.Summary) {
	title := b.title()
	if b.row.Of().Lower {
		title += " (less is better)"
	}
	d.all = append(d.all, dot{title, s, b.bound, b.base})
	if !slices.Contains(d.titles, title) {
		d.titles = slices.Insert(d.titles, 0, title)
	}
}

func (d *dots) entries() []entry {
	return []entry{{"over the classical network", colours[result.EBPF]}, {"over the machine's limit", colours[result.Direct]}, {"asked", color.Black}}
}

func (d *dots) frame(p *plot.Plot) {
	p.X.Label.Text = "ratio, with its spread"
	p.NominalY(d.titles...)
	p.X.Tick.Marker = plot.ConstantTicks{{Value: 0, Label: "0"}, {Value: 0.5, Label: "0.5"}, {Value: 1, Label: "1"}, {Value: 1.5, Label: "1.5"}, {Value: 2, Label: "2"}}
}

// Plot implements plot.Plotter.
func (d *dots) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	c.StrokeLine2(draw.LineStyle{Color: color.Gray{Y: 0x99}, Width: vg.Points(1), Dashes: []vg.Length{4, 3}}, x(1), c.Min.Y, x(1), c.Max.Y)
	for _, one := range d.all {
		at, hue := y(float64(slices.Index(d.titles, one.title))), colours[result.EBPF]
		if one.base == result.Direct {
			hue = colours[result.Direct]
		}
		c.StrokeLine2(draw.LineStyle{Color: color.Black, Width: vg.Points(2.5)}, x(one.bound), at-vg.Points(6), x(one.bound), at+vg.Points(6))
		c.StrokeLine2(draw.LineStyle{Color: hue, Width: vg.Points(2)}, x(one.ratio.Low), at, x(one.ratio.High), at)
		c.DrawGlyph(draw.GlyphStyle{Color: hue, Radius: vg.Points(4), Shape: draw.CircleGlyph{}}, vg.Point{X: x(one.ratio.Median), Y: at})
	}
}

// DataRange implements plot.DataRanger.
func (d *dots) DataRange() (xmin, xmax, ymin, ymax float64) {
	for _, one := range d.all {
		xmax = max(xmax, one.ratio.High, one.bound)
	}
	return 0, max(xmax*1.1, 1), -0.6, float64(len(d.titles)) - 0.4
}
