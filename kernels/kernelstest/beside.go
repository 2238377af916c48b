package kernelstest

import (
	"bytes"
	"fmt"
	"math"
	"slices"

	"github.com/moeserve/moeserve/kernels"
)

// together runs op, which writes to outs, and then the parts that it replaces one after the other: both have
// the same bits.
func (r *rig) together(op kernels.Op, outs []tensor, parts ...kernels.Op) {
	r.Helper()
	for _, t := range outs {
		t.writes()
	}
	r.do(op)
	bits := make([][]byte, len(outs))
	for i, t := range outs {
		bits[i] = bytes.Clone(t.buffer.after)
	}
	r.do(parts...)
	for i, t := range outs {
		r.alike(t, bits[i], "the parts one after the other")
	}
}

func testRouterGateUp(r *rig) {
	type shape struct{ n, a, experts, wide int }
	shapes := []shape{
		{1, 16, 5, 1},
		{1, 2048, 61, 130},
		{3, 272, 61, 60},
		{8, 1032, 9, 33},
		{8, 2048, 61, 24},
		{2, 3080, 129, 16},
		{5, 64, 16, 1100},
		{9, 64, 8, 24},
		{16, 2048, 61, 24},
		{11, 1032, 9, 130},
		{15, 3080, 64, 16},
		{40, 48, 61, 18},
	}
	if r.o.Full {
		shapes = append(shapes, shape{1, 2048, 61, 5632}, shape{8, 2048, 61, 5632}, shape{16, 2048, 61, 5632}) // Qwen1.5-MoE
	}
	for i, s := range shapes {
		for j, w := range r.o.Weights {
			if s.a*s.wide > 1<<20 && j > 0 {
				continue
			}
			// Each part may have an X of its own, with another number of rows.
			apart := s.n < 16 && (i+j)%3 == 2
			r.run(fmt.Sprintf("%+v/%s/apart=%v", s, w, apart), func(r *rig) {
				x := r.normal(r.rows((i+j)%2 == 0, "Router.X", r.act, s.n, s.a), 0, 1)
				other := x
				if apart {
					other = r.normal(r.rows((i+j)%2 == 1, "GateUp.X", r.act, s.n+1, s.a), 0, 1)
				}
				router, weight := r.weights("Router.W", w, s.experts, s.a), r.weights("GateUp.W", w, 2*s.wide, s.a)
				bias, biasArg := optional(i%2 == 0, func() tensor { return r.normal(r.dense("Bias", w, s.experts), 0, 1) })
				scores := r.rows((i+j)%2 == 1, "Router.Out", kernels.F32, s.n, s.experts)
				all := r.rows(i%2 == 1, "GateUp.Out", r.act, other.Shape[0], 2*s.wide)
				all.writes()
				out := tensor{all.Narrow(1, 0, s.wide), all.buffer}
				op := kernels.RouterGateUp{
					Router: kernels.MatMul{X: x.Tensor, W: router.Tensor, Bias: biasArg, Out: scores.Tensor},
					GateUp: kernels.GatedMatMul{X: other.Tensor, W: weight.Tensor, Out: all.Tensor},
				}
				r.together(&op, []tensor{scores, out}, &op.Router, &op.GateUp)
				for n := range s.n {
					want := make([]float64, s.experts)
					for c := range want {
						want[c] = dot(x.row(n), router.row(c))
						if !bias.None() {
							want[c] += bias.row()[c]
						}
					}
					r.close(scores, scores.got(n), want, 0.2, n)
				}
				columns := r.sampled(s.wide, other.Shape[0]*s.a*s.wide)
				for n := range other.Shape[0] {
					var want []float64
					for _, c := range columns {
						want = append(want, silu(dot(other.row(n), weight.row(c)))*dot(other.row(n), weight.row(s.wide+c)))
					}
					r.close(out, pick(out.got(n), columns), want, 0.3, n)
				}
			})
		}
	}
}

