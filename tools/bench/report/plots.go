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
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// figure is a plot of a run: what it is called, and what it shows.
type figure struct {
	name, title string
	// draw puts it onto a plot, and says what the legend below it says.
	draw func(*plot.Plot) []entry
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
	p.Add(grid)
	entries := f.draw(p)
	c.SetColor(color.White)
	c.Fill(c.Rectangle.Path())
	p.Draw(draw.Crop(c, vg.Points(4), -vg.Points(12), strip, -vg.Points(4)))
	style := p.X.Tick.Label
	style.XAlign, style.YAlign = draw.XLeft, draw.YBottom
	total := vg.Length(0)
	for _, e := range entries {
		total += style.Width(e.text) + vg.Points(32)
	}
	at := vg.Point{X: c.Min.X + (c.Max.X-c.Min.X-total)/2, Y: c.Min.Y + vg.Points(8)}
	for _, e := range entries {
		c.FillPolygon(e.colour, []vg.Point{at, {X: at.X + 10, Y: at.Y}, {X: at.X + 10, Y: at.Y + 10}, {X: at.X, Y: at.Y + 10}})
		c.FillText(style, vg.Point{X: at.X + vg.Points(15), Y: at.Y}, e.text)
		at.X += style.Width(e.text) + vg.Points(32)
	}
}

// colours are the modes': the same in every plot, ours warm, the limit grey, the others cold. They can be told apart without seeing
// red and green.
var colours = map[string]color.Color{
	result.Direct: color.RGBA{0x99, 0x99, 0x99, 0xff}, result.EBPF: color.RGBA{0xd5, 0x5e, 0x00, 0xff}, result.KubeProxy: color.RGBA{0xe6, 0x9f, 0x00, 0xff},
	result.IPTables: color.RGBA{0x00, 0x72, 0xb2, 0xff}, result.PTP: color.RGBA{0x00, 0x9e, 0x73, 0xff}, result.NFTables: color.RGBA{0x33, 0x33, 0x66, 0xff},
	result.VXLAN: color.RGBA{0xf0, 0xe4, 0x42, 0xff}, result.IPTablesVXLAN: color.RGBA{0x56, 0xb4, 0xe9, 0xff},
	result.IPv6: color.RGBA{0xcc, 0x79, 0xa7, 0xff}, result.IPTablesIPv6: color.RGBA{0x44, 0x77, 0x77, 0xff},
}

// plotsOf are the plots of a run, as far as it has values for them.
func plotsOf(run *result.Run) (all []figure) {
	if d := ratios(run); len(d) > 0 {
		all = append(all, figure{"budgets", "Budgets: this network over another", d.draw})
	}
	add := func(name, title string, groups []group) {
		groups = slices.DeleteFunc(groups, func(g group) bool { return len(g.values(run)) == 0 })
		if len(groups) > 0 {
			all = append(all, figure{name, title, func(p *plot.Plot) []entry { return bars(p, run, groups) }})
		}
	}
	paths := func(name, workload, metric string) {
		w, _ := result.Find(workload)
		var groups []group
		for _, path := range result.Paths() {
			groups = append(groups, group{path, result.Row{Workload: workload, Path: path, Metric: metric}})
		}
		add(name, w.Title+": "+groups[0].row.Of().Title, groups)
	}
	paths("udp", "udp64", result.Rate)
	paths("connections", "crr", result.Rate)
	paths("latency", "rr", result.P99)
	add("cni", "CNI, one pod at a time: time", []group{
		{"ADD p50", result.Row{Workload: "cni", Metric: "add-p50"}}, {"DEL p50", result.Row{Workload: "cni", Metric: "del-p50"}},
		{"ADD + DEL p50", result.Row{Workload: "cni", Metric: "pair-p50"}},
	})
	sweep := func(name, workload, title string) {
		w, _ := result.Find(workload)
		var groups []group
		for _, point := range pointsOf(run, workload) {
			groups = append(groups, group{fmt.Sprintf("%d %s", point, w.Axis), result.Row{Workload: workload, Path: result.AcrossNodes, Metric: result.Cost, Point: point}})
		}
		add(name, title, groups)
	}
	sweep("services", "services", "Service rules: time per connection")
	sweep("clusterip", "service-crr", "Through a ClusterIP: time per connection")
	return all
}

// group are bars of one row, one for each mode.
type group struct {
	title string
	row   result.Row
}

// values are what a run says of the row, by mode.
func (g group) values(run *result.Run) map[string]reading {
	values := map[string]reading{}
	for _, mode := range result.Modes() {
		if r, ok := (subject{row: g.row, mode: mode}).read(run); ok {
			values[mode] = r
		}
	}
	return values
}

