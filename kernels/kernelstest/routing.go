package kernelstest

import (
	"fmt"
	"math"

	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/philox"
)

// routeWant is the reference for one row of scores.
func routeWant(method kernels.RouteMethod, jitter float64, s []float64, k int) (ids, weights []float64) {
	selected := make([]bool, len(s))
	largest := func() int {
		best := -1
		for i, v := range s {
			if !selected[i] && (best < 0 || v > s[best]) {
				best = i
			}
		}
		return best
	}
	if method == kernels.SparseMixer {
		for range k {
			m := largest()
			var sum float64
			for i, v := range s {
				if masked := (s[m]-v)/max(math.Abs(v), s[m]) > 2*jitter; !selected[i] && !masked {
					sum += math.Exp(v - s[m])
				}
			}
			ids, weights = append(ids, float64(m)), append(weights, 1/sum)
			selected[m] = true
		}
		return ids, weights
	}
	m := s[largest()]
	var sum, total float64
	for _, v := range s {
		sum += math.Exp(v - m)
	}
	for range k {
		i := largest()
		selected[i] = true
		ids, weights = append(ids, float64(i)), append(weights, math.Exp(s[i]-m)/sum)
		total += weights[len(weights)-1]
	}
	if method == kernels.SoftmaxRenorm {
		for i := range weights {
			weights[i] /= total
		}
	}
	return ids, weights
}

func testRoute(r *rig) {
	type shape struct {
		n, experts, k int
		method        kernels.RouteMethod
		mean, spread  float64
	}
	var shapes []shape
	for _, n := range rowCounts {
		for _, ek := range [][2]int{{4, 1}, {8, 2}, {16, 2}, {60, 4}, {64, 8}, {128, 8}, {5, 5}} {
			shapes = append(shapes, shape{n, ek[0], ek[1], kernels.Softmax, 0, 1.5}, shape{n, ek[0], ek[1], kernels.SoftmaxRenorm, 0, 4})
		}
		for _, e := range []int{2, 4, 16} {
			// All positive, all negative, both; the mask matters where scores are close.
			shapes = append(shapes, shape{n, e, 2, kernels.SparseMixer, 3, 0.05}, shape{n, e, 2, kernels.SparseMixer, -3, 0.05}, shape{n, e, 2, kernels.SparseMixer, 0, 1})
		}
	}
	// Of many rows, many experts of a row, and experts of all rows.
	for _, s := range [][3]int{{32, 128, 32}, {32, 127, 9}, {25, 40, 32}, {32, 5, 5}, {33, 60, 4}} {
		shapes = append(shapes, shape{s[0], s[1], s[2], kernels.SoftmaxRenorm, 0, 1.5}, shape{s[0], s[1], s[2], kernels.Softmax, 0, 1.5})
	}
	// With runs, in one block and in several.
	const withRuns = 3
	for _, ek := range [][2]int{{8, 2}, {60, 4}, {128, 8}, {200, 8}} {
		for _, n := range []int{withRuns, kernels.MaxRunRows} {
			shapes = append(shapes, shape{n, ek[0], ek[1], kernels.SoftmaxRenorm, 0, 4})
		}
	}
	for i, s := range shapes {
		r.run(fmt.Sprintf("%+v", s), func(r *rig) {
			const jitter = 0.01
			logits := r.normal(r.rows(i%2 == 0, "Logits", kernels.F32, s.n, s.experts), s.mean, s.spread)
			for n := range s.n / 3 { // ties: equal scores at two or more places, all equal, all zero
				row := logits.in(logits.buffer.before, n)
				switch n % 3 {
				case 0:
					copy(row[4*(s.experts-1):], row[:4])
				case 1:
					for e := range s.experts {
						copy(row[4*e:], row[:4])
					}
				case 2:
					clear(row)
				}
			}
			ids, weights := r.dense("IDs", kernels.I32, s.n, s.k), r.dense("Weights", kernels.F32, s.n, s.k)
			counts, countsArg := optional(i%3 != 0, func() tensor {
				return r.dense("Counts", kernels.I64, s.experts).set(func(i int) float64 { return float64(i) * 1e10 })
			})
			ids.writes()
			weights.writes()
			wantCounts := make([]float64, s.experts)
			if !countsArg.None() {
				counts.writes()
				wantCounts = counts.row()
			}
			op := kernels.Route{Logits: logits.Tensor, Method: s.method, Jitter: jitter, IDs: ids.Tensor, Weights: weights.Tensor, Counts: countsArg}
			var offsets, order, listed tensor
			sorts := i%4 == 1 || i%4 == 2 || s.n == withRuns || s.n == kernels.MaxRunRows || s.n >= 25
			if sorts {
				offsets, order = r.dense("Offsets", kernels.I32, s.experts+1), r.dense("Order", kernels.I32, s.n*s.k)
				offsets.writes()
				order.writes()
				op.Offsets, op.Order = offsets.Tensor, order.Tensor
				if s.n <= kernels.MaxRunRows {
					listed = r.runs(s.experts, s.n*s.k)
					listed.writes()
					op.Runs = listed.Tensor
				}
			}
			r.do(&op)
			selected := make([][]int, s.n)
			for n := range s.n {
				wantIDs, wantWeights := routeWant(s.method, jitter, logits.row(n), s.k)
				r.exact(ids, wantIDs, n)
				r.near(weights, wantWeights, n)
				for _, id := range wantIDs {
					wantCounts[int(id)]++
					selected[n] = append(selected[n], int(id))
				}
			}
			if sorts {
				wantOffsets, wantOrder := sorted(selected, s.experts)
				r.exact(offsets, asFloats(wantOffsets))
				r.exact(order, asFloats(wantOrder))
				if !listed.None() {
					r.exactRuns(listed, wantOffsets, s.n*s.k)
				}
			}
			if sorts && countsArg.None() {
				together := make([][]float64, s.n)
				for n := range together {
					together[n] = weights.got(n)
				}
				sorting := op.Sorting()
				op.Offsets, op.Order, op.Runs = kernels.Tensor{}, kernels.Tensor{}, kernels.Tensor{}
				if !listed.None() {
					listed.buffer.out = nil
				}
				r.do(&op, &sorting)
				for n := range together {
					r.exact(weights, together[n], n)
				}
			}
			if !countsArg.None() {
				r.exact(counts, wantCounts)
			}
		})
	}
}