func testRouteDown(r *rig) {
	type shape struct {
		n, experts, k int
		method        kernels.RouteMethod
		a, m          int // of the down projection
	}
	shapes := []shape{
		{1, 60, 4, kernels.Softmax, 5632, 48},
		{3, 60, 4, kernels.Softmax, 1032, 130},
		{8, 60, 4, kernels.Softmax, 2048, 40},
		{1, 4, 1, kernels.SoftmaxRenorm, 16, 7},
		{5, 8, 2, kernels.SoftmaxRenorm, 272, 33},
		{8, 64, 8, kernels.SoftmaxRenorm, 64, 2000},
		{2, 200, 8, kernels.Softmax, 72, 20},
		{5, 80, 3, kernels.SoftmaxRenorm, 48, 16},
		{4, 128, 8, kernels.SoftmaxRenorm, 48, 16},
		{3, 16, 2, kernels.SparseMixer, 1104, 18},
		{8, 40, 2, kernels.SparseMixer, 64, 24},
		{8, 128, 8, kernels.SoftmaxRenorm, 48, 16},
		{9, 60, 4, kernels.Softmax, 64, 24},
		{16, 60, 4, kernels.Softmax, 2048, 40},
		{13, 128, 8, kernels.SoftmaxRenorm, 1104, 130},
		{16, 16, 2, kernels.SparseMixer, 72, 18},
		{40, 60, 4, kernels.Softmax, 48, 18},
	}
	if r.o.Full {
		shapes = append(shapes, shape{1, 60, 4, kernels.Softmax, 5632, 2048}, shape{8, 60, 4, kernels.Softmax, 5632, 2048}, shape{16, 60, 4, kernels.Softmax, 5632, 2048}) // Qwen1.5-MoE
	}
	for i, s := range shapes {
		for j, w := range r.o.Weights {
			if s.a*s.m > 1<<20 && j > 0 {
				continue
			}
			r.run(fmt.Sprintf("%+v/%s", s, w), func(r *rig) { testRouteDownShape(r, i+j, s.n, s.experts, s.k, s.method, s.a, s.m, w) })
		}
	}
}

// testRouteDownShape routes n tokens beside a down projection of m rows of a weights. variant selects what is
// optional.
func testRouteDownShape(r *rig, variant, n, experts, k int, method kernels.RouteMethod, a, m int, w kernels.DType) {
	const jitter = 0.01
	logits := r.normal(r.rows(variant%4 != 3, "Logits", kernels.F32, n, experts), 0, 1.5)
	ids, weights := r.dense("IDs", kernels.I32, n, k), r.dense("Weights", kernels.F32, n, k)
	counts, countsArg := optional(variant%3 != 0, func() tensor {
		return r.dense("Counts", kernels.I64, experts).set(func(i int) float64 { return float64(i) * 1e10 })
	})
	op := kernels.RouteDown{Route: kernels.Route{
		Logits: logits.Tensor, Method: method, Jitter: jitter, IDs: ids.Tensor, Weights: weights.Tensor, Counts: countsArg,
	}}
	sorts := variant%5 != 4 || n > 9
	var offsets, order, listed tensor
	outs := []tensor{ids, weights}
	if sorts {
		offsets, order = r.dense("Offsets", kernels.I32, experts+1), r.dense("Order", kernels.I32, n*k)
		op.Route.Offsets, op.Route.Order = offsets.Tensor, order.Tensor
		outs = append(outs, offsets, order)
		if n <= kernels.MaxRunRows {
			listed = r.runs(experts, n*k)
			op.Route.Runs = listed.Tensor
			outs = append(outs, listed)
		}
	}
	if !countsArg.None() {
		outs = append(outs, counts)
	}
	x := r.normal(r.rows(variant%2 == 0, "X", r.act, n, a), 0, 1)
	weight := r.weights("W", w, m, a)
	bias, biasArg := optional(variant%2 == 1, func() tensor { return r.normal(r.dense("Bias", w, m), 0, 1) })
	out := r.rows(variant%2 == 1, "Out", r.act, n, m)
	op.Down = kernels.MatMul{X: x.Tensor, W: weight.Tensor, Bias: biasArg, Out: out.Tensor}
	r.together(&op, append(outs, out), &op.Route, &op.Down)

	wantCounts := make([]float64, experts)
	if !countsArg.None() {
		wantCounts = counts.row()
	}
	selected := make([][]int, n)
	columns := r.sampled(m, n*a*m)
	for i := range n {
		wantIDs, wantWeights := routeWant(method, jitter, logits.row(i), k)
		r.exact(ids, wantIDs, i)
		r.near(weights, wantWeights, i)
		for _, id := range wantIDs {
			wantCounts[int(id)]++
			selected[i] = append(selected[i], int(id))
		}
		var want []float64
		for _, c := range columns {
			v := dot(x.row(i), weight.row(c))
			if !bias.None() {
				v += bias.row()[c]
			}
			want = append(want, v)
		}
		r.close(out, pick(out.got(i), columns), want, 0.2, i)
	}
	if sorts {
		wantOffsets, wantOrder := sorted(selected, experts)
		r.exact(offsets, asFloats(wantOffsets))
		r.exact(order, asFloats(wantOrder))
		if !listed.None() {
			r.exactRuns(listed, wantOffsets, n*k)
		}
	}
	if !countsArg.None() {
		r.exact(counts, wantCounts)
	}
}

