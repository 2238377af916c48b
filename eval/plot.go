package eval

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval/figure"
	"github.com/moeserve/moeserve/untrusted"
)

const (
	emulatedLabel = "emulated"
	// unpacedNote is why a figure of gains has no bars of Machine.Unpaced.
	unpacedNote = "emulated devices have no rates"
	// gainFraction is where the tiers are compared.
	gainFraction = 0.5
	// curvePoints is into how many parts a predicted curve is divided between two
	// offload fractions that it is known at.
	curvePoints = 32
)

// PlotFormats are the endings of file names that plots can be written as.
var PlotFormats = figure.Formats

// checkFormat returns an error for a format that is not one of PlotFormats.
func checkFormat(format string) error {
	if !slices.Contains(PlotFormats, format) {
		return Inputf("plot format %q: must be %s", format, strings.Join(PlotFormats, " or "))
	}
	return nil
}

// The looks of tiers and paths.
var (
	lineLooks = map[Cell]figure.Look{{Tier: configs.PeerTier}: figure.LookA, {Tier: configs.HostTier}: figure.LookB, {Tier: configs.HostTier, AllPaths: true}: figure.LookC}
	pathLooks = map[string]figure.Look{PeerPath: figure.LookA, HostPath: figure.LookB, BothPath: figure.LookC, D2HPath: figure.LookD}
)

// PlotSweep draws decode throughput over the offload fraction, or, where a setting is varied, over
// that (settingsFigure): for each tier what was
// measured, on a GPU or on emulated devices, as points, what the planner predicts as a line, and its saturation point, the
// fraction from which on copies take longer than all else, as a vertical line. Where
// nothing is predicted, lines join what was measured. format is one of PlotFormats.
func PlotSweep(out io.Writer, format string, results []Result) error {
	if err := checkFormat(format); err != nil {
		return err
	}
	if len(results) == 0 {
		return Inputf("eval: no results to plot")
	}
	if results[0].Setting != "" {
		chart, err := settingsFigure(results)
		if err != nil {
			return err
		}
		return chart.Write(out, format)
	}
	return sweepFigure(results).Write(out, format)
}

// maxBars is how many bars a group has at most.
const maxBars = 4

// settingsFigure draws a group of bars for each value of the varied setting, and in it a bar of
// decode throughput for each tier and fraction.
func settingsFigure(results []Result) (*figure.Bars, error) {
	r := &results[0]
	key, _, _ := strings.Cut(r.Setting, "=")
	chart := &figure.Bars{
		Title: "Decode throughput by " + key, Note: conditions(r), X: figure.Axis{Label: "decode throughput (tokens/s)"}, Value: number,
	}
	group := map[string]int{}
	for i := range results {
		r := &results[i]
		bar, _, _ := strings.Cut(r.Cell().Line(), ", "+r.Setting)
		if bar = percent(r.OffloadFraction) + " offloaded, " + bar; r.Tier == configs.NoTier {
			bar = "nothing offloaded"
		}
		at := slices.Index(chart.Series, bar)
		if at < 0 {
			at = len(chart.Series)
			chart.Series = append(chart.Series, bar)
		}
		if at >= maxBars {
			return nil, Inputf("eval: a plot of a varied setting has at most %d bars for each value: give fewer fractions or tiers", maxBars)
		}
		_, value, _ := strings.Cut(r.Setting, "=")
		g, ok := group[value]
		if !ok {
			g = len(chart.Groups)
			group[value] = g
			chart.Groups = append(chart.Groups, figure.Group{Name: untrusted.Name(value)})
		}
		for len(chart.Groups[g].Values) <= at {
			chart.Groups[g].Values = append(chart.Groups[g].Values, math.NaN()) // not measured: it did not fit
		}
		chart.Groups[g].Values[at] = r.DecodeTokS
	}
	return chart, nil
}

// conditions are what a figure of results says of them.
func conditions(r *Result) string {
	note := fmt.Sprintf("%s, batch of %s, ", untrusted.Name(r.Model), requests(r.Requests))
	if r.Emulated {
		return note + r.EmulatedNote()
	}
	return note + r.Device
}

