package multipath

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/figure"
)

const (
	// smallest size of a copy, in bytes.
	smallest = 1 << 10
	// singleBytes is about how many bytes of one size are copied in a round, in at most
	// maxSingles copies, whose median counts.
	singleBytes = 64 << 20
	maxSingles  = 20

	// fullRate is the size from which on the engine is to reach nativeShare of the native rate;
	// below it may add addedLatency.
	fullRate     = 256 << 10
	nativeShare  = 0.95
	addedLatency = 2e-6 // seconds
	// thresholdFrom and thresholdTo are the sizes between which relays begin to pay.
	thresholdFrom, thresholdTo = 1 << 20, 128 << 20
)

// Sizes are copies by size.
type Sizes struct {
	Points []SizePoint `json:"points"`
}

// SizePoint is copies of one size: by the GPU's own link without the engine (native), and by the
// engine. Times are medians, in seconds.
type SizePoint struct {
	Direction Direction `json:"direction"`
	Bytes     int64     `json:"bytes"`
	// Until the host sees that the copy has ended.
	Native float64 `json:"native_s"`
	Engine float64 `json:"engine_s"`
	// Until work of the GPU that waits for the copy goes on.
	NativeDevice float64 `json:"native_device_s"`
	EngineDevice float64 `json:"engine_device_s"`
	// Until a second stream goes on that waits for the native copy by an event of the driver. Work that
	// waits for the engine's is on another stream than the copy, too.
	WaitedDevice float64 `json:"native_second_stream_s"`
}

// gain is how many times as fast as the native copy the engine is.
func (p *SizePoint) gain() float64 { return p.Native / p.Engine }

// added is what the engine adds to the time until the GPU goes on.
func (p *SizePoint) added() float64 { return p.EngineDevice - p.NativeDevice }

// powers are the powers of two from one size to another.
func powers(from, to int64) []int64 {
	var sizes []int64
	for n := from; n <= to; n *= 2 {
		sizes = append(sizes, n)
	}
	return sizes
}

// bySize measures sizes in each of some directions; native copies and the engine's take turns.
func (r *rig) bySize(ctx context.Context, part Part, directions []Direction, sizes []int64, t tuning) (points []SizePoint, err error) {
	e, err := r.engine(r.o.GPU, 0, t)
	if err != nil {
		return nil, err
	}
	defer func() {
		if failed := e.close(); err == nil {
			err = failed
		}
	}()
	var cells []*cell
	for _, d := range directions {
		for _, n := range sizes {
			if err := r.checkCopy(ctx, e, d, n); err != nil {
				return nil, err
			}
			points = append(points, SizePoint{Direction: d, Bytes: n})
			cells = append(cells, &cell{run: func(ctx context.Context) ([]float64, error) { return r.singles(ctx, e, d, n) }})
		}
	}
	if err := r.measure(ctx, part, r.o.Rounds, cells); err != nil {
		return nil, err
	}
	for i := range points {
		p, m := &points[i], cells[i].medians()
		p.Native, p.NativeDevice, p.Engine, p.EngineDevice = m[0], m[1], m[2], m[3]
		p.WaitedDevice = m[4]
	}
	return points, nil
}

// singles are the medians of some native copies and some of the engine's, in turn, in seconds.
func (r *rig) singles(ctx context.Context, e *engine, d Direction, n int64) ([]float64, error) {
	dst, src := r.ends(d, n)
	all := make([][]float64, 5)
	for range min(max(singleBytes/n, 1), maxSingles) {
		native, err := r.native(ctx, d, dst, src)
		if err != nil {
			return nil, err
		}
		engined, err := e.copy(ctx, dst, src)
		if err != nil {
			return nil, err
		}
		waited, err := r.waited(ctx, d, dst, src)
		if err != nil {
			return nil, err
		}
		for i, t := range []time.Duration{native.host, native.device, engined.host, engined.device, waited} {
			all[i] = append(all[i], t.Seconds())
		}
	}
	medians := make([]float64, len(all))
	for i := range all {
		medians[i] = eval.Median(all[i])
	}
	return medians, nil
}

func (r *rig) sizes(ctx context.Context) (*Sizes, error) {
	points, err := r.bySize(ctx, SizesPart, directions, powers(smallest, r.o.Largest), tuning{relays: r.o.Relays})
	if err != nil {
		return nil, err
	}
	return &Sizes{points}, nil
}

// of are the points of a direction.
func of(points []SizePoint, d Direction) []SizePoint {
	return slices.DeleteFunc(slices.Clone(points), func(p SizePoint) bool { return p.Direction != d })
}

func sizeTable(b *strings.Builder, points []SizePoint) {
	w := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "size\tnative µs\tGB/s\tengine µs\tGB/s\tgain\tuntil the GPU goes on: native µs\tin a second stream µs\tengine µs\tadded\t")
	for _, p := range points {
		n := float64(p.Bytes)
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%.2f\t%s\t%s\t%s\t%s\t\n", size(p.Bytes), micros(p.Native), gb(n/p.Native), micros(p.Engine), gb(n/p.Engine), p.gain(),
			micros(p.NativeDevice), micros(p.WaitedDevice), micros(p.EngineDevice), micros(p.added()))
	}
	w.Flush() //nolint:errcheck // writing to memory does not fail
	b.WriteString("\n")
}

