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
	// route_sort takes up to that many tokens, which select up to that many experts each, of mostRouted.
	sortedRows, sortedEach = 32, 32
)

func (l *streamState) route(o *kernels.Route) error {
	rows, experts := o.Logits.Shape[0], o.Logits.Shape[1]
	if experts > maxExperts {
		return fmt.Errorf("cuda: %s: Logits is %v, want at most %d experts", o.Name(), o.Logits, maxExperts)
	}
	if err := alignedRuns(o.Name(), &o.Runs); err != nil {
		return err
	}
	a := routeArguments(o)
	if sortsFew(o) {
		return launch(l, o.Name(), routeSort, grid{x: 1, threads: max(32*rows, mostRouted)}, &a)
	}
	err := launch(l, o.Name(), routeKernel, grid{x: ceil(rows, routeRows), threads: 32 * routeRows, shared: routeRows * experts * 4}, &a.route)
	if err != nil || o.Order.None() {
		return err
	}
	sorting := o.Sorting()
	if err := l.group(&sorting); err != nil || o.Runs.None() {
		return err
	}
	return launch(l, o.Name(), runsKernel, grid{x: 1, threads: 32}, &runsArgs{
		offsets: address(&o.Offsets), runs: address(&o.Runs), experts: int32(experts), pairs: int32(o.Order.Shape[0]),
	})
}

// alignedRuns checks that Runs can be accessed a run at a time.
func alignedRuns(op string, runs *kernels.Tensor) error {
	if runs.Addr%16 != 0 {
		return fmt.Errorf("cuda: %s: Runs is at %#x, want a multiple of 16", op, uint64(runs.Addr))
	}
	return nil
}

func routeArguments(o *kernels.Route) routeSortArgs {
	return routeSortArgs{
		route: routeArgs{
			logits: address(&o.Logits), ids: address(&o.IDs), weights: address(&o.Weights), counts: address(&o.Counts),
			stride: int64(o.Logits.Stride[0]), rows: int64(o.Logits.Shape[0]),
			experts: int32(o.Logits.Shape[1]), k: int32(o.IDs.Shape[1]), method: int32(o.Method), limit: 2 * o.Jitter,
		},
		offsets: address(&o.Offsets), order: address(&o.Order), runs: address(&o.Runs),
	}
}

// sortsFew reports whether one block can route and sort, see sort_rows in route_sort.cuh.
func sortsFew(o *kernels.Route) bool {
	rows, experts, k := o.Logits.Shape[0], o.Logits.Shape[1], o.IDs.Shape[1]
	return !o.Order.None() && rows > 0 && rows <= sortedRows && experts <= mostRouted && k <= sortedEach
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