func testRouteExpertUp(r *rig) {
	type shape struct {
		n, experts, k, hidden, intermediate int
		method                              kernels.RouteMethod
	}
	shapes := []shape{
		{1, 4, 1, 16, 16, kernels.SoftmaxRenorm}, // row-major
		{1, 8, 2, 64, 128, kernels.SoftmaxRenorm},
		{1, 16, 2, 128, 64, kernels.SparseMixer},
		{1, 60, 4, 64, 192, kernels.Softmax},
		{1, 128, 8, 192, 64, kernels.SoftmaxRenorm},
		{1, 128, 8, 64, 640, kernels.Softmax},
		{1, 32, 32, 64, 64, kernels.SoftmaxRenorm}, // all, and the most that a warp selects
		{1, 33, 33, 64, 64, kernels.SoftmaxRenorm},
		{1, 1, 1, 64, 1088, kernels.SoftmaxRenorm},
		{1, 129, 3, 64, 64, kernels.Softmax}, // more than a warp selects of, and the last one is selected
		{3, 8, 2, 64, 64, kernels.SoftmaxRenorm},
		{2, 128, 8, 64, 64, kernels.SoftmaxRenorm},
		{4, 16, 2, 64, 128, kernels.SparseMixer},
		{3, 40, 2, 64, 64, kernels.SparseMixer},
		{8, 60, 4, 64, 64, kernels.Softmax},
		{3, 105, 17, 64, 64, kernels.Softmax},
		{2, 64, 32, 64, 64, kernels.SoftmaxRenorm},
		{8, 64, 8, 64, 64, kernels.SoftmaxRenorm}, // each pair has an expert of its own
		{8, 9, 8, 64, 64, kernels.SoftmaxRenorm},  // all pairs that a block selects
		{8, 9, 9, 64, 64, kernels.SoftmaxRenorm},  // more
		{9, 8, 2, 64, 64, kernels.SoftmaxRenorm},  // more tokens
		{16, 3, 3, 64, 64, kernels.SoftmaxRenorm},
		{17, 3, 3, 64, 64, kernels.SoftmaxRenorm}, // two runs of each expert
		{65, 8, 2, 64, 64, kernels.SoftmaxRenorm}, // without runs
		{0, 8, 2, 64, 64, kernels.SoftmaxRenorm},
	}
	if r.o.Full {
		shapes = append(shapes, // Mixtral, Qwen3, Qwen1.5-MoE
			shape{1, 8, 2, 4096, 14336, kernels.SoftmaxRenorm}, shape{1, 128, 8, 2048, 768, kernels.SoftmaxRenorm}, shape{1, 60, 4, 2048, 1408, kernels.Softmax})
	}
	for i, s := range shapes {
		for j, w := range r.o.ExpertWeights {
			if s.hidden*s.intermediate > 1<<20 && j > 0 {
				continue
			}
			r.run(fmt.Sprintf("%+v/%s", s, w), func(r *rig) {
				testRouteExpertUpShape(r, i+j, s.n, s.experts, s.k, s.hidden, s.intermediate, s.method, w)
			})
		}
	}
}

