package multipath

import (
	"context"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/moeserve/moeserve/device"
)

// split is a copy between host and GPU that is cut in chunks, each of which takes the path that
// its number says, whatever goes on meanwhile: what the engine is compared with. A relay copies
// over its PCIe link on one stream and to or from the GPU on another, with Depth buffers.
type split struct {
	// paths are the relays that chunks take in turn; device.Host is the direct path.
	paths []device.Space
	chunk int64
	depth int
}

// statically is a round-robin split over the direct path and relays.
func (o *Options) statically(relays []device.Space) split {
	return split{paths: append([]device.Space{device.Host}, relays...), chunk: o.ChunkBytes, depth: staticDepth}
}

// staticDepth is the number of buffers of a relay in a static split: one is filled while the
// other is emptied.
const staticDepth = 2

// hops are the streams of a relay, in the order in which chunks pass them.
func (r *rig) hops(d Direction, relay device.Space) (first, second device.Stream, err error) {
	on := [2]device.Space{relay, relay}
	if d == FromGPU {
		on[0] = r.o.GPU // a copy between GPUs is faster on a stream of the source
	}
	name := fmt.Sprintf("%s over %s", d, relay)
	if first, err = r.stream(on[0], name+", first hop"); err != nil {
		return nil, nil, err
	}
	second, err = r.stream(on[1], name+", second hop")
	return first, second, err
}

// enqueue enqueues the copy of n bytes, and returns the streams on which it ends.
func (r *rig) enqueue(d Direction, n int64, s split) (last []device.Stream, err error) {
	dst, src := r.ends(d, n)
	direct, err := r.stream(r.o.GPU, string(d))
	if err != nil {
		return nil, err
	}
	last = append(last, direct)
	// freed are the events behind which each buffer of a relay is free again.
	freed := map[device.Space][]device.Event{}
	used := 0
	for i, at := 0, int64(0); at < n; i, at = i+1, at+s.chunk {
		bytes := min(s.chunk, n-at)
		to, from := dst.Slice(at, bytes).Range, src.Slice(at, bytes).Range
		relay := s.paths[i%len(s.paths)]
		if relay == device.Host {
			if err := direct.Copy(to, from); err != nil {
				return nil, err
			}
			continue
		}
		first, second, err := r.hops(d, relay)
		if err != nil {
			return nil, err
		}
		full, err := r.event(used)
		if err != nil {
			return nil, err
		}
		empty, err := r.event(used + 1)
		if err != nil {
			return nil, err
		}
		used += 2
		before := freed[relay]
		if len(before) == 0 {
			last = append(last, second)
		}
		number := len(before)
		freed[relay] = append(before, empty)
		buffer := r.relayBuffer(relay, 0, d, number%s.depth, s.chunk).Slice(0, bytes).Range
		if number >= s.depth {
			if err := first.Wait(before[number-s.depth]); err != nil {
				return nil, err
			}
		}
		for _, hop := range []struct {
			on       device.Stream
			to, from device.Range
			after    device.Event
			end      device.Event
		}{{first, buffer, from, nil, full}, {second, to, buffer, full, empty}} {
			if hop.after != nil {
				if err := hop.on.Wait(hop.after); err != nil {
					return nil, err
				}
			}
			if err := hop.on.Copy(hop.to, hop.from); err != nil {
				return nil, err
			}
			if err := hop.on.Record(hop.end); err != nil {
				return nil, err
			}
		}
	}
	return last, nil
}

// split makes the copy and returns the time until the host sees that it has ended.
func (r *rig) split(ctx context.Context, d Direction, n int64, s split) (time.Duration, error) {
	began := r.o.Machine.Now()
	last, err := r.enqueue(d, n, s)
	if err != nil {
		return 0, err
	}
	for _, x := range last {
		if err := x.Synchronize(ctx); err != nil {
			return 0, err
		}
	}
	return max(r.o.Machine.Now()-began, 1), nil
}

// splitCell measures the rate of a split.
func (r *rig) splitCell(d Direction, s split) *cell {
	return &cell{run: func(ctx context.Context) ([]float64, error) {
		took, err := r.split(ctx, d, r.o.Bytes, s)
		return []float64{float64(r.o.Bytes) / took.Seconds()}, err
	}}
}

// checkSplit checks the bytes of a split once.
func (r *rig) checkSplit(ctx context.Context, d Direction, s split) error {
	return r.check(ctx, d, r.o.Bytes, func() error {
		_, err := r.split(ctx, d, r.o.Bytes, s)
		return err
	})
}

// Static is a static split by the number of paths.
type Static struct {
	Bytes      int64         `json:"bytes"`
	ChunkBytes int64         `json:"chunk_bytes"`
	Points     []StaticPoint `json:"points"`
}

// StaticPoint is a split over a number of paths; the first is the GPU's own link.
type StaticPoint struct {
	Direction      Direction `json:"direction"`
	Paths          int       `json:"paths"`
	BytesPerSecond float64   `json:"bytes_per_s"`
	// Own is what the same GPUs reach when each copies its own data, all at once.
	Own float64 `json:"own_bytes_per_s"`
}