func (s *Sizes) table(b *strings.Builder) {
	for _, d := range directions {
		fmt.Fprintf(b, "copies by size, %s (Figure 8)\n", d.words())
		sizeTable(b, of(s.Points, d))
	}
}

// micros is a time in seconds as microseconds.
func micros(seconds float64) string { return strconv.FormatFloat(1e6*seconds, 'f', 1, 64) }

func (s *Sizes) targets() []Target {
	var all []Target
	if s == nil {
		return nil
	}
	for _, d := range directions {
		share, added := 0.0, 0.0
		var slowest, latest int64
		for _, p := range of(s.Points, d) {
			if p.Bytes >= fullRate {
				if slowest == 0 || p.gain() < share {
					share, slowest = p.gain(), p.Bytes
				}
			} else if latest == 0 || p.added() > added {
				added, latest = p.added(), p.Bytes
			}
		}
		if slowest > 0 {
			all = append(all, atLeast(fmt.Sprintf("%s: engine over native rate from 256 KiB up, least (at %s)", d.words(), size(slowest)), share, nativeShare, ""))
		}
		if latest > 0 {
			all = append(all, atMost(fmt.Sprintf("%s: added below 256 KiB until the GPU goes on, most (at %s)", d.words(), size(latest)), 1e6*added, 1e6*addedLatency, "µs"))
		}
	}
	return all
}

func (s *Sizes) figure(on string) *figure.Lines {
	chart := &figure.Lines{
		Title: "Bandwidth by the size of a copy",
		Note:  "A single copy until the host sees its end, on " + on,
		X:     figure.Axis{Label: "size of the copy (MiB)", Log: true},
	}
	for _, d := range directions {
		native := figure.Series{Name: "native copy", Look: figure.LookB, Line: true, Marks: true}
		engine := figure.Series{Name: "engine", Look: figure.LookA, Line: true, Marks: true}
		for _, p := range of(s.Points, d) {
			x, n := mib(p.Bytes), float64(p.Bytes)/1e9
			native.Points = append(native.Points, figure.Point{X: x, Y: n / p.Native})
			engine.Points = append(engine.Points, figure.Point{X: x, Y: n / p.Engine})
		}
		chart.Panels = append(chart.Panels, panel(len(chart.Panels), d, engine, native))
	}
	return chart
}

func mib(n int64) float64 { return float64(n) / (1 << 20) }

// Threshold is from which size on relays pay: the engine uses them for copies of every size.
type Threshold struct {
	Points []SizePoint `json:"points"`
	// In and Out are the smallest measured sizes from which on the copy over several links is
	// faster than the native one; 0: it is at none.
	In  int64 `json:"threshold_in_bytes"`
	Out int64 `json:"threshold_out_bytes"`
}

// thresholdSizes are the sizes between which relays begin to pay: two for each power of two.
func (r *rig) thresholdSizes() []int64 {
	to := min(int64(thresholdTo), r.o.copyBytes())
	return slices.Sorted(slices.Values(append(powers(thresholdFrom, to), powers(thresholdFrom*3/2, to)...)))
}

func (r *rig) threshold(ctx context.Context) (*Threshold, error) {
	points, err := r.bySize(ctx, ThresholdPart, directions, r.thresholdSizes(), tuning{relays: r.o.Relays, always: true})
	if err != nil {
		return nil, err
	}
	return &Threshold{Points: points, In: breakEven(of(points, ToGPU)), Out: breakEven(of(points, FromGPU))}, nil
}

// breakEven is the smallest size from which on the engine is faster at every size; 0: there is
// none. Points are in the order of their sizes.
func breakEven(points []SizePoint) int64 {
	var from int64
	for _, p := range slices.Backward(points) {
		if p.gain() <= 1 {
			break
		}
		from = p.Bytes
	}
	return from
}

func (t *Threshold) table(b *strings.Builder) {
	for _, d := range directions {
		from := t.In
		if d == FromGPU {
			from = t.Out
		}
		words := "never faster than a native copy"
		if from > 0 {
			words = "faster than a native copy from " + size(from) + " on"
		}
		fmt.Fprintf(b, "copies over several links at every size, %s: %s (Figure 14)\n", d.words(), words)
		sizeTable(b, of(t.Points, d))
	}
}

func (t *Threshold) figure(on string) *figure.Lines {
	chart := &figure.Lines{
		Title: "Time of a copy over several links",
		Note:  "Relays are used at every size, on " + on,
		X:     figure.Axis{Label: "size of the copy (MiB)", Log: true},
	}
	for _, d := range directions {
		native := figure.Series{Name: "native copy", Look: figure.LookB, Line: true, Marks: true}
		engine := figure.Series{Name: "over several links", Look: figure.LookA, Line: true, Marks: true}
		for _, p := range of(t.Points, d) {
			native.Points = append(native.Points, figure.Point{X: mib(p.Bytes), Y: 1e6 * p.Native})
			engine.Points = append(engine.Points, figure.Point{X: mib(p.Bytes), Y: 1e6 * p.Engine})
		}
		x := panel(len(chart.Panels), d, engine, native)
		x.Y = figure.Axis{Label: "µs", Log: true}
		chart.Panels = append(chart.Panels, x)
	}
	return chart
}