// testRouteNaN: rows with NaN, or of it alone, are routed to different experts of the layer,
// numbers first, and the rows beside them as ever.
func testRouteNaN(r *rig) {
	for _, s := range []struct {
		experts, k int
		method     kernels.RouteMethod
		sorts      bool
	}{
		{8, 2, kernels.SoftmaxRenorm, false},
		{60, 4, kernels.Softmax, false},
		{128, 8, kernels.SoftmaxRenorm, false},
		{16, 2, kernels.SparseMixer, false},
		{8, 2, kernels.SoftmaxRenorm, true},
		{60, 4, kernels.Softmax, true},
		{128, 8, kernels.SoftmaxRenorm, true},
		{16, 2, kernels.SparseMixer, true},
	} {
		r.run(fmt.Sprintf("%+v", s), func(r *rig) {
			const rows, jitter = 9, 0.01
			logits := r.rows(true, "Logits", kernels.F32, rows, s.experts).set(func(i int) float64 {
				switch row, e := i/s.experts, i%s.experts; {
				case row%3 == 1, row%3 == 2 && e != s.experts/2:
					return math.NaN()
				}
				return r.rand.NormFloat64()
			})
			ids, weights := r.dense("IDs", kernels.I32, rows, s.k), r.dense("Weights", kernels.F32, rows, s.k)
			ids.writes()
			weights.writes()
			op := kernels.Route{Logits: logits.Tensor, Method: s.method, Jitter: jitter, IDs: ids.Tensor, Weights: weights.Tensor}
			var offsets, order tensor
			if s.sorts {
				offsets, order = r.dense("Offsets", kernels.I32, s.experts+1), r.dense("Order", kernels.I32, rows*s.k)
				offsets.writes()
				order.writes()
				op.Offsets, op.Order = offsets.Tensor, order.Tensor
			}
			r.do(&op)
			selected := make([][]int, rows)
			for n := range rows {
				if n%3 == 0 {
					wantIDs, wantWeights := routeWant(s.method, jitter, logits.row(n), s.k)
					selected[n] = asInts(wantIDs)
					r.exact(ids, wantIDs, n)
					r.near(weights, wantWeights, n)
					continue
				}
				var want []float64
				if n%3 == 2 { // the one number
					want = append(want, float64(s.experts/2))
				}
				for e := 0; len(want) < s.k; e++ {
					if n%3 == 1 || e != s.experts/2 {
						want = append(want, float64(e))
					}
				}
				selected[n] = asInts(want)
				r.exact(ids, want, n)
			}
			if s.sorts {
				wantOffsets, wantOrder := sorted(selected, s.experts)
				r.exact(offsets, asFloats(wantOffsets))
				r.exact(order, asFloats(wantOrder))
			}
		})
	}
}