func sweepFigure(results []Result) *figure.Lines {
	r := &results[0]
	note := conditions(r)
	how := "measured"
	if r.Emulated {
		how = "emulated"
	}
	panel := figure.Panel{Y: figure.Axis{Label: "decode throughput (tokens/s)"}}
	chart := &figure.Lines{
		Title: "Decode throughput by offload fraction", Note: note,
		X: figure.Axis{Label: "experts offloaded (% of all)", From: 0, To: 100},
	}
	for _, line := range []Cell{{Tier: configs.PeerTier}, {Tier: configs.HostTier, AllPaths: true}, {Tier: configs.HostTier}} {
		if !slices.ContainsFunc(results, func(r Result) bool { return r.line() == line }) {
			continue
		}
		name := line.Tier.String() + " memory, "
		if line.AllPaths {
			name += "all paths, "
		}
		curve := predictedCurve(results, line)
		if len(curve) > 0 {
			panel.Series = append(panel.Series, figure.Series{Name: name + "predicted", Look: lineLooks[line], Points: curve, Line: true})
		}
		panel.Series = append(panel.Series, figure.Series{
			Name: name + how, Look: lineLooks[line], Points: measuredPoints(results, line), Marks: true, Line: len(curve) == 0,
		})
	}
	if len(panel.Series) == 0 {
		panel.Series = []figure.Series{{Name: "nothing offloaded, " + how, Look: figure.LookPlain, Points: measuredPoints(results, Cell{Tier: configs.NoTier}), Marks: true}}
	}
	for line, f := range saturationPoints(results) {
		chart.Tags = append(chart.Tags, figure.Tag{X: 100 * f, Name: fmt.Sprintf("%s: saturation point %.1f %%", line.Line(), 100*f)})
	}
	chart.Panels = []figure.Panel{panel}
	return chart
}

// line is the cell without its fraction: a line of a sweep.
func (r *Result) line() Cell { return Cell{Tier: r.Tier, AllPaths: r.AllPaths} }

// ofLine are the results of a line, and those with none offloaded, in the order of their
// fractions.
func ofLine(results []Result, line Cell) []Result {
	var of []Result
	for _, r := range results {
		if r.line() == line || r.Tier == configs.NoTier {
			of = append(of, r)
		}
	}
	slices.SortStableFunc(of, func(a, b Result) int { return cmp.Compare(a.OffloadFraction, b.OffloadFraction) })
	return of
}

func measuredPoints(results []Result, line Cell) []figure.Point {
	var points []figure.Point
	for _, r := range ofLine(results, line) {
		p := figure.Point{X: 100 * r.OffloadFraction, Y: r.DecodeTokS}
		if r.DecodeStddevTokS != nil {
			p.Deviation = *r.DecodeStddevTokS
		}
		points = append(points, p)
	}
	return points
}

