package models

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/moeserve/moeserve/kernels"
)

// pieceBytes is the maximum that Load passes to a sink at once; a longer row is a piece of its
// own.
const pieceBytes = 8 << 20

// loaders is the maximum number of goroutines that Load reads with, one per processor:
// converting weights and generating dummy weights is CPU-bound, a disk is saturated by fewer.
const loaders = 16

// piece is some rows of one segment of a placement.
type piece struct {
	tensor  int // in Layout.plan
	segment int
	row, n  int // rows within the segment
}

// Load streams all weights of src, for which l was made, to sink: in pieces of whole rows, at
// most 8 MB (or one longer row), in the source's order, from a few goroutines, while the source
// prefetches the next pieces. progress, unless nil, is called with the bytes done and the
// total, by one goroutine at a time. Load returns when everything is loaded, at the first
// error, or when ctx is done.
func Load(ctx context.Context, src Source, l *Layout, sink Sink, progress func(done, total int64)) error {
	group, ctx := errgroup.WithContext(ctx)
	workers := min(loaders, runtime.GOMAXPROCS(0))
	// As far ahead as the disk reads.
	pieces := make(chan piece, 2*workers)
	left := make([]atomic.Int64, len(l.plan)) // rows of each tensor not yet loaded
	var total int64
	for i, p := range l.plan {
		for _, s := range p.parts {
			left[i].Add(int64(s.rows))
			total += int64(s.rows) * p.rowBytes()
		}
	}
	group.Go(func() error {
		defer close(pieces)
		for i, p := range l.plan {
			step := max(1, int(pieceBytes/p.rowBytes()))
			for j, s := range p.parts {
				for row := 0; row < s.rows; row += step {
					n := min(step, s.rows-row)
					in := int64(p.cols) * int64(p.from.Size())
					src.Prefetch(p.name, int64(s.row+row)*in, int64(n)*in)
					select {
					case pieces <- piece{tensor: i, segment: j, row: row, n: n}:
					case <-ctx.Done():
						return ctx.Err()
					}
				}
			}
		}
		return nil
	})
	var (
		mu   sync.Mutex
		done int64
	)
	for range workers {
		group.Go(func() error {
			var scratch conversion
			for p := range pieces {
				place := &l.plan[p.tensor]
				if err := ctx.Err(); err != nil {
					return err
				}
				if err := place.load(src, sink, p, &scratch); err != nil {
					return fmt.Errorf("models: load tensor %q of %s: %w", place.name, src.Origin(), err)
				}
				if left[p.tensor].Add(-int64(p.n)) == 0 {
					src.Release(place.name)
				}
				if progress != nil {
					mu.Lock()
					done += int64(p.n) * place.rowBytes()
					progress(done, total)
					mu.Unlock()
				}
			}
			return nil
		})
	}
	return group.Wait()
}

// rowBytes of a row as it is kept.
func (p *placement) rowBytes() int64 { return int64(p.cols) * int64(p.to.Size()) }

// load moves one piece.
func (p *placement) load(src Source, sink Sink, at piece, scratch *conversion) error {
	s := p.parts[at.segment]
	in := int64(p.cols) * int64(p.from.Size())
	return src.Read(p.name, int64(s.row+at.row)*in, int64(at.n)*in, func(data []byte) error {
		if p.from != p.to {
			data = scratch.convert(data, p.from, p.to)
		}
		if s.off >= 0 {
			return sink.Dense(s.off+int64(at.row)*p.rowBytes(), data)
		}
		return sink.Expert(s.layer, s.expert, s.part, at.row, data)
	})
}

// conversion is room for a piece in another type.
type conversion struct {
	out    []byte
	floats [4096]float32
}

// convert rounds data to another type, to nearest; what it returns is valid
// until the next call.
func (c *conversion) convert(data []byte, from, to kernels.DType) []byte {
	n := len(data) / from.Size()
	if need := n * to.Size(); cap(c.out) < need {
		c.out = make([]byte, need)
	}
	c.out = c.out[:n*to.Size()]
	for i := 0; i < n; i += len(c.floats) {
		f := c.floats[:min(len(c.floats), n-i)]
		kernels.ToFloat32(f, data[i*from.Size():][:len(f)*from.Size()], from)
		kernels.FromFloat32(c.out[i*to.Size():][:len(f)*to.Size()], f, to)
	}
	return c.out
}
