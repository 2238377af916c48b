package multipath

import (
	"context"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/moeserve/moeserve/eval/figure"
)

// engineShare is the part of the better of two rates that the engine is to reach: of what the
// GPUs reach when each copies its own data, and of a static split.
const engineShare = 0.95

// GPUs are copies by the number of GPUs that take part.
type GPUs struct {
	Bytes  int64      `json:"bytes"`
	Points []GPUPoint `json:"points"`
}

// GPUPoint is a copy over the links of a number of GPUs, rates in bytes/s.
type GPUPoint struct {
	Direction Direction `json:"direction"`
	GPUs      int       `json:"gpu_count"`
	Engine    float64   `json:"engine_bytes_per_s"`
	// Static is a round-robin split of the same copy, Own what the same GPUs reach when each
	// copies its own data, all at once.
	Static float64 `json:"static_bytes_per_s"`
	Own    float64 `json:"own_bytes_per_s"`
}

func (r *rig) gpus(ctx context.Context) (*GPUs, error) {
	g := &GPUs{Bytes: r.o.Bytes}
	var cells []*cell
	for _, d := range directions {
		for n := range len(r.o.Relays) + 1 {
			relays := r.o.Relays[:n]
			if err := r.checkEngine(ctx, d, r.o.Bytes, tuning{relays: relays}); err != nil {
				return nil, err
			}
			flows, err := r.owns(n+1, d)
			if err != nil {
				return nil, err
			}
			cells = append(cells, r.engineCell(d, r.o.Bytes, tuning{relays: relays}), r.splitCell(d, r.o.statically(relays)), r.flowCell(flows))
			g.Points = append(g.Points, GPUPoint{Direction: d, GPUs: n + 1})
		}
	}
	if err := r.measure(ctx, GPUsPart, r.o.Rounds, cells); err != nil {
		return nil, err
	}
	for i := range g.Points {
		p := &g.Points[i]
		p.Engine, p.Static, p.Own = cells[3*i].median(0), cells[3*i+1].median(0), sum(cells[3*i+2].medians())
	}
	return g, nil
}

func (g *GPUs) of(d Direction) []GPUPoint {
	var points []GPUPoint
	for _, p := range g.Points {
		if p.Direction == d {
			points = append(points, p)
		}
	}
	return points
}

func (g *GPUs) table(b *strings.Builder) {
	fmt.Fprintf(b, "a copy of %s by the number of GPUs that take part, GB/s (Figure 9); own: each of them copies its own data, all at once\n", size(g.Bytes))
	w := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "GPUs\th2d: engine\tstatic split\town\td2h: engine\tstatic split\town\t")
	out := g.of(FromGPU)
	for i, p := range g.of(ToGPU) {
		q := out[i]
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t\n", p.GPUs, gb(p.Engine), gb(p.Static), gb(p.Own), gb(q.Engine), gb(q.Static), gb(q.Own))
	}
	w.Flush() //nolint:errcheck // writing to memory does not fail
	b.WriteString("\n")
}

func (g *GPUs) targets() []Target {
	var all []Target
	if g == nil {
		return nil
	}
	for _, p := range g.Points {
		if p.GPUs > 1 {
			what := fmt.Sprintf("%s over %d GPUs: engine over the better of static split and own copies", p.Direction.words(), p.GPUs)
			all = append(all, atLeast(what, p.Engine/max(p.Static, p.Own), engineShare, ""))
		}
	}
	return all
}

func (g *GPUs) figure(on string) *figure.Lines {
	chart := &figure.Lines{
		Title: "Bandwidth by the number of GPUs that take part",
		Note:  fmt.Sprintf("A copy of %s, on %s", size(g.Bytes), on),
		X:     figure.Axis{Label: "GPUs whose PCIe links are used"},
	}
	for _, d := range directions {
		engine := figure.Series{Name: "engine", Look: figure.LookA, Line: true, Marks: true}
		split := figure.Series{Name: "static split", Look: figure.LookC, Line: true, Marks: true}
		own := figure.Series{Name: "the same GPUs, each copying its own data", Look: figure.LookB, Line: true, Marks: true}
		for _, p := range g.of(d) {
			x := float64(p.GPUs)
			engine.Points = append(engine.Points, figure.Point{X: x, Y: p.Engine / 1e9})
			split.Points = append(split.Points, figure.Point{X: x, Y: p.Static / 1e9})
			own.Points = append(own.Points, figure.Point{X: x, Y: p.Own / 1e9})
		}
		chart.Panels = append(chart.Panels, panel(len(chart.Panels), d, engine, split, own))
	}
	return chart
}

