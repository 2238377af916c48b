package kv

import (
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/eval"
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

func (r *rig) lane(space device.Space, name string) (*eval.Lane, error) {
	l, err := eval.OpenLane(r.machine, space, name)
	if err == nil {
		r.closers = append(r.closers, l.Close)
	}
	return l, err
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

// rate is bytes over a time, in bytes/s.
func rate(bytes int64, d time.Duration) float64 { return float64(bytes) / d.Seconds() }
