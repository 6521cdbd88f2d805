package report

import (
	"fmt"
	"os"
	"path/filepath"
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

// Figures draws all that a run has values for into a directory, as SVG, and with png as PNG too. What another run has left there is removed: a
// plot that nothing links to tells of nothing.
func Figures(run *result.Run, dir string, png bool) ([]Figure, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make a directory for plots: %w", err)
	}
	var figures []Figure
	drawn := map[string]bool{}
	draw := drawings
	if run.Profile == result.ClusterProfile {
		draw = clusterDrawings
	}
	for _, d := range draw(run) {
		if d.plot == nil {
			continue
		}
		files, err := save(d.plot, dir, d.Name, png)
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			drawn[file] = true
		}
		figures = append(figures, d.Figure)
	}
	return figures, removeOthers(dir, drawn)
}

func removeOthers(dir string, drawn map[string]bool) error {
	for _, kind := range []string{"*.svg", "*.png"} {
		files, err := filepath.Glob(filepath.Join(dir, kind))
		if err != nil {
			return fmt.Errorf("list the plots in %s: %w", dir, err)
		}
		for _, file := range files {
			if drawn[file] {
				continue
			}
			if err := os.Remove(file); err != nil {
				return fmt.Errorf("remove the plot of another run: %w", err)
			}
		}
	}
	return nil
}

// drawing is a figure and its plot, which is nil where the run has no values.
type drawing struct {
	Figure
	plot *plot.Plot
}

func drawings(run *result.Run) []drawing {
	all := []drawing{{Figure{Name: overview, Title: "Budgets: what was asked, and what was measured"}, ratios(run)}}
	for _, w := range result.Catalog() {
		switch {
		case w.Axis != "":
			all = append(all, drawing{Figure{"sweep-" + w.Name, w.Title, w.Name}, lines(run, w)})
		case w.Name == "bpf":
			all = append(all, drawing{Figure{w.Name, w.Title, w.Name}, byPath(run, w)})
		case strings.HasPrefix(w.Name, "agent"):
			all = append(all, agentBars(run, w)...)
		default:
			all = append(all, usual(run, w)...)
		}
	}
	return all
}

// usual are the bars of a workload's main metric, and its distributions. Where there is one mode there is nothing to compare: no bars.
func usual(run *result.Run, w result.Workload) (all []drawing) {
	about := [][2]string{{"rtt", "latency"}, {"add", "ADD"}, {"del", "DEL"}, {"delay", "delay"}}
	for _, path := range append(result.Paths(), "") {
		title := join(w.Title, path)
		if !strings.HasPrefix(w.Name, "change") {
			all = append(all, drawing{Figure{slug(w.Name, path), title, w.Name}, byMode(run, w, path, title)})
		}
		for _, d := range about {
			figure := Figure{slug(w.Name, path, d[0]), title + ": " + d[1], w.Name}
			all = append(all, drawing{figure, distribution(run, w.Name, path, d[0], figure.Title)})
		}
	}
	return all
}

// byMode draws a bar for each mode.
func byMode(run *result.Run, w result.Workload, path, title string) *plot.Plot {
	var b bars
	for _, m := range run.Modes {
		b.add(run, result.Row{Workload: w.Name, Path: path, Metric: w.Metrics[0].Name}, m.Name, m.Name)
	}
	return b.plot(title, w.Metrics[0])
}

// byPath draws a bar for each path, of each mode that has one.
func byPath(run *result.Run, w result.Workload) *plot.Plot {
	var b bars
	for _, path := range result.Paths() {
		for _, m := range run.Modes {
			b.add(run, result.Row{Workload: w.Name, Path: path, Metric: w.Metrics[0].Name}, m.Name, m.Name+", "+path)
		}
	}
	return b.plot(w.Title, w.Metrics[0])
}

// agentBars draws what the agent needs, and what it may need.
func agentBars(run *result.Run, w result.Workload) (all []drawing) {
	for _, of := range [][]string{{"memory", "peak"}, {"complete"}} {
		var b bars
		for _, name := range of {
			row := result.Row{Workload: w.Name, Metric: name}
			b.add(run, row, "ebpf", metricOf(row).Title)
		}
		row := result.Row{Workload: w.Name, Metric: of[0]}
		for _, budget := range budgets() {
			if budget.row == row && budget.missing == "" {
				b.bound = budget.bound
			}
		}
		title := join(w.Title, metricOf(row).Title)
		all = append(all, drawing{Figure{slug(w.Name, of[0]), title, w.Name}, b.plot(title, metricOf(row))})
	}
	return all
}

// lines draws a sweep: cost by mode over the axis, whose points stand side by side at equal distances.
func lines(run *result.Run, w result.Workload) *plot.Plot {
	points := Points(run, w.Name)
	metric := w.Metrics[0]
	p := newPlot(metric.Title+": "+w.Title, metric.Unit+" (less is better)")
	drawn, top := false, 0.0
	for _, m := range run.Modes {
		for _, path := range append(result.Paths(), "") {
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
			p.Legend.Add(join(m.Name, path), line)
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
