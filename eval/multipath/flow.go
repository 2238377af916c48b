package multipath

import (
	"context"
	"fmt"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/eval"
)

// flow is copies over one link, one after the other.
type flow struct {
	stream device.Stream
	// dst and src are rings of blocks of bytes: copy n uses block n of each.
	dst, src device.Region
	bytes    int64
	copies   int
}

// block is block n of a ring.
func (f *flow) block(ring device.Region, n int) device.Range {
	blocks := max(ring.Bytes/f.bytes, 1)
	return ring.Slice(int64(n)%blocks*f.bytes, f.bytes).Range
}

// progress is how far a flow was at which times: copy n has ended at at[n+1], and the first has
// begun at at[0].
type progress struct {
	at    []time.Duration
	bytes int64 // of one copy
}

// running are flows that have been enqueued, with the marks behind their copies.
type running struct {
	flows []flow
	marks [][]device.Event
}

// nativeMark is the number of the timed event that native copies use, flowMarks that of the first
// one of flows.
const (
	nativeMark = iota
	flowMarks
)

// start enqueues the copies of flows. turns 0: all of them go on at once; otherwise one after the
// other, so many copies of each at a time. Until they have ended no other flows may be started.
func (r *rig) start(flows []flow, turns int) (*running, error) {
	x := &running{flows: flows, marks: make([][]device.Event, len(flows))}
	used, most := flowMarks, 0
	for i := range flows {
		most = max(most, flows[i].copies)
		for range flows[i].copies + 1 {
			e, err := r.timed(used)
			if err != nil {
				return nil, err
			}
			x.marks[i] = append(x.marks[i], e)
			used++
		}
		if err := flows[i].stream.Record(x.marks[i][0]); err != nil {
			return nil, err
		}
	}
	var before device.Event
	for n := 0; n < most; n += max(turns, 1) {
		for i := range flows {
			f := &flows[i]
			if turns > 0 && before != nil {
				if err := f.stream.Wait(before); err != nil {
					return nil, err
				}
			}
			for k := n; k < min(n+max(turns, 1), f.copies); k++ {
				if err := f.stream.Copy(f.block(f.dst, k), f.block(f.src, k)); err != nil {
					return nil, err
				}
				before = x.marks[i][k+1]
				if err := f.stream.Record(before); err != nil {
					return nil, err
				}
			}
		}
	}
	return x, nil
}

// began waits until the first copy of the first flow can go on.
func (x *running) began(ctx context.Context) error {
	if len(x.flows) == 0 {
		return nil
	}
	return x.marks[0][0].Synchronize(ctx)
}

// end waits for all copies, and returns how they went on.
func (x *running) end(ctx context.Context) ([]progress, error) {
	all := make([]progress, len(x.flows))
	for i := range x.flows {
		all[i].bytes = x.flows[i].bytes
		if err := x.flows[i].stream.Synchronize(ctx); err != nil {
			return nil, err
		}
		for _, e := range x.marks[i] {
			at, err := e.Time()
			if err != nil {
				return nil, err
			}
			all[i].at = append(all[i].at, at)
		}
	}
	return all, nil
}

// rates are those of flows that go on at once, in bytes/s, while all of them are busy: between
// the last one's start and the first one's end. Where none is at the same time as all others, as
// on devices without rates, each one's rate is its own.
func rates(all []progress) []float64 {
	from, to := time.Duration(0), time.Duration(1<<62)
	for _, p := range all {
		from, to = max(from, p.at[0]), min(to, p.at[len(p.at)-1])
	}
	result := make([]float64, len(all))
	for i, p := range all {
		a, b := from, to
		if b <= a {
			a, b = p.at[0], max(p.at[len(p.at)-1], p.at[0]+1)
		}
		result[i] = (p.done(b) - p.done(a)) / (b - a).Seconds()
	}
	return result
}

// done is how many bytes the flow had copied at a time; a copy goes on evenly.
func (p *progress) done(t time.Duration) float64 {
	if t <= p.at[0] {
		return 0
	}
	for n, end := range p.at[1:] {
		if begin := p.at[n]; t < end {
			return float64(p.bytes) * (float64(n) + float64(t-begin)/float64(end-begin))
		}
	}
	return float64(p.bytes) * float64(len(p.at)-1)
}

// busyRates are the rates of flows at once.
func (r *rig) busyRates(ctx context.Context, flows []flow) ([]float64, error) {
	x, err := r.start(flows, 0)
	if err != nil {
		return nil, err
	}
	all, err := x.end(ctx)
	if err != nil {
		return nil, err
	}
	return rates(all), nil
}

// cell is one thing that is measured, once in each round; each time it gives the same number of
// values.
type cell struct {
	run    func(context.Context) ([]float64, error)
	values [][]float64
}

// median of the cell's value of a number.
func (c *cell) median(i int) float64 { return eval.Median(c.values[i]) }

// medians are all of them.
func (c *cell) medians() []float64 {
	all := make([]float64, len(c.values))
	for i := range all {
		all[i] = c.median(i)
	}
	return all
}

func sum(values []float64) float64 {
	total := 0.0
	for _, v := range values {
		total += v
	}
	return total
}

// measure runs all cells in rounds, so that what disturbs the machine disturbs all alike. The
// first round does not count.
func (r *rig) measure(ctx context.Context, part Part, rounds int, cells []*cell) error {
	for round := range rounds + 1 {
		for i, c := range cells {
			values, err := c.run(ctx)
			if err != nil {
				return fmt.Errorf("multipath: %s: %w", part, err)
			}
			if round > 0 {
				if c.values == nil {
					c.values = make([][]float64, len(values))
				}
				for j, v := range values {
					c.values[j] = append(c.values[j], v)
				}
			}
			if r.o.Progress != nil {
				r.o.Progress(part, round*len(cells)+i+1, (rounds+1)*len(cells))
			}
		}
	}
	return nil
}