func testSortByExpert(r *rig) {
	type shape struct{ n, experts, k int }
	for _, s := range []shape{{1, 4, 1}, {2, 8, 2}, {7, 16, 4}, {33, 60, 4}, {33, 128, 8}, {700, 8, 2}, {5, 2, 2}} {
		r.run(fmt.Sprint(s), func(r *rig) {
			selected := r.route(s.n, s.experts, s.k)
			ids := r.dense("IDs", kernels.I32, s.n, s.k).set(func(i int) float64 { return float64(selected[i/s.k][i%s.k]) })
			offsets, order := r.dense("Offsets", kernels.I32, s.experts+1), r.dense("Order", kernels.I32, s.n*s.k)
			offsets.writes()
			order.writes()
			r.do(&kernels.SortByExpert{IDs: ids.Tensor, Offsets: offsets.Tensor, Order: order.Tensor})
			wantOffsets, wantOrder := sorted(selected, s.experts)
			r.exact(offsets, asFloats(wantOffsets))
			r.exact(order, asFloats(wantOrder))
		})
	}
}

// runs returns a tensor for the runs of that many experts and pairs.
func (r *rig) runs(experts, pairs int) tensor {
	return r.dense("Runs", kernels.I32, kernels.MostRuns(experts, pairs), kernels.RunColumns)
}

// exactRuns checks the runs of pairs that are sorted with those offsets.
func (r *rig) exactRuns(t tensor, offsets []int, pairs int) {
	r.Helper()
	want := asFloats(runs(offsets, pairs))
	for i := range t.Shape[0] {
		r.exact(t, want[i*kernels.RunColumns:][:kernels.RunColumns], i)
	}
}

func asInts(x []float64) []int {
	y := make([]int, len(x))
	for i, v := range x {
		y[i] = int(v)
	}
	return y
}

func asFloats(x []int) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}

func testSample(r *rig) {
	type shape struct{ n, vocabulary int }
	shapes := []shape{{1, 16}, {2, 33}, {7, 131}, {33, 258}, {3, 20001}}
	if r.o.Full {
		shapes = append(shapes, shape{2, 32064}, shape{2, 151936})
	}
	for i, s := range shapes {
		for _, temperature := range []float64{0, 0.05, 1, 5} {
			r.run(fmt.Sprintf("%+v/temperature=%g", s, temperature), func(r *rig) {
				logits := r.normal(r.rows(i%2 == 0, "Logits", kernels.F32, s.n, s.vocabulary), 0, 3)
				for n := range s.n {
					row := logits.in(logits.buffer.before, n)
					if n%3 == 0 { // the largest value at two places
						best, values := 0, logits.row(n)
						for i, v := range values {
							if v > values[best] {
								best = i
							}
						}
						copy(row[4*r.rand.IntN(s.vocabulary):], row[4*best:][:4])
					}
				}
				temperatures := r.dense("Temperature", kernels.F32, s.n).set(func(i int) float64 {
					if i%5 == 4 {
						return 0 // greedy among others
					}
					return temperature
				})
				seeds, samples, positions := make([]uint64, s.n), make([]int, s.n), make([]int, s.n)
				for i := range seeds {
					seeds[i], samples[i], positions[i] = r.rand.Uint64(), r.rand.IntN(4), r.rand.IntN(1<<17)
				}
				out := r.dense("Out", kernels.I32, s.n)
				out.writes()
				op := kernels.Sample{
					Logits: logits.Tensor, Temperature: temperatures.Tensor, Seeds: r.words("Seeds", seeds...).Tensor,
					Samples: r.ints("Samples", samples...).Tensor, Positions: r.ints("Positions", positions...).Tensor, Out: out.Tensor,
				}
				r.do(&op)
				want := make([]float64, s.n)
				for n := range s.n {
					t := float32(temperatures.row()[n])
					var best float32
					for i, v := range logits.row(n) {
						score := float32(v)
						if t > 0 {
							score = float32(score/t) + philox.Gumbel(seeds[n], int32(samples[n]), int32(positions[n]), int32(i))
						}
						if i == 0 || score > best {
							best, want[n] = score, float64(i)
						}
					}
				}
				r.exact(out, want)
			})
		}
	}
}
