package eval

import (
	"fmt"
	"image/color"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/moeserve/moeserve/configs"
)

const (
	emulatedLabel = "emulated"
	// gainFraction is where the tiers are compared.
	gainFraction = 0.5

	plotWidth, plotHeight = 18 * vg.Centimeter, 11 * vg.Centimeter
	plotDPI               = 144
)

// PlotFormats are the endings of file names that plots can be written as.
var PlotFormats = []string{"svg", "png"}

// The looks of lines. They differ in dashes and marks, and in how dark they are, so
// that they can be told apart in grey.
var (
	peerLook  = look{color.Gray{0x20}, nil, draw.CircleGlyph{}}
	hostLook  = look{color.Gray{0x60}, dashes(6, 3), draw.SquareGlyph{}}
	bothLook  = look{color.Gray{0x20}, dashes(1, 2), draw.PyramidGlyph{}}
	backLook  = look{color.Gray{0x90}, dashes(8, 2, 1, 2), draw.CrossGlyph{}}
	looks     = map[configs.Tier]look{configs.PeerTier: peerLook, configs.HostTier: hostLook}
	planned   = color.Gray{0x98}
	thinLine  = vg.Points(0.8)
	thickLine = vg.Points(1.6)
)

type look struct {
	color color.Color
	dash  []vg.Length
	glyph draw.GlyphDrawer
}

func dashes(points ...float64) []vg.Length {
	d := make([]vg.Length, len(points))
	for i, p := range points {
		d[i] = vg.Points(p)
	}
	return d
}

// newPlot has our fonts, white ground, and a faint grid.
func newPlot(title, x, y string) *plot.Plot {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, x, y
	p.Title.Padding = vg.Points(6)
	for _, s := range []*text.Style{&p.Title.TextStyle, &p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label, &p.Legend.TextStyle} {
		s.Font.Variant = "Sans"
		s.Font.Size = vg.Points(10)
	}
	p.Title.TextStyle.Font.Size = vg.Points(11)
	p.Legend.ThumbnailWidth = vg.Points(34)
	p.Legend.Padding = vg.Points(2)
	grid := plotter.NewGrid()
	for _, l := range []*draw.LineStyle{&grid.Horizontal, &grid.Vertical} {
		l.Color, l.Width = color.Gray{0xdd}, vg.Points(0.5)
	}
	p.Add(grid)
	return p
}

// write draws p as "svg" or "png".
func write(out io.Writer, p *plot.Plot, format string) error {
	var canvas interface {
		vg.CanvasSizer
		io.WriterTo
	}
	switch format {
	case "svg":
		canvas = vgsvg.New(plotWidth, plotHeight)
	case "png":
		canvas = vgimg.PngCanvas{Canvas: vgimg.NewWith(vgimg.UseWH(plotWidth, plotHeight), vgimg.UseDPI(plotDPI))}
	default:
		return inputf("plots are written as %s, not as %q", strings.Join(PlotFormats, " or "), format)
	}
	whole := draw.New(canvas)
	// The last label of the horizontal axis reaches over its end.
	p.Draw(draw.Crop(whole, vg.Points(4), -vg.Points(14), vg.Points(4), -vg.Points(6)))
	_, err := canvas.WriteTo(out)
	return err
}

// evenTicks marks about so many round numbers of an axis, all with their values.
type evenTicks int

// Ticks implements plot.Ticker.
func (n evenTicks) Ticks(least, most float64) []plot.Tick {
	step := math.Pow(10, math.Floor(math.Log10((most-least)/float64(n))))
	for _, f := range []float64{1, 2, 2.5, 5, 10} {
		if (most-least)/(step*f) <= float64(n) {
			step *= f
			break
		}
	}
	var ticks []plot.Tick
	for i := math.Ceil(least / step); i*step <= most*(1+1e-9); i++ {
		ticks = append(ticks, plot.Tick{Value: i * step, Label: strconv.FormatFloat(i*step, 'f', -1, 64)})
	}
	return ticks
}

// line adds points in a look, with a mark at each, and an entry of the legend.
func line(p *plot.Plot, name string, points plotter.XYs, l look) error {
	ln, marks, err := plotter.NewLinePoints(points)
	if err != nil {
		return err
	}
	ln.Color, ln.Dashes, ln.Width = l.color, l.dash, thickLine
	marks.Color, marks.Shape, marks.Radius = l.color, l.glyph, vg.Points(3)
	p.Add(ln, marks)
	p.Legend.Add(name, ln, marks)
	return nil
}