// testRouteExpertUpShape routes n tokens, maybe beside a down projection, and runs both expert GEMMs, each directly behind
// the operation in front and not. variant selects what scores are like.
func testRouteExpertUpShape(r *rig, variant, n, experts, k, hidden, intermediate int, method kernels.RouteMethod, w kernels.DType) {
	const jitter = 0.01
	layout, err := r.backend.ExpertLayout(kernels.ExpertShape{Hidden: hidden, Intermediate: intermediate, DType: w})
	r.must(err)
	logits := r.rows(variant%2 == 0, "Logits", kernels.F32, n, experts).set(func(i int) float64 {
		switch {
		case experts > 128 && i == experts-1:
			return 9 // it is selected
		case variant%4 == 1: // equal scores, and both zeros
			return []float64{-1, math.Copysign(0, -1), 0, 2}[r.rand.IntN(4)]
		case variant%4 == 3 && i < experts && i%3 == 1: // in the first row
			return math.NaN()
		case n > 1 && n*k == experts && i/experts == i%experts/k: // each token selects others
			return 9 + r.rand.NormFloat64()
		}
		return 1.5 * r.rand.NormFloat64()
	})
	ids, weights := r.dense("IDs", kernels.I32, n, k), r.dense("Weights", kernels.F32, n, k)
	counts := r.dense("Counts", kernels.I64, experts).set(func(i int) float64 { return float64(i) * 1e10 })
	offsets, order := r.dense("Offsets", kernels.I32, experts+1), r.dense("Order", kernels.I32, n*k)
	route := kernels.Route{
		Logits: logits.Tensor, Method: method, Jitter: jitter, IDs: ids.Tensor, Weights: weights.Tensor, Counts: counts.Tensor, Offsets: offsets.Tensor, Order: order.Tensor,
	}
	outs := []tensor{ids, weights, counts, offsets, order}
	if n <= kernels.MaxRunRows {
		listed := r.runs(experts, n*k)
		route.Runs = listed.Tensor
		outs = append(outs, listed)
	}
	slots, all := make([]uint64, experts), make([]int, experts)
	for e := range experts {
		all[e], slots[e] = e, uint64(r.newExpert(layout, e, r.stream.Space()).extent.Addr)
	}
	x := r.normal(r.rows(variant%2 == 1, "X", r.act, n, hidden), 0, 1)
	mid, out := r.rows(variant%2 == 0, "middle", r.act, n*k, intermediate), r.rows(variant%2 == 1, "Out", r.act, n*k, hidden)
	up := kernels.ExpertUp{ExpertGEMM: kernels.ExpertGEMM{
		X: x.Tensor, Offsets: offsets.Tensor, Order: order.Tensor, Runs: route.Runs, Slots: r.words("Slots", slots...).Tensor, Experts: r.ints("Experts", all...).Tensor,
		Layout: layout, Out: mid.Tensor,
	}}
	down := kernels.ExpertDown(up)
	down.X, down.Out = mid.Tensor, out.Tensor
	// The down projection of a shared expert.
	const wide = 72
	activated, projected := r.normal(r.rows(variant%2 == 0, "Shared.X", r.act, n, wide), 0, 1), r.rows(variant%2 == 1, "Shared.Out", r.act, n, hidden)
	shared := kernels.MatMul{X: activated.Tensor, W: r.weights("Shared.W", r.act, hidden, wide).Tensor, Out: projected.Tensor}
	outs = append(outs, mid, out, projected)
	other := r.dense("Between", r.act, 1, 8)
	between := kernels.Clamp{X: other.Tensor, Limit: 1}
	// Behind RouteDown the scores may change: then they no longer tell the experts.
	changed := tensor{kernels.New(logits.Addr, kernels.F32, experts), logits.buffer}
	change := kernels.Copy{Src: r.normal(r.dense("Other logits", kernels.F32, experts), 0, 1).Tensor, Dst: changed.Tensor}
	routeUp, routeDown := kernels.RouteExpertUp{Route: route, Up: up}, kernels.RouteDown{Route: route, Down: shared}
	var want [][]byte
	for order, ops := range [][]kernels.Op{
		{&route, &shared, &up, &down},
		{&shared, &routeUp, &down},
		{&shared, &routeUp, &between, &down},
		{&routeDown, &up, &down},
		{&routeDown, &between, &up, &down},
		{&routeDown, &change, &up, &down},
	} {
		counts.set(func(i int) float64 { return float64(i) * 1e10 })
		for _, t := range append(outs, other) {
			t.buffer.out = nil
			t.writes()
		}
		logits.buffer.out = nil
		if slices.Contains(ops, kernels.Op(&change)) {
			changed.writes()
		}
		r.doPart(ops...)
		for i, t := range outs {
			if order == 0 {
				want = append(want, bytes.Clone(t.buffer.after))
			}
			r.alike(t, want[i], fmt.Sprintf("order %d of operations", order))
		}
	}
	if variant%4 != 3 {
		for i := range n {
			wantIDs, _ := routeWant(method, jitter, logits.row(i), k)
			r.exact(ids, wantIDs, i)
		}
	}
}