// CPU is the processor time of copies that follow one another.
type CPU struct {
	Bytes  int64      `json:"bytes"`
	Points []CPUPoint `json:"points"`
}

// CPUPoint is copies to the GPU over a number of links.
type CPUPoint struct {
	Links int `json:"links"`
	// Native: by the driver alone.
	Native bool `json:"native"`
	// Cores is processor time over time, Seconds of them per GB copied.
	Cores        float64 `json:"cores"`
	SecondsPerGB float64 `json:"cpu_s_per_gb"`
}

// maxCores is what the engine may take with all links.
const maxCores = 1

// cpu measures copies to the GPU: native ones, and the engine over 1, 2, … links.
func (r *rig) cpu(ctx context.Context) (*CPU, error) {
	c := &CPU{Bytes: r.o.Bytes}
	dst, src := r.ends(ToGPU, r.o.Bytes)
	spent := func(copy func() error) ([]float64, error) {
		if err := copy(); err != nil { // the first one is slower
			return nil, err
		}
		began, before, copied := r.o.Machine.Now(), r.o.CPUTime(), 0.0
		var took time.Duration
		for took < r.o.CPUSpan {
			if err := copy(); err != nil {
				return nil, err
			}
			copied += float64(r.o.Bytes)
			took = r.o.Machine.Now() - began
		}
		used := (r.o.CPUTime() - before).Seconds()
		return []float64{used / took.Seconds(), used / (copied / 1e9)}, nil
	}
	cells := []*cell{{run: func(ctx context.Context) ([]float64, error) {
		return spent(func() error {
			_, err := r.native(ctx, ToGPU, dst, src)
			return err
		})
	}}}
	c.Points = append(c.Points, CPUPoint{Links: 1, Native: true})
	for n := range len(r.o.Relays) + 1 {
		cells = append(cells, &cell{run: func(ctx context.Context) (values []float64, err error) {
			err = r.with(r.o.GPU, tuning{relays: r.o.Relays[:n]}, func(e *engine) (err error) {
				values, err = spent(func() error {
					_, err := e.copy(ctx, dst, src)
					return err
				})
				return err
			})
			return values, err
		}})
		c.Points = append(c.Points, CPUPoint{Links: n + 1})
	}
	// Each cell is long, so few rounds are enough.
	if err := r.measure(ctx, CPUPart, min(r.o.Rounds, setRounds), cells); err != nil {
		return nil, err
	}
	for i := range c.Points {
		c.Points[i].Cores, c.Points[i].SecondsPerGB = cells[i].median(0), cells[i].median(1)
	}
	return c, nil
}

func (c *CPU) table(b *strings.Builder) {
	fmt.Fprintf(b, "processor time of copies of %s to the GPU, one after the other (Figure 12)\n", size(c.Bytes))
	w := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "links\tcores\tper link\tseconds per GB\t")
	for _, p := range c.Points {
		name := fmt.Sprint(p.Links)
		if p.Native {
			name = "native"
		}
		fmt.Fprintf(w, "%s\t%.2f\t%.2f\t%.4f\t\n", name, p.Cores, p.Cores/float64(p.Links), p.SecondsPerGB)
	}
	w.Flush() //nolint:errcheck // writing to memory does not fail
	b.WriteString("\n")
}

func (c *CPU) targets() []Target {
	if c == nil {
		return nil
	}
	last := c.Points[len(c.Points)-1]
	return []Target{atMost(fmt.Sprintf("processor time of the engine over %d links", last.Links), last.Cores, maxCores, "cores")}
}

func (c *CPU) figure(on string) *figure.Lines {
	engine := figure.Series{Name: "engine", Look: figure.LookA, Line: true, Marks: true}
	native := figure.Series{Name: "native copy over one link", Look: figure.LookB, Line: true}
	for _, p := range c.Points {
		if p.Native {
			for _, x := range []int{1, len(c.Points) - 1} {
				native.Points = append(native.Points, figure.Point{X: float64(x), Y: p.Cores})
			}
			continue
		}
		engine.Points = append(engine.Points, figure.Point{X: float64(p.Links), Y: p.Cores})
	}
	return &figure.Lines{
		Title: "Processor time of copies to the GPU", Note: fmt.Sprintf("Copies of %s, one after the other, on %s", size(c.Bytes), on),
		X:      figure.Axis{Label: "PCIe links"},
		Panels: []figure.Panel{{Y: figure.Axis{Label: "cores"}, Series: []figure.Series{engine, native}, Height: panelHeight}},
	}
}

