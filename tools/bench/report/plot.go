package report

import (
	"fmt"
	"image/color"
	"path/filepath"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// Sizes in which text stays legible at a page's width.
const (
	width  = 8 * vg.Inch
	height = 4 * vg.Inch
)

// newPlot is an empty plot with a frame of reference: title, unit, grid, and a y axis that begins at zero.
func newPlot(title, unit string) *plot.Plot {
	p := plot.New()
	p.Title.Text = title
	p.Title.TextStyle.Font.Size = font.Length(14)
	p.Title.Padding = vg.Points(8)
	p.Y.Label.Text = unit
	p.Y.Min = 0
	grid := plotter.NewGrid()
	grid.Vertical.Width = 0
	grid.Horizontal.Color = color.Gray{Y: 0xcc}
	p.Add(grid)
	p.Legend.Top = true
	p.Legend.Padding = vg.Points(4)
	p.Legend.XOffs = -vg.Points(10)
	p.BackgroundColor = color.White
	for _, style := range []*font.Font{
		&p.Title.TextStyle.Font, &p.Legend.TextStyle.Font,
		&p.X.Label.TextStyle.Font, &p.X.Tick.Label.Font, &p.Y.Label.TextStyle.Font, &p.Y.Tick.Label.Font,
	} {
		style.Variant = "Sans"
	}
	return p
}

// save writes a plot as NAME.svg, and with png as NAME.png too.
func save(p *plot.Plot, dir, name string, png bool) (files []string, err error) {
	kinds := []string{"svg"}
	if png {
		kinds = append(kinds, "png")
	}
	for _, kind := range kinds {
		file := filepath.Join(dir, name+"."+kind)
		if err := writePlot(p, file, kind); err != nil {
			return nil, err
		}
		files = append(files, file)
	}
	return files, nil
}

func writePlot(p *plot.Plot, file, kind string) error {
	drawn, err := p.WriterTo(width, height, kind)
	if err != nil {
		return fmt.Errorf("draw %s: %w", file, err)
	}
	var content bytesWriter
	if _, err := drawn.WriteTo(&content); err != nil {
		return fmt.Errorf("draw %s: %w", file, err)
	}
	return result.Replace(file, content)
}

type bytesWriter []byte

func (b *bytesWriter) Write(p []byte) (int, error) {
	*b = append(*b, p...)
	return len(p), nil
}

// whisker draws the spread.
func whisker(c draw.Canvas, x, low, high vg.Length) {
	line := draw.LineStyle{Color: color.Black, Width: vg.Points(1)}
	c.StrokeLine2(line, x, low, x, high)
	for _, y := range []vg.Length{low, high} {
		c.StrokeLine2(line, x-vg.Points(4), y, x+vg.Points(4), y)
	}
}

// number prints three significant digits, without an exponent.
func number(v float64) string {
	switch {
	case v >= 99.95 || v == 0:
		return fmt.Sprintf("%.0f", v)
	case v >= 9.995:
		return fmt.Sprintf("%.1f", v)
	case v >= 0.9995:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3f", v)
}