// PlotSweep draws decode throughput over the offload fraction, a line for each tier,
// with what the planner predicts beside it and a vertical line at each tier's knee:
// the fraction from which on copies take longer than all else. format is one of
// PlotFormats.
func PlotSweep(out io.Writer, format string, results []Result) error {
	if len(results) == 0 {
		return inputf("eval: no results to plot")
	}
	r := &results[0]
	title := fmt.Sprintf("%s, %d requests", r.Model, r.Requests)
	if r.Emulated {
		title += " (" + emulatedLabel + " devices and links)"
	} else {
		title += ", " + r.Device
	}
	p := newPlot(title, "experts offloaded (% of all)", "decode throughput (tokens/s)")
	most := 0.0
	for _, tier := range []configs.Tier{configs.PeerTier, configs.HostTier} {
		var measured, predicted plotter.XYs
		for i := range results {
			r := &results[i]
			if r.Tier != tier && r.Tier != configs.NoTier {
				continue
			}
			measured = append(measured, plotter.XY{X: 100 * r.OffloadFraction, Y: r.DecodeTokS})
			most = max(most, r.DecodeTokS)
			if r.Prediction != nil {
				predicted = append(predicted, plotter.XY{X: 100 * r.OffloadFraction, Y: r.Prediction.DecodeTokS})
				most = max(most, r.Prediction.DecodeTokS)
			}
		}
		if !slices.ContainsFunc(results, func(r Result) bool { return r.Tier == tier }) {
			continue
		}
		if len(predicted) > 0 {
			ln, err := plotter.NewLine(byX(predicted))
			if err != nil {
				return err
			}
			ln.Color, ln.Width, ln.Dashes = planned, thinLine, looks[tier].dash
			p.Add(ln)
			p.Legend.Add(tier.String()+" memory, predicted", ln)
		}
		if err := line(p, tier.String()+" memory, measured", byX(measured), looks[tier]); err != nil {
			return err
		}
	}
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = 0, 100, 0, most*1.15
	p.X.Tick.Marker, p.Y.Tick.Marker = evenTicks(10), evenTicks(8)
	for tier, knee := range knees(results) {
		if err := mark(p, 100*knee, p.Y.Max, fmt.Sprintf("%s: knee at %.1f %%", tier, 100*knee)); err != nil {
			return err
		}
	}
	p.Legend.Top = true
	p.Legend.XOffs, p.Legend.YOffs = -vg.Points(4), -vg.Points(22)
	return write(out, p, format)
}

// byX puts points in order.
func byX(points plotter.XYs) plotter.XYs {
	slices.SortStableFunc(points, func(a, b plotter.XY) int {
		switch {
		case a.X < b.X:
			return -1
		case a.X > b.X:
			return 1
		}
		return 0
	})
	return points
}

// knees are the planner's, by tier, in their order.
func knees(results []Result) func(yield func(tier configs.Tier, knee float64) bool) {
	by := map[configs.Tier]float64{}
	for _, r := range results {
		if r.Prediction != nil && r.Prediction.SaturationPoint > 0 {
			by[r.Tier] = r.Prediction.SaturationPoint
		}
	}
	return func(yield func(configs.Tier, float64) bool) {
		for _, tier := range slices.Sorted(maps.Keys(by)) {
			if !yield(tier, by[tier]) {
				return
			}
		}
	}
}

// mark draws a vertical line at x, named at its upper end.
func mark(p *plot.Plot, x, top float64, name string) error {
	ln, err := plotter.NewLine(plotter.XYs{{X: x, Y: 0}, {X: x, Y: top}})
	if err != nil {
		return err
	}
	ln.Color, ln.Width, ln.Dashes = color.Gray{0x40}, thinLine, dashes(2, 2)
	label, err := plotter.NewLabels(plotter.XYLabels{XYs: plotter.XYs{{X: x, Y: top * 0.955}}, Labels: []string{" " + name}})
	if err != nil {
		return err
	}
	for i := range label.TextStyle {
		label.TextStyle[i].Font.Variant = "Sans"
		label.TextStyle[i].Font.Size = vg.Points(9)
	}
	p.Add(ln, label)
	return nil
}

// PlotGains draws what fetching half of the experts from peers gives over fetching
// them from the host: two bars for each model, decoding alone and the whole run.
func PlotGains(out io.Writer, format string, results []Result) error {
	gains := Gains(results, gainFraction)
	if len(gains) == 0 {
		return inputf("eval: gains need results at fraction %v from both tiers", gainFraction)
	}
	title := "Half of the experts from peer memory instead of host memory"
	if slices.ContainsFunc(gains, func(g Gain) bool { return g.Emulated }) {
		title += " (" + emulatedLabel + ")"
	}
	p := newPlot(title, "", "gain in throughput (%)")
	var names []string
	var decode, whole plotter.Values
	most, least := 0.0, 0.0
	for _, g := range gains {
		names = append(names, fmt.Sprintf("%s, %d requests", g.Model, g.Requests))
		decode, whole = append(decode, 100*g.Decode), append(whole, 100*g.EndToEnd)
		most, least = max(most, 100*g.Decode, 100*g.EndToEnd), min(least, 100*g.Decode, 100*g.EndToEnd)
	}
	width := min(vg.Points(40), plotWidth/vg.Length(4*len(gains)))
	for i, bars := range []struct {
		name   string
		values plotter.Values
		shade  uint8
	}{{"decoding", decode, 0x40}, {"with prefill", whole, 0xb8}} {
		b, err := plotter.NewBarChart(bars.values, width)
		if err != nil {
			return err
		}
		b.Color, b.Offset = color.Gray{bars.shade}, width*vg.Length(2*i-1)/2
		p.Add(b)
		p.Legend.Add(bars.name, b)
		for j, v := range bars.values {
			label, err := plotter.NewLabels(plotter.XYLabels{XYs: plotter.XYs{{X: float64(j), Y: v}}, Labels: []string{fmt.Sprintf("%+.0f %%", v)}})
			if err != nil {
				return err
			}
			label.TextStyle[0].Font.Variant, label.TextStyle[0].Font.Size = "Sans", vg.Points(9)
			label.TextStyle[0].XAlign = text.XCenter
			label.Offset = vg.Point{X: b.Offset, Y: vg.Points(3)}
			p.Add(label)
		}
	}
	p.NominalX(names...)
	p.X.Tick.Label.Font.Variant = "Sans"
	p.X.Min, p.X.Max = -0.75, float64(len(gains))-0.25
	p.Y.Min, p.Y.Max = least*1.15, max(most*1.2, 1)
	p.Y.Tick.Marker = evenTicks(8)
	p.Legend.Top = true
	return write(out, p, format)
}