// predictedCurve is what the planner predicts of a line from the minimum to the maximum
// of the fractions that were predicted. A step takes as long as the slowest of what goes on at
// once: compute, the same at all fractions, or copies, whose time grows evenly with the
// fraction. So the time of a step, the inverse of throughput, is known everywhere from
// the predictions at the fractions of the sweep and from the saturation point, where it
// begins to grow; without a saturation point it grows from fraction 0 on. Predictions for
// other hardware than what was measured have no curve.
func predictedCurve(results []Result, line Cell) []figure.Point {
	// compute is what the GPU takes of a token where copies are overlapped.
	type vertex struct{ fraction, seconds, compute float64 }
	var known []vertex
	saturation := 0.0
	for _, r := range ofLine(results, line) {
		if p := r.Prediction; p != nil && p.DecodeTokS > 0 && r.comparable() {
			known = append(known, vertex{r.OffloadFraction, 1 / p.DecodeTokS, p.GPUSeconds / float64(r.Requests)})
			saturation = max(saturation, p.SaturationPoint)
		}
	}
	if len(known) == 0 {
		return nil
	}
	switch last := known[len(known)-1].fraction; {
	case known[0].fraction < saturation && saturation < last:
		// Up to there a step takes as long as the GPU, which copies may slow. It grows with the fraction
		// as between the last two that were measured, from the first offloaded expert on.
		a, b := known[max(1, len(known)-2)], known[len(known)-1]
		slope := 0.0
		if a.fraction < b.fraction {
			slope = (b.compute - a.compute) / (b.fraction - a.fraction)
		}
		at, _ := slices.BinarySearchFunc(known, saturation, func(v vertex, f float64) int { return cmp.Compare(v.fraction, f) })
		known = slices.Insert(known, at, vertex{saturation, b.compute - slope*(b.fraction-saturation), 0})
		if known[0].fraction == 0 {
			known = slices.Insert(known, 1, vertex{0, b.compute - slope*b.fraction, 0})
		}
	case saturation == 0 && known[0].fraction == 0 && len(known) > 2:
		// The first offloaded expert may cost a wait for the router in each layer.
		a, b := known[1], known[2]
		first := a.seconds - (b.seconds-a.seconds)/(b.fraction-a.fraction)*a.fraction
		known = slices.Insert(known, 1, vertex{0, max(first, known[0].seconds), 0})
	}
	var curve []figure.Point
	for i, v := range known {
		if i > 0 {
			from := known[i-1]
			for n := 1; n < curvePoints; n++ {
				// Closer where the curve is steeper.
				s := math.Pow(float64(n)/curvePoints, 2)
				curve = append(curve, figure.Point{
					X: 100 * (from.fraction + s*(v.fraction-from.fraction)),
					Y: 1 / (from.seconds + s*(v.seconds-from.seconds)),
				})
			}
		}
		curve = append(curve, figure.Point{X: 100 * v.fraction, Y: 1 / v.seconds})
	}
	return curve
}

// saturationPoints are those predicted of the hardware that was measured, by line, in their
// order.
func saturationPoints(results []Result) func(yield func(line Cell, fraction float64) bool) {
	by := map[Cell]float64{}
	for _, r := range results {
		if r.Prediction != nil && r.Prediction.SaturationPoint > 0 && r.comparable() {
			by[r.line()] = r.Prediction.SaturationPoint
		}
	}
	lines := slices.SortedFunc(maps.Keys(by), func(a, b Cell) int {
		return cmp.Or(cmp.Compare(a.Tier, b.Tier), strings.Compare(a.Line(), b.Line()))
	})
	return func(yield func(Cell, float64) bool) {
		for _, line := range lines {
			if !yield(line, by[line]) {
				return
			}
		}
	}
}

// PlotGains draws what fetching half of the experts from peers gives over fetching
// them from the host: two bars for each model, of decode and of end-to-end throughput.
func PlotGains(out io.Writer, format string, results []Result) error {
	if err := checkFormat(format); err != nil {
		return err
	}
	gains := Gains(results, gainFraction)
	if len(gains) == 0 {
		return Inputf("eval: gains need results at fraction %v from both tiers", gainFraction)
	}
	return gainsFigure(gains).Write(out, format)
}

func gainsFigure(gains []Gain) *figure.Bars {
	emulated, unpaced, oneBatch := 0, 0, true
	for _, g := range gains {
		if g.Emulated {
			emulated++
		}
		if g.Unpaced {
			unpaced++
		}
		oneBatch = oneBatch && g.Requests == gains[0].Requests
	}
	chart := &figure.Bars{
		Title:  "Gain from peer memory over host memory",
		Note:   fmt.Sprintf("%v %% of the experts offloaded", 100*gainFraction),
		X:      figure.Axis{Label: "gain in throughput (%)"},
		Series: []string{"decode throughput", "end-to-end throughput"},
		Value:  func(v float64) string { return strings.Replace(fmt.Sprintf("%+.0f %%", v), "-", "−", 1) },
	}
	if oneBatch {
		chart.Note += ", batches of " + requests(gains[0].Requests)
	}
	if emulated == len(gains) {
		chart.Note += ", " + emulatedLabel + " devices and links"
	}
	if unpaced > 0 {
		chart.Note += "; no bars where " + unpacedNote
	}
	for i, g := range gains {
		name := g.Model
		if g.Setting != "" {
			name += ", " + g.Setting
		}
		same := func(o Gain) bool { return o.Model == g.Model && o.Setting == g.Setting && o.Requests == g.Requests }
		repeated := slices.ContainsFunc(gains[:i], same) || slices.ContainsFunc(gains[i+1:], same)
		if repeated {
			name += ", " + g.Machine
		}
		if !oneBatch {
			name += ", " + requests(g.Requests)
		}
		if g.Emulated && emulated < len(gains) && !repeated {
			name += ", " + emulatedLabel
		}
		group := figure.Group{Name: name}
		if !g.Unpaced {
			group.Values = []float64{100 * g.Decode, 100 * g.EndToEnd}
		}
		chart.Groups = append(chart.Groups, group)
	}
	return chart
}