// static measures static splits over 1, 2, … paths.
func (r *rig) static(ctx context.Context) (*Static, error) {
	s := &Static{Bytes: r.o.Bytes, ChunkBytes: r.o.ChunkBytes}
	var cells []*cell
	for _, d := range directions {
		for n := range len(r.o.Relays) + 1 {
			x := r.o.statically(r.o.Relays[:n])
			if err := r.checkSplit(ctx, d, x); err != nil {
				return nil, err
			}
			flows, err := r.owns(n+1, d)
			if err != nil {
				return nil, err
			}
			cells = append(cells, r.splitCell(d, x), r.flowCell(flows))
			s.Points = append(s.Points, StaticPoint{Direction: d, Paths: n + 1})
		}
	}
	if err := r.measure(ctx, StaticPart, r.o.Rounds, cells); err != nil {
		return nil, err
	}
	for i := range s.Points {
		s.Points[i].BytesPerSecond, s.Points[i].Own = cells[2*i].median(0), sum(cells[2*i+1].medians())
	}
	return s, nil
}

// of are the points of a direction.
func (s *Static) of(d Direction) []StaticPoint {
	var points []StaticPoint
	for _, p := range s.Points {
		if p.Direction == d {
			points = append(points, p)
		}
	}
	return points
}

func (s *Static) table(b *strings.Builder) {
	fmt.Fprintf(b, "static round-robin split of %s in chunks of %s, GB/s; own: the same GPUs, each copying its own data, all at once\n", size(s.Bytes), size(s.ChunkBytes))
	w := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "paths\th2d\town\td2h\town\t")
	out := s.of(FromGPU)
	for i, p := range s.of(ToGPU) {
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t\n", p.Paths, gb(p.BytesPerSecond), gb(p.Own), gb(out[i].BytesPerSecond), gb(out[i].Own))
	}
	w.Flush() //nolint:errcheck // writing to memory does not fail
	b.WriteString("\n")
}

// RelayCopies are copies over one relay alone, by chunk size and number of buffers.
type RelayCopies struct {
	Relay  string       `json:"relay"`
	Bytes  int64        `json:"bytes"`
	Points []RelayPoint `json:"points"`
}

// RelayPoint is one of them.
type RelayPoint struct {
	Direction      Direction `json:"direction"`
	ChunkBytes     int64     `json:"chunk_bytes"`
	Depth          int       `json:"depth"`
	BytesPerSecond float64   `json:"bytes_per_s"`
	// ShareOfLink is the part of the rate of the relay's own link that this is.
	ShareOfLink float64 `json:"share_of_link"`
}

// relay measures copies over the first relay.
func (r *rig) relay(ctx context.Context) (*RelayCopies, error) {
	relay := r.o.Relays[0]
	x := &RelayCopies{Relay: relay.String(), Bytes: r.o.Bytes}
	var cells []*cell
	own := map[Direction]*cell{}
	for _, d := range directions {
		f, err := r.own(1, d)
		if err != nil {
			return nil, err
		}
		own[d] = r.flowCell([]flow{f})
		cells = append(cells, own[d])
	}
	for _, d := range directions {
		for _, depth := range r.o.Depths {
			for _, chunk := range r.o.Chunks {
				s := split{paths: []device.Space{relay}, chunk: chunk, depth: depth}
				if err := r.checkSplit(ctx, d, s); err != nil {
					return nil, err
				}
				cells = append(cells, r.splitCell(d, s))
				x.Points = append(x.Points, RelayPoint{Direction: d, ChunkBytes: chunk, Depth: depth})
			}
		}
	}
	if err := r.measure(ctx, RelayPart, r.o.Rounds, cells); err != nil {
		return nil, err
	}
	for i := range x.Points {
		p := &x.Points[i]
		p.BytesPerSecond = cells[len(directions)+i].median(0)
		p.ShareOfLink = p.BytesPerSecond / own[p.Direction].median(0)
	}
	return x, nil
}

func (x *RelayCopies) table(b *strings.Builder) {
	for _, d := range directions {
		fmt.Fprintf(b, "copies of %s over %s alone, %s, GB/s by chunk size and number of buffers\n", size(x.Bytes), x.Relay, d.words())
		grid(b, "buffers", x.Points, func(p RelayPoint) (Direction, string, int64, float64) {
			return p.Direction, fmt.Sprint(p.Depth), p.ChunkBytes, p.BytesPerSecond
		}, d)
	}
}

// grid writes rates of a direction, a line for each name and a column for each chunk size, as
// both come.
func grid[T any](b *strings.Builder, corner string, points []T, read func(T) (Direction, string, int64, float64), only Direction) {
	w := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	var rows []string
	first := ""
	head := corner + "\t"
	for _, p := range points {
		d, name, chunk, rate := read(p)
		if d != only {
			continue
		}
		if first == "" {
			first = name
		}
		if name == first {
			head += size(chunk) + "\t"
		}
		if len(rows) == 0 || !strings.HasPrefix(rows[len(rows)-1], name+"\t") {
			rows = append(rows, name+"\t")
		}
		rows[len(rows)-1] += gb(rate) + "\t"
	}
	fmt.Fprintln(w, head)
	for _, row := range rows {
		fmt.Fprintln(w, row)
	}
	w.Flush() //nolint:errcheck // writing to memory does not fail
	b.WriteString("\n")
}
