package multipath

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/planner"
)

// calibrationPart is the name of Calibrate's measurements in Options.Progress.
const calibrationPart Part = "calibration"

// minGain is what a relay must add to the rate of those before it to be used.
const minGain = 1.03

// Calibration is how copies between the host and one GPU use the links of others best. Memories
// are named as machines do, rates are in bytes/s.
type Calibration struct {
	GPU string `json:"gpu"`
	// Relays are those that pay, the one that gains most first.
	Relays []string `json:"relays"`
	// In and Out are the rates with 0, 1, 2, … of the relays.
	In  []float64 `json:"host_to_gpu_bytes_per_s"`
	Out []float64 `json:"gpu_to_host_bytes_per_s"`
	// The engine's settings.
	ChunkIn      int64 `json:"chunk_in_bytes"`
	ChunkOut     int64 `json:"chunk_out_bytes"`
	Depth        int   `json:"depth"`
	ThresholdIn  int64 `json:"threshold_in_bytes"`
	ThresholdOut int64 `json:"threshold_out_bytes"`
	// SharedRoots are sets of GPUs whose links share a rate.
	SharedRoots []Root `json:"shared_roots"`
}

// Calibrate finds the relays that pay, the size of chunks and their number in flight, and the
// size from which on relays pay. Copies use the engine; what is compared takes turns.
func Calibrate(ctx context.Context, o Options) (_ *Calibration, err error) {
	o.Parts = []Part{RootsPart, GPUsPart, ChunksPart, ThresholdPart}
	o = o.EnsureDefaults()
	r, err := openRig(ctx, o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	c := &Calibration{GPU: o.GPU.String()}
	roots, err := r.roots(ctx)
	if err != nil {
		return nil, err
	}
	c.SharedRoots = roots.Sets
	// Many chunks for each link, also where the copy is small.
	chunk := min(device.Align(o.Bytes/64), 8<<20)
	relays, err := payingRelays(o.Relays, func(sets [][]device.Space) ([]float64, error) {
		cells := make([]*cell, len(sets))
		for i, s := range sets {
			cells[i] = r.engineCell(ToGPU, o.Bytes, tuning{relays: s, chunk: chunk, always: true})
		}
		if err := r.measure(ctx, calibrationPart, min(r.o.Rounds, setRounds), cells); err != nil {
			return nil, err
		}
		rates := make([]float64, len(sets))
		for i, x := range cells {
			rates[i] = x.median(0)
		}
		return rates, nil
	})
	if err != nil {
		return nil, err
	}
	r.o.Relays = relays
	chunks, err := r.chunks(ctx)
	if err != nil {
		return nil, err
	}
	c.Depth, c.ChunkIn, c.ChunkOut = bestDepth(chunks.Points)
	if c.ThresholdIn, c.ThresholdOut, err = r.thresholds(ctx, c); err != nil {
		return nil, err
	}
	if err := r.pathRates(ctx, c); err != nil {
		return nil, err
	}
	return c, nil
}

// payingRelays chooses relays one by one: that with which the copy is fastest, as long as it is
// clearly faster than without. rates measures sets of relays in turn. Of relays that are equally
// good the first one is taken.
func payingRelays(all []device.Space, rates func(sets [][]device.Space) ([]float64, error)) ([]device.Space, error) {
	var chosen []device.Space
	for len(chosen) < len(all) {
		sets := [][]device.Space{chosen}
		for _, s := range all {
			if !slices.Contains(chosen, s) {
				sets = append(sets, append(slices.Clone(chosen), s))
			}
		}
		measured, err := rates(sets)
		if err != nil {
			return nil, err
		}
		best := slices.Max(measured[1:])
		if best < minGain*measured[0] {
			break
		}
		i := slices.IndexFunc(measured[1:], func(v float64) bool { return v >= goodEnough*best })
		chosen = sets[i+1]
	}
	return chosen, nil
}

// bestDepth is the number of chunks in flight with which both directions together come nearest to
// the best rates, the smallest of those that come near enough, with the best sizes of chunks
// for it.
func bestDepth(points []ChunkPoint) (depth int, in, out int64) {
	of := func(depth int) []ChunkPoint {
		return slices.DeleteFunc(slices.Clone(points), func(p ChunkPoint) bool { return depth > 0 && p.Depth != depth })
	}
	score := func(depth int) float64 {
		total := 0.0
		for _, d := range directions {
			total += fastest(of(depth), d) / fastest(points, d)
		}
		return total
	}
	var depths []int
	most := 0.0
	for _, p := range points {
		if !slices.Contains(depths, p.Depth) {
			depths = append(depths, p.Depth)
			most = max(most, score(p.Depth))
		}
	}
	slices.Sort(depths)
	depth = depths[slices.IndexFunc(depths, func(n int) bool { return score(n) >= goodEnough*most })]
	return depth, bestChunk(of(depth), ToGPU).ChunkBytes, bestChunk(of(depth), FromGPU).ChunkBytes
}

// fastest is the highest rate of a direction.
func fastest(points []ChunkPoint, d Direction) float64 {
	most := 0.0
	for _, p := range points {
		if p.Direction == d {
			most = max(most, p.BytesPerSecond)
		}
	}
	return most
}

// tuned are the settings that were found, with the first n relays.
func (c *Calibration) tuned(r *rig, d Direction, n int) tuning {
	t := tuning{relays: r.o.Relays[:n], chunk: c.ChunkIn, depth: c.Depth, always: true}
	if d == FromGPU {
		t.chunk = c.ChunkOut
	}
	return t
}

// thresholds are the sizes from which on relays pay, with the settings that were found; where they
// pay at no size, more than the largest one that was measured.
func (r *rig) thresholds(ctx context.Context, c *Calibration) (in, out int64, err error) {
	if len(r.o.Relays) == 0 {
		return 0, 0, nil
	}
	sizes := r.thresholdSizes()
	for _, d := range directions {
		points, err := r.bySize(ctx, calibrationPart, []Direction{d}, sizes, c.tuned(r, d, len(r.o.Relays)))
		if err != nil {
			return 0, 0, err
		}
		from := breakEven(points)
		if from == 0 {
			from = slices.Max(sizes) + 1
		}
		if d == ToGPU {
			in = from
		} else {
			out = from
		}
	}
	return in, out, nil
}

// pathRates measures the rates with 0, 1, 2, … relays. Those that the way out gains nothing from
// count as what came before.
func (r *rig) pathRates(ctx context.Context, c *Calibration) error {
	var cells []*cell
	for _, d := range directions {
		for n := range len(r.o.Relays) + 1 {
			cells = append(cells, r.engineCell(d, r.o.Bytes, c.tuned(r, d, n)))
		}
	}
	if err := r.measure(ctx, calibrationPart, r.o.Rounds, cells); err != nil {
		return err
	}
	c.Relays = []string{}
	for _, s := range r.o.Relays {
		c.Relays = append(c.Relays, s.String())
	}
	for i, x := range cells {
		to := &c.In
		if i > len(r.o.Relays) {
			to = &c.Out
		}
		rate := x.median(0)
		if n := len(*to); n > 0 {
			rate = max(rate, (*to)[n-1])
		}
		*to = append(*to, rate)
	}
	return nil
}

// Put puts a calibration into hardware, in whose units sizes are, with its source. number is the
// driver's number of a GPU's memory. The rate over the GPU's own link stays, if hardware has that of
// queued copies, unless copies over several links would then be slower.
func (c *Calibration) Put(h *planner.Hardware, machine *eval.Machine, number func(space string) int) error {
	m := &configs.Multipath{
		GPU: number(c.GPU), Relays: []int{}, GPUToHost: slices.Clone(c.Out), ChunkIn: c.ChunkIn, ChunkOut: c.ChunkOut,
		ThresholdIn: c.ThresholdIn, ThresholdOut: c.ThresholdOut, Depth: c.Depth,
	}
	for _, s := range c.Relays {
		m.Relays = append(m.Relays, number(s))
	}
	for _, root := range c.SharedRoots {
		var gpus []int
		for _, s := range root.GPUs {
			gpus = append(gpus, number(s))
		}
		slices.Sort(gpus)
		if !slices.ContainsFunc(m.SharedRoots, func(known []int) bool { return slices.Equal(known, gpus) }) {
			m.SharedRoots = append(m.SharedRoots, gpus)
		}
	}
	own := h.HostToGPU[0]
	h.HostToGPU = []float64{own}
	for _, rate := range c.In[1:] {
		h.HostToGPU = append(h.HostToGPU, max(rate, own))
	}
	for i := range m.GPUToHost {
		m.GPUToHost[i] = max(m.GPUToHost[i], h.GPUToHost)
	}
	m.GPUToHost[0] = h.GPUToHost
	h.Multipath = m
	by := eval.MeasuredBy
	if machine.Emulated {
		by = eval.EmulatedBy
	}
	h.Sources["multipath"] = by + "transfer: copies by the engine over the links of several GPUs"
	h.Sources["host_to_gpu_bytes_per_s"] = by + "transfer: queued copies over one path; single copies by the engine over several"
	if err := h.Validate(); err != nil {
		return fmt.Errorf("multipath: %w", err)
	}
	return nil
}

// Table writes the calibration for a person.
func (c *Calibration) Table() string {
	var b strings.Builder
	fmt.Fprintf(&b, "\ncopies between the host and %s over several links: ", c.GPU)
	if len(c.Relays) == 0 {
		b.WriteString("no relay pays\n")
	} else {
		fmt.Fprintf(&b, "relays that pay: %s\n", list(c.Relays))
		for n := range c.In {
			fmt.Fprintf(&b, "  %d relays: h2d %s GB/s, d2h %s GB/s\n", n, gb(c.In[n]), gb(c.Out[n]))
		}
		fmt.Fprintf(&b, "  chunks of %s (h2d) and %s (d2h), %d in flight on each link; relays from %s (h2d) and %s (d2h) on\n",
			size(c.ChunkIn), size(c.ChunkOut), c.Depth, size(c.ThresholdIn), size(c.ThresholdOut))
	}
	(&Roots{c.SharedRoots}).table(&b)
	return b.String()
}
