package kv

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/transfer"
)

// rig is what a measurement allocates, to be closed in the opposite order.
type rig struct {
	machine device.Machine
	closers []func() error
}

// close releases everything.
func (r *rig) close() error {
	var errs []error
	for _, f := range slices.Backward(r.closers) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// memory allocates a pool of blocks. That of the host is written, so that its pages are
// there.
func (r *rig) memory(space device.Space, bytes int64, label string) (device.Region, error) {
	m, err := r.machine.Alloc(space, bytes, "KV blocks measured, "+label)
	if err != nil {
		return device.Region{}, err
	}
	r.closers = append(r.closers, m.Free)
	if space == device.Host && r.machine.Capabilities().KeepsData {
		clear(m.Write(0, bytes))
	}
	return m.Region(0, bytes), nil
}

// lane is a stream with events around what is measured on it.
type lane struct {
	stream     device.Stream
	start, end device.Event
}

func (r *rig) lane(space device.Space, name string) (*lane, error) {
	l := &lane{}
	for _, e := range []*device.Event{&l.start, &l.end} {
		var err error
		if *e, err = r.machine.NewEvent(); err != nil {
			return nil, err
		}
		r.closers = append(r.closers, (*e).Close)
	}
	var err error
	if l.stream, err = r.machine.NewStream(space, device.StreamOptions{Name: name}); err != nil {
		return nil, err
	}
	r.closers = append(r.closers, l.stream.Close)
	return l, nil
}

// enqueue enqueues n operations on each lane, between its events: first number 0 of each, so
// that none waits for the host to enqueue all of another's.
func enqueue(lanes []*lane, n int, operation func(lane, number int) error) error {
	for _, l := range lanes {
		if err := l.stream.Record(l.start); err != nil {
			return err
		}
	}
	for number := range n {
		for i := range lanes {
			if err := operation(i, number); err != nil {
				return err
			}
		}
	}
	for _, l := range lanes {
		if err := l.stream.Record(l.end); err != nil {
			return err
		}
	}
	return nil
}

// span waits for what was enqueued on lanes, and returns the time from the first one's start
// to the last one's end.
func span(ctx context.Context, lanes []*lane) (time.Duration, error) {
	var first, last time.Duration
	for i, l := range lanes {
		if err := l.stream.Synchronize(ctx); err != nil {
			return 0, err
		}
		began, err := l.start.Time()
		if err != nil {
			return 0, err
		}
		ended, err := l.end.Time()
		if err != nil {
			return 0, err
		}
		if i == 0 || began < first {
			first = began
		}
		last = max(last, ended)
	}
	// The clock may be coarser than a copy is long.
	return max(last-first, 1), nil
}

// blocks of one size fill a region from its start.
type blocks struct {
	region device.Region
	bytes  int64
}

// run is the region of n blocks from the first on.
func (b blocks) run(first, n int) device.Region {
	return b.region.Slice(int64(first)*b.bytes, int64(n)*b.bytes)
}

// scattered are pieces of one block each, for n blocks: every block occurs once on each
// side, in an order that the seed determines.
func scattered(dst, src blocks, n int, seed uint64) []transfer.Piece {
	to, from := rand.New(rand.NewPCG(seed, 1)).Perm(n), rand.New(rand.NewPCG(seed, 2)).Perm(n)
	pieces := make([]transfer.Piece, n)
	for i := range pieces {
		pieces[i] = transfer.Piece{Dst: dst.run(to[i], 1), Src: src.run(from[i], 1)}
	}
	return pieces
}

// contiguous is one piece of n blocks, the same blocks on both sides.
func contiguous(dst, src blocks, first, n int) transfer.Piece {
	return transfer.Piece{Dst: dst.run(first, n), Src: src.run(first, n)}
}

// median of durations, which it sorts.
func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// rate is bytes over a time, in bytes/s.
func rate(bytes int64, d time.Duration) float64 { return float64(bytes) / d.Seconds() }
