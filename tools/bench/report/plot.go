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

// colours are the modes' own, the same in every plot: ours warm, the limit grey, the others cold. They can be told apart
// without seeing red and green.
func colours() map[string]color.RGBA {
	return map[string]color.RGBA{
		"direct":          {0x99, 0x99, 0x99, 0xff},
		"ebpf":            {0xd5, 0x5e, 0x00, 0xff},
		"ebpf+kube-proxy": {0xe6, 0x9f, 0x00, 0xff},
		"ebpf-vxlan":      {0xcc, 0x79, 0xa7, 0xff},
		"iptables":        {0x00, 0x72, 0xb2, 0xff},
		"iptables-vxlan":  {0x56, 0xb4, 0xe9, 0xff},
		"ptp":             {0x00, 0x9e, 0x73, 0xff},
		"nftables":        {0x33, 0x33, 0x66, 0xff},
	}
}

func colour(mode string) color.RGBA {
	if c, ok := colours()[mode]; ok {
		return c
	}
	return color.RGBA{A: 0xff}
}

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
func save(p *plot.Plot, dir, name string, png bool) error {
	kinds := []string{"svg"}
	if png {
		kinds = append(kinds, "png")
	}
	for _, kind := range kinds {
		file := filepath.Join(dir, name+"."+kind)
		if err := writePlot(p, file, kind); err != nil {
			return err
		}
	}
	return nil
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

// bars is one bar for each mode, its spread drawn on it, its value above.
type bars struct {
	modes  []string
	values []result.Summary // in the unit of the axis
}

// Plot implements plot.Plotter.
func (b bars) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	for i, s := range b.values {
		left, right := x(float64(i)-0.35), x(float64(i)+0.35)
		c.FillPolygon(colour(b.modes[i]), []vg.Point{{X: left, Y: y(0)}, {X: left, Y: y(s.Median)}, {X: right, Y: y(s.Median)}, {X: right, Y: y(0)}})
		whisker(c, x(float64(i)), y(s.Low), y(s.High))
		style := p.X.Tick.Label
		style.XAlign, style.YAlign = draw.XCenter, draw.YBottom
		c.FillText(style, vg.Point{X: x(float64(i)), Y: y(s.High) + vg.Points(3)}, number(s.Median))
	}
}

// DataRange implements plot.DataRanger.
func (b bars) DataRange() (xmin, xmax, ymin, ymax float64) {
	for _, s := range b.values {
		ymax = max(ymax, s.High)
	}
	return -0.6, float64(len(b.values)) - 0.4, 0, ymax * 1.1
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