// bars draws groups of bars, each with its spread drawn on it and its value above.
func bars(p *plot.Plot, run *result.Run, groups []group) (entries []entry) {
	metric, better := groups[0].row.Of(), "more is better"
	if metric.Lower {
		better = "less is better"
	}
	var titles []string
	measured := map[string]bool{}
	for _, g := range groups {
		titles = append(titles, g.title)
		for mode := range g.values(run) {
			measured[mode] = true
		}
	}
	modes := slices.DeleteFunc(result.Modes(), func(mode string) bool { return !measured[mode] })
	p.NominalX(titles...)
	p.Y.Label.Text = fmt.Sprintf("%s (%s)", metric.Unit, better)
	p.Y.Tick.Marker = whole{}
	p.X.Min, p.X.Max, p.Y.Min = -0.5, float64(len(groups))-0.5, 0
	wide := 0.86 / float64(len(modes))
	for i, mode := range modes {
		entries = append(entries, entry{mode, colours[mode]})
		for n, g := range groups {
			if r, ok := g.values(run)[mode]; ok {
				x := float64(n) + (float64(i)-float64(len(modes)-1)/2)*wide
				left, right := x-wide*0.45, x+wide*0.45
				bar := plotter.XYs{{X: left}, {X: left, Y: r.Median}, {X: right, Y: r.Median}, {X: right}}
				p.Add(&plotter.Polygon{XYs: []plotter.XYs{bar}, Color: colours[mode]}, spread(x, r.Summary), above(p, x, r.Summary))
				p.Y.Max = max(p.Y.Max, r.High*1.08)
			}
		}
	}
	return entries
}

// spread is a bar's.
func spread(x float64, s result.Summary) plot.Plotter {
	bar := &plotter.YErrorBars{XYs: plotter.XYs{{X: x, Y: s.Median}}, YErrors: plotter.YErrors{{Low: s.Median - s.Low, High: s.High - s.Median}}}
	bar.LineStyle, bar.CapWidth = draw.LineStyle{Color: color.Black, Width: vg.Points(0.8)}, vg.Points(6)
	return bar
}

// above is a bar's value, as narrow as the bar.
func above(p *plot.Plot, x float64, s result.Summary) plot.Plotter {
	style := p.X.Tick.Label
	style.Font.Size = 8
	style.XAlign, style.YAlign = draw.XCenter, draw.YBottom
	value := number(s.Median)
	if s.Median >= 10000 {
		value = fmt.Sprintf("%.0fk", s.Median/1000)
	}
	return &plotter.Labels{
		XYs: plotter.XYs{{X: x, Y: s.High}}, Labels: []string{value}, TextStyle: []text.Style{style}, Offset: vg.Point{Y: vg.Points(2)},
	}
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

// dots are ratios with their spreads, and a bar where the budget wants each: a line for each row, the first on top.
type dots []dot

type dot struct {
	budget

	ratio result.Summary
}

func ratios(run *result.Run) (d dots) {
	for _, b := range budgets() {
		if r, ok := b.read(run); ok && b.base != "" {
			d = append(d, dot{b, r.Summary})
		}
	}
	return d
}

func (d dots) draw(p *plot.Plot) []entry {
	var titles []string
	right := 1.0
	for _, one := range slices.Backward(d) {
		if title := one.direction(); !slices.Contains(titles, title) {
			titles = append(titles, title)
		}
		right = max(right, one.ratio.High*1.1, one.bound*1.1)
	}
	p.NominalY(titles...)
	p.X.Label.Text = "ratio, with its spread"
	p.X.Tick.Marker = plot.ConstantTicks{{Value: 0, Label: "0"}, {Value: 0.5, Label: "0.5"}, {Value: 1, Label: "1"}, {Value: 1.5, Label: "1.5"}, {Value: 2, Label: "2"}}
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = 0, right, -0.6, float64(len(titles))-0.4
	line := func(style draw.LineStyle, fromX, fromY, toX, toY float64) {
		p.Add(&plotter.Line{XYs: plotter.XYs{{X: fromX, Y: fromY}, {X: toX, Y: toY}}, LineStyle: style})
	}
	line(draw.LineStyle{Color: color.Gray{Y: 0x99}, Width: vg.Points(1), Dashes: []vg.Length{4, 3}}, 1, p.Y.Min, 1, p.Y.Max)
	for _, one := range d {
		y, hue := float64(slices.Index(titles, one.direction())), colours[result.EBPF]
		switch one.base {
		case result.Direct:
			hue = colours[result.Direct]
		case result.EBPF:
			hue = colours[result.IPv6]
		}
		line(draw.LineStyle{Color: color.Black, Width: vg.Points(2.5)}, one.bound, y-0.3, one.bound, y+0.3)
		line(draw.LineStyle{Color: hue, Width: vg.Points(2)}, one.ratio.Low, y, one.ratio.High, y)
		p.Add(&plotter.Scatter{XYs: plotter.XYs{{X: one.ratio.Median, Y: y}}, GlyphStyle: draw.GlyphStyle{Color: hue, Radius: vg.Points(4), Shape: draw.CircleGlyph{}}})
	}
	return []entry{
		{"over the classical network", colours[result.EBPF]}, {"over the machine's limit", colours[result.Direct]}, {"IPv6 over IPv4", colours[result.IPv6]},
		{"asked", color.Black},
	}
}

// direction is what a ratio is of, and which one is better.
func (d dot) direction() string {
	if d.row.Of().Lower {
		return d.title() + " (less is better)"
	}
	return d.title()
}
