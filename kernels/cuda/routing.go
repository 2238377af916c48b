package cuda

import (
	"fmt"

	"github.com/moeserve/moeserve/kernels"
)

// routeRows is the number of tokens that a block routes, one warp each; their scores are in
// shared memory.
const (
	routeRows  = 4
	maxExperts = defaultShared / 4 / routeRows
)

// maxThreads is the maximum number of threads of a block.
const maxThreads = 1024

func (l *streamState) route(o *kernels.Route) error {
	rows, experts := o.Logits.Shape[0], o.Logits.Shape[1]
	if experts > maxExperts {
		return fmt.Errorf("cuda: %s: Logits is %v, want at most %d experts", o.Name(), o.Logits, maxExperts)
	}
	a := routeArgs{
		logits: address(&o.Logits), ids: address(&o.IDs), weights: address(&o.Weights), counts: address(&o.Counts),
		stride: int64(o.Logits.Stride[0]), rows: int64(rows),
		experts: int32(experts), k: int32(o.IDs.Shape[1]), method: int32(o.Method), limit: 2 * o.Jitter,
	}
	sorts := !o.Order.None()
	if g := routeSortGrid(rows, experts, o.IDs.Shape[1]); sorts && g.x > 0 {
		return launch(l, o.Name(), routeSort, g, &routeSortArgs{
			route: a, offsets: address(&o.Offsets), order: address(&o.Order),
		})
	}
	err := launch(l, o.Name(), routeKernel, grid{x: ceil(rows, routeRows), threads: 32 * routeRows, shared: routeRows * experts * 4}, &a)
	if err != nil || !sorts {
		return err
	}
	sorting := o.Sorting()
	return l.group(&sorting)
}

// routeSortGrid is the block that routes and sorts, see route.cu, if that has enough threads and
// shared memory.
func routeSortGrid(rows, experts, k int) (g grid) {
	threads, pairs := rows*ceil(experts, 32)*32, rows*k
	shared := 4 * (2*threads + 3*pairs + ceil(pairs, 32)*experts + experts)
	if threads > 0 && threads <= maxThreads && shared <= defaultShared {
		g = grid{x: 1, threads: threads, shared: shared}
	}
	return g
}

// Up to groupFewPairs pairs are sorted with one warp per expert.
const groupFewPairs = 128

func (l *streamState) group(o *kernels.SortByExpert) error {
	experts := o.Offsets.Shape[0] - 1
	k, threads := groupKernel, 1024
	if o.Order.Shape[0] <= groupFewPairs {
		k, threads = groupFew, 32
	}
	return launch(l, o.Name(), k, grid{x: experts, threads: threads}, &sortArgs{
		ids: address(&o.IDs), offsets: address(&o.Offsets), order: address(&o.Order),
		pairs: int64(o.Order.Shape[0]), experts: int32(experts),
	})
}