// PlotTransfer draws the time of a single copy over its size, a line for each path, with
// models at the sizes of their experts, and below it how much faster copies from a peer
// are than from the host. format is one of PlotFormats.
func PlotTransfer(out io.Writer, format string, r *TransferResult) error {
	if err := checkFormat(format); err != nil {
		return err
	}
	if len(r.Points) == 0 {
		return Inputf("eval: no copies to plot")
	}
	return transferFigure(r).Write(out, format)
}

func transferFigure(r *TransferResult) *figure.Lines {
	name, note := r.Device, "Median of single copies"
	if r.Emulated {
		name = "the GPU"
		note += " on " + r.EmulatedNote()
	}
	latency := figure.Panel{Y: figure.Axis{Label: "time of a single copy (µs)", Log: true}}
	for _, path := range []string{HostPath, PeerPath, BothPath, D2HPath} {
		s := figure.Series{Name: path, Look: pathLooks[path], Line: true, Marks: true}
		for _, q := range r.of(path) {
			s.Points = append(s.Points, figure.Point{X: mebibytes(q.Bytes), Y: 1e6 * q.LatencySeconds})
		}
		if len(s.Points) > 0 {
			latency.Series = append(latency.Series, s)
		}
	}
	chart := &figure.Lines{
		Title: "Copy latency to and from " + name, Note: note,
		X:      figure.Axis{Label: "size of the copy (MiB)", Log: true},
		Panels: []figure.Panel{latency},
	}
	ratios := map[int64]float64{}
	ratio := figure.Series{Look: figure.LookPlain, Line: true, Marks: true}
	for _, q := range r.of(PeerPath) {
		if x, ok := r.Ratio(q.Bytes); ok { // this CPU copies as fast from all memories
			ratios[q.Bytes] = x
			ratio.Points = append(ratio.Points, figure.Point{X: mebibytes(q.Bytes), Y: x})
		}
	}
	if len(ratio.Points) > 0 {
		chart.Panels = append(chart.Panels, figure.Panel{Y: figure.Axis{Label: "host / peer (×)"}, Series: []figure.Series{ratio}, Height: 120})
	}
	for _, e := range expertSizes {
		if !slices.ContainsFunc(r.Points, func(p TransferPoint) bool { return p.Bytes == e.bytes }) {
			continue
		}
		name := e.model + ", " + Size(e.bytes)
		if x := ratios[e.bytes]; x > 0 {
			name += ": " + strconv.FormatFloat(x, 'f', 1, 64) + "×"
		}
		chart.Tags = append(chart.Tags, figure.Tag{X: mebibytes(e.bytes), Name: name})
	}
	if len(chart.Tags) > 0 {
		chart.Note += "; models at the size of one 16-bit expert"
	}
	if len(ratios) > 0 {
		chart.Note += "; ×: host time over peer time"
	}
	return chart
}

// EmulatedNote is what a figure of emulated devices says of them.
func (m *Machine) EmulatedNote() string {
	if m.Unpaced() {
		return emulatedLabel + " devices without rates: times are this CPU's"
	}
	return emulatedLabel + " devices and links"
}

func requests(n int) string { return count(n, "request") }

func mebibytes(n int64) float64 { return float64(n) / (1 << 20) }