// Chunks are copies by chunk size and chunks in flight.
type Chunks struct {
	Bytes  int64        `json:"bytes"`
	Points []ChunkPoint `json:"points"`
	// Best is the best of each direction.
	Best []ChunkPoint `json:"best"`
}

// ChunkPoint is a copy over all links.
type ChunkPoint struct {
	Direction  Direction `json:"direction"`
	ChunkBytes int64     `json:"chunk_bytes"`
	// Depth is the number of chunks in flight on each link.
	Depth          int     `json:"depth"`
	BytesPerSecond float64 `json:"bytes_per_s"`
}

// chunkBytes is the size of the copy that chunk sizes are compared with, the paper's.
const chunkBytes = 512 << 20

func (r *rig) chunks(ctx context.Context) (*Chunks, error) {
	c := &Chunks{Bytes: min(chunkBytes, r.o.copyBytes())}
	var cells []*cell
	for _, d := range directions {
		for _, depth := range r.o.Depths {
			for _, chunk := range r.o.Chunks {
				t := tuning{relays: r.o.Relays, chunk: chunk, depth: depth}
				if err := r.checkEngine(ctx, d, c.Bytes, t); err != nil {
					return nil, err
				}
				cells = append(cells, r.engineCell(d, c.Bytes, t))
				c.Points = append(c.Points, ChunkPoint{Direction: d, ChunkBytes: chunk, Depth: depth})
			}
		}
	}
	if err := r.measure(ctx, ChunksPart, r.o.Rounds, cells); err != nil {
		return nil, err
	}
	for i := range c.Points {
		c.Points[i].BytesPerSecond = cells[i].median(0)
	}
	for _, d := range directions {
		c.Best = append(c.Best, bestChunk(c.Points, d))
	}
	return c, nil
}

// goodEnough is the part of the best rate that counts as the best one: of chunk sizes that come
// so near, the one with the fewest bytes in flight is preferred, as a copy of a higher priority
// waits for these, and of equal ones the one with smaller chunks, which links share more evenly.
const goodEnough = 0.99

// bestChunk is the best point of a direction.
func bestChunk(points []ChunkPoint, d Direction) ChunkPoint {
	most := 0.0
	for _, p := range points {
		if p.Direction == d {
			most = max(most, p.BytesPerSecond)
		}
	}
	var best ChunkPoint
	for _, p := range points {
		if p.Direction != d || p.BytesPerSecond < goodEnough*most {
			continue
		}
		if in, bestIn := p.ChunkBytes*int64(p.Depth), best.ChunkBytes*int64(best.Depth); best.ChunkBytes == 0 || in < bestIn || in == bestIn && p.ChunkBytes < best.ChunkBytes {
			best = p
		}
	}
	return best
}

func (c *Chunks) table(b *strings.Builder) {
	for i, d := range directions {
		best := c.Best[i]
		fmt.Fprintf(b, "copies of %s over all links, %s, GB/s by chunk size and chunks in flight on each link (Figure 13); best: %s, %d in flight\n",
			size(c.Bytes), d.words(), size(best.ChunkBytes), best.Depth)
		grid(b, "in flight", c.Points, func(p ChunkPoint) (Direction, string, int64, float64) {
			return p.Direction, fmt.Sprint(p.Depth), p.ChunkBytes, p.BytesPerSecond
		}, d)
	}
}

func (c *Chunks) figure(on string) *figure.Lines {
	chart := &figure.Lines{
		Title: "Bandwidth by chunk size and chunks in flight",
		Note:  fmt.Sprintf("A copy of %s over all links, on %s", size(c.Bytes), on),
		X:     figure.Axis{Label: "size of a chunk (MiB)", Log: true},
	}
	for _, d := range directions {
		var series []figure.Series
		last := 0
		for _, p := range c.Points {
			if p.Direction != d {
				continue
			}
			if p.Depth != last {
				series = append(series, figure.Series{Name: fmt.Sprintf("in flight: %d", p.Depth), Look: looks[len(series)%len(looks)], Line: true, Marks: true})
				last = p.Depth
			}
			s := &series[len(series)-1]
			s.Points = append(s.Points, figure.Point{X: mib(p.ChunkBytes), Y: p.BytesPerSecond / 1e9})
		}
		chart.Panels = append(chart.Panels, panel(len(chart.Panels), d, series...))
	}
	return chart
}
