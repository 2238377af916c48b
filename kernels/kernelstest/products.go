package kernelstest

import (
	"bytes"
	"fmt"
	"math"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

func dot(x, y []float64) float64 {
	var s float64
	for i, v := range x {
		s += v * y[i]
	}
	return s
}

// sampled returns the columns of a large GEMM to compare: all of them, or a random subset
// if the reference for all takes too long.
func (r *rig) sampled(columns, macs int) []int {
	const enough = 1 << 23
	pick := make([]int, 0, columns)
	for c := range columns {
		if macs <= enough || c == columns-1 || r.rand.IntN(macs) < enough {
			pick = append(pick, c)
		}
	}
	return pick
}

func pick(x []float64, columns []int) []float64 {
	y := make([]float64, len(columns))
	for i, c := range columns {
		y[i] = x[c]
	}
	return y
}

func testMatMul(r *rig) {
	type shape struct{ n, a, m int }
	shapes := []shape{{1, 16, 1}, {2, 48, 7}, {7, 272, 60}, {33, 64, 130}, {1, 1040, 48}, {3, 2064, 33}, {131, 32, 18}, {300, 16, 5}, {100, 1104, 140}, {3, 8, 66}, {9, 272, 60}, {16, 1040, 130}, {13, 2064, 130}}
	if r.o.Full {
		shapes = append(shapes,
			shape{2, 4096, 6144}, shape{2, 4096, 4096}, shape{3, 2048, 6144}, shape{5, 3584, 4608}, shape{1, 2048, 5120}, // qkv, o
			shape{2, 5632, 2048}, shape{3, 20480, 3584}, // shared experts' down
			shape{7, 4096, 8}, shape{7, 2048, 60}, shape{7, 2048, 128}, // routers
			shape{1, 4096, 32000}, shape{2, 4096, 32064}, shape{1, 2048, 151936}, // lm_head
		)
	}
	for i, s := range shapes {
		for j, w := range r.o.Weights {
			if s.n*s.a*s.m > 1<<24 && j > 0 {
				continue
			}
			r.run(fmt.Sprintf("%v/%s", s, w), func(r *rig) {
				x := r.normal(r.rows((i+j)%2 == 0, "X", r.act, s.n, s.a), 0, 1)
				weight := r.weights("W", w, s.m, s.a)
				bias, _ := optional((i+j)%3 == 0, func() tensor { return r.normal(r.dense("Bias", w, s.m), 0, 1) })
				t := r.act
				if i%2 == 0 {
					t = kernels.F32
				}
				out := r.rows((i+j)%2 == 1, "Out", t, s.n, s.m)
				testGEMM(r, x, weight, bias, out)
			})
		}
	}
	// Some of these rows are aligned; results must not depend on that.
	for i, columns := range []int{8, 140} {
		r.run(fmt.Sprintf("%d columns, rows not aligned", columns), func(r *rig) {
			const rows, inner = 5, 1032
			x := r.normal(r.between(16, 20, "X", r.act, rows, inner), 0, 1)
			weight := r.weights("W", r.act, columns, inner)
			testGEMM(r, x, weight, tensor{}, r.rows(i == 0, "Out", kernels.F32, rows, columns))
		})
	}
}

func testGEMM(r *rig, x, weight, bias, out tensor) {
	out.writes()
	r.do(&kernels.MatMul{X: x.Tensor, W: weight.Tensor, Bias: bias.Tensor, Out: out.Tensor})
	rows, inner, all := x.Shape[0], x.Shape[1], weight.Shape[0]
	columns := r.sampled(all, rows*inner*all)
	want := make([][]float64, rows)
	for _, c := range columns {
		row := weight.row(c)
		for n := range want {
			v := dot(x.row(n), row)
			if !bias.None() {
				v += bias.row()[c]
			}
			want[n] = append(want[n], v)
		}
	}
	for n := range want {
		r.close(out, pick(out.got(n), columns), want[n], 0.2, n)
	}
	r.invariant(out, func(_ *rig, from, to int, out kernels.Tensor) kernels.Op {
		return &kernels.MatMul{X: x.Slice(from, to), W: weight.Tensor, Bias: bias.Tensor, Out: out}
	})
}

// testGatedMatMul: results are near the reference and have the bits of MatMul and SiluMul in
// sequence.
func testGatedMatMul(r *rig) {
	for i, s := range []struct{ n, a, wide int }{{1, 16, 1}, {2, 48, 7}, {8, 272, 60}, {1, 1040, 48}, {3, 2064, 33}, {5, 1032, 130}, {9, 64, 24}, {16, 1032, 130}, {11, 3080, 66}, {131, 32, 18}} {
		for j, w := range r.o.Weights {
			r.run(fmt.Sprintf("%+v/%s", s, w), func(r *rig) {
				x := r.normal(r.rows((i+j)%2 == 0, "X", r.act, s.n, s.a), 0, 1)
				weight := r.weights("W", w, 2*s.wide, s.a)
				all := r.rows((i+j)%2 == 1, "Out", r.act, s.n, 2*s.wide)
				out := tensor{all.Narrow(1, 0, s.wide), all.buffer}
				op := kernels.GatedMatMul{X: x.Tensor, W: weight.Tensor, Out: all.Tensor}
				all.writes()
				r.do(&op)
				together := make([][]float64, s.n)
				for n := range s.n {
					want := make([]float64, s.wide)
					for c := range want {
						want[c] = silu(dot(x.row(n), weight.row(c))) * dot(x.row(n), weight.row(s.wide+c))
					}
					r.close(out, out.got(n), want, 0.3, n)
					together[n] = out.got(n)
				}
				product, apart := op.Apart()
				r.do(&product, &apart)
				for n := range s.n {
					r.exact(out, together[n], n)
				}
			})
		}
	}
}

// layer holds one layer's experts and a step's routing.
type layer struct {
	layout  kernels.ExpertLayout
	k       int
	ids     [][]int // of each token
	order   []int   // pairs by expert
	experts []*expert
}

// expert holds an expert's matrices before packing.
type expert struct {
	parts  [3]tensorData
	extent tensor
}

// tensorData is a dense weight matrix on the host.
type tensorData struct {
	data    []byte
	dtype   kernels.DType
	columns int
}

func (d tensorData) row(i int) []float64 {
	n := d.columns * d.dtype.Size()
	return tensor{Tensor: kernels.Tensor{DType: d.dtype}}.decode(d.data[i*n:][:n])
}

// newExpert makes an expert's weights and packs them, in pieces, into an extent on the
// device.
func (r *rig) newExpert(l kernels.ExpertLayout, e int, space device.Space) *expert {
	r.Helper()
	x := &expert{extent: r.denseIn(space, fmt.Sprintf("expert %d", e), kernels.I32, int(l.Size/4))}
	for p := range x.parts {
		rows, columns := l.Intermediate, l.Hidden
		if kernels.Part(p) == kernels.W2 {
			rows, columns = columns, rows
		}
		bytes := columns * l.DType.Size()
		data := make([]byte, rows*bytes)
		r.fillWeights(data, l.DType, columns)
		x.parts[p] = tensorData{data, l.DType, columns}
		for row := 0; row < rows; {
			n := min(1+rows/3, rows-row)
			r.must(r.backend.PackExpert(l, kernels.Part(p), row, data[row*bytes:][:n*bytes], x.extent.all()))
			row += n
		}
	}
	return x
}

// sorted returns the (token, expert) pairs sorted by expert, as Group does.
func sorted(ids [][]int, experts int) (offsets, order []int) {
	for e := range experts {
		offsets = append(offsets, len(order))
		for n, row := range ids {
			for k, id := range row {
				if id == e {
					order = append(order, n*len(row)+k)
				}
			}
		}
	}
	return append(offsets, len(order)), order
}

// runs has {expert, first pair, pairs, 0} for every MaxRunPairs pairs of each expert, and zeros for the others there is room for.
func runs(offsets []int, pairs int) []int {
	var all []int
	experts := len(offsets) - 1
	for e, first := range offsets[:experts] {
		for ; first < offsets[e+1]; first += kernels.MaxRunPairs {
			all = append(all, e, first, min(offsets[e+1]-first, kernels.MaxRunPairs), 0)
		}
	}
	return append(all, make([]int, kernels.RunColumns*kernels.MostRuns(experts, pairs)-len(all))...)
}

// route selects k different experts for each of n tokens. Some experts are never
// selected.
func (r *rig) route(n, experts, k int) [][]int {
	ids := make([][]int, n)
	used := max(k, experts*3/4)
	perm := r.rand.Perm(experts)[:used]
	for i := range ids {
		for _, j := range r.rand.Perm(used)[:k] {
			ids[i] = append(ids[i], perm[j])
		}
	}
	return ids
}

type expertShape struct {
	n, hidden, intermediate, experts, k int
	listed                              int // how many of the experts are listed; 0: all
}

func testExperts(r *rig) {
	shapes := []expertShape{
		{1, 16, 16, 4, 1, 0},
		{1, 64, 48, 8, 2, 0},
		{2, 48, 112, 4, 2, 3},
		{7, 272, 32, 8, 2, 0},
		{33, 32, 80, 16, 4, 9},
		{33, 16, 16, 128, 8, 100},
		{150, 16, 32, 4, 2, 0},
		{5, 1040, 16, 6, 3, 0},
		{3, 16, 1040, 5, 2, 4},
		// Multiples of 64, and more and fewer rows to an expert than tiles have.
		{1, 64, 64, 4, 2, 0},
		{9, 128, 192, 6, 2, 4},
		{75, 64, 128, 8, 2, 0},
		{260, 192, 64, 3, 2, 0},
		// Few tokens, of many experts, and with an uneven number of pieces of 64 elements.
		{8, 1088, 128, 12, 8, 0},
		{3, 128, 1216, 4, 2, 3},
		{2, 64, 64, 600, 4, 570},  // more than a block has threads
		{10, 64, 64, 200, 4, 180}, // more than a warp lists at once
		// With runs, of up to 16 pairs.
		{1, 64, 192, 60, 4, 0},
		{3, 192, 64, 128, 8, 0},
		{8, 128, 128, 60, 4, 0},
		{8, 64, 64, 128, 8, 0},
		{8, 64, 192, 2, 2, 0}, // all tokens choose both experts
		{5, 64, 64, 300, 3, 0},
		{9, 64, 64, 8, 2, 0},
		{13, 64, 64, 2, 2, 0},
		{16, 64, 192, 2, 2, 0},
		{17, 64, 192, 2, 2, 0}, // two of each expert, the second of one pair
		{40, 128, 64, 4, 2, 0}, // some experts have several
		{64, 64, 128, 3, 1, 0},
		{48, 64, 64, 128, 8, 0},
	}
	if r.o.Full {
		shapes = append(shapes,
			expertShape{3, 4096, 14336, 8, 2, 2}, // Mixtral-8x7B
			expertShape{5, 4096, 6400, 16, 2, 3}, // Phi-3.5-MoE
			expertShape{7, 4096, 448, 16, 2, 8},  // Phi-tiny-MoE
			expertShape{7, 2048, 1408, 60, 4, 8}, // Qwen1.5-MoE
			expertShape{3, 3584, 2560, 64, 8, 4}, // Qwen2-57B
			expertShape{7, 2048, 768, 128, 8, 8}, // Qwen3-30B
		)
	}
	for i, s := range shapes {
		for j, w := range r.o.ExpertWeights {
			if s.hidden*s.intermediate > 1<<20 && j > 0 {
				continue
			}
			for _, everywhere := range []bool{false, true} {
				if everywhere && (len(r.accessible()) == 1 || (i+j)%3 == 1) {
					continue
				}
				r.run(fmt.Sprintf("%+v/%s/everywhere=%t", s, w, everywhere), func(r *rig) { testExpertShape(r, s, w, (i+j)%2 == 0, everywhere) })
			}
		}
	}
}

// testExpertShape has experts in the stream's own memory or, if everywhere is set, also in that of
// the host and of a peer.
func testExpertShape(r *rig, s expertShape, w kernels.DType, gaps, everywhere bool) {
	layout, err := r.backend.ExpertLayout(kernels.ExpertShape{Hidden: s.hidden, Intermediate: s.intermediate, DType: w})
	r.must(err)
	l := layer{layout: layout, k: s.k, ids: r.route(s.n, s.experts, s.k), experts: make([]*expert, s.experts)}
	offsets, order := sorted(l.ids, s.experts)
	listed := r.rand.Perm(s.experts)
	if s.listed > 0 {
		listed = listed[:s.listed]
	}
	spaces := []device.Space{r.stream.Space()}
	if everywhere {
		spaces = r.accessible()
	}
	slots := make([]uint64, s.experts) // without an address for whatever has no rows or is not listed
	for _, e := range listed {
		if offsets[e] < offsets[e+1] {
			x := r.newExpert(layout, e, spaces[e%len(spaces)])
			l.experts[e], slots[e] = x, uint64(x.extent.Addr)
			if own := r.stream.Space(); spaces[e%len(spaces)] != own {
				at, err := r.machine.KernelAddr(own, x.extent.Range())
				r.must(err)
				slots[e] = uint64(at)
			}
		}
	}
	x := r.normal(r.rows(gaps, "X", r.act, s.n, s.hidden), 0, 1)
	x.buffer.partly = s.listed > 0 // tokens that chose no listed expert
	mid := r.rows(!gaps, "middle", r.act, s.n*s.k, s.intermediate)
	out := r.rows(gaps, "Out", r.act, s.n*s.k, s.hidden)
	up := kernels.ExpertUp{ExpertGEMM: kernels.ExpertGEMM{
		X: x.Tensor, Offsets: r.ints("Offsets", offsets...).Tensor, Order: r.ints("Order", order...).Tensor,
		Slots: r.words("Slots", slots...).Tensor, Experts: r.ints("Experts", listed...).Tensor, Layout: layout, Out: mid.Tensor,
	}}
	down := kernels.ExpertDown(up)
	down.X, down.Out = mid.Tensor, out.Tensor
	l.order = order
	l.writes(mid, func(_, place int) int { return place })
	l.writes(out, func(pair, _ int) int { return pair })
	r.do(&up, &down)
	l.compare(r, x, mid, out, 0)
	wantMid, wantOut := bytes.Clone(mid.buffer.after), bytes.Clone(out.buffer.after)
	if s.n <= kernels.MaxRunRows && s.listed == 0 {
		listed := runs(offsets, s.n*s.k)
		all := r.ints("Runs", listed...)
		up.Runs = all.View(len(listed)/kernels.RunColumns, kernels.RunColumns)
		down.Runs = up.Runs
		mid.buffer.out, out.buffer.out = nil, nil
		l.writes(mid, func(_, place int) int { return place })
		l.writes(out, func(pair, _ int) int { return pair })
		r.do(&up, &down)
		all.buffer.partly = true
		r.alike(mid, wantMid, "runs")
		r.alike(out, wantOut, "runs")
		up.Runs, down.Runs = kernels.Tensor{}, kernels.Tensor{}
	}
	l.columns(r, up, down, x, mid, out, wantMid)
	if !r.o.BatchInvariant {
		return
	}

	// The same in launches of some of the experts each.
	mid.buffer.out, out.buffer.out = nil, nil
	l.writes(mid, func(_, place int) int { return place })
	l.writes(out, func(pair, _ int) int { return pair })
	cut := r.rand.IntN(len(listed) + 1)
	firstUp, firstDown, secondUp, secondDown := up, down, up, down
	firstUp.Experts, secondUp.Experts = up.Experts.Slice(0, cut), up.Experts.Slice(cut, len(listed))
	firstDown.Experts, secondDown.Experts = firstUp.Experts, secondUp.Experts
	r.do(&firstUp, &secondUp, &secondDown, &firstDown)
	r.alike(mid, wantMid, "experts in two launches")
	r.alike(out, wantOut, "experts in two launches")

	// A token alone.
	n := r.rand.IntN(s.n)
	one := layer{layout: layout, k: s.k, ids: l.ids[n : n+1], experts: l.experts}
	offsets, order = sorted(one.ids, s.experts)
	up.X, down.X = x.Slice(n, n+1), mid.Slice(n*s.k, (n+1)*s.k)
	up.Out, down.Out = down.X, out.Slice(n*s.k, (n+1)*s.k)
	up.Offsets, up.Order = r.ints("Offsets of one", offsets...).Tensor, r.ints("Order of one", order...).Tensor
	down.Offsets, down.Order = up.Offsets, up.Order
	mid.buffer.out, out.buffer.out = nil, nil
	mid1, out1 := tensor{up.Out, mid.buffer}, tensor{down.Out, out.buffer}
	one.order = order
	one.writes(mid1, func(_, place int) int { return place })
	one.writes(out1, func(pair, _ int) int { return pair })
	r.doPart(&up, &down)
	r.alike(out1, wantOut, "a token alone")
}

// expert of a pair.
func (l *layer) expert(pair int) *expert { return l.experts[l.ids[pair/l.k][pair%l.k]] }

// writes declares the rows of t that must be written: those of all pairs whose experts are
// listed.
func (l *layer) writes(t tensor, row func(pair, place int) int) {
	for place, pair := range l.order {
		if l.expert(pair) != nil {
			i := row(pair, place)
			tensor{t.Slice(i, i+1), t.buffer}.writes()
		}
	}
}

// columns runs both GEMMs with a part of the columns at a time.
func (l *layer) columns(r *rig, up kernels.ExpertUp, down kernels.ExpertDown, x, mid, out tensor, wantMid []byte) {
	r.Helper()
	n := l.layout.Intermediate
	if n <= kernels.TileColumns {
		return
	}
	cut := kernels.TileColumns * (1 + r.rand.IntN((n-1)/kernels.TileColumns))
	for _, c := range []kernels.Columns{{First: 0, End: cut}, {First: cut, End: n}} {
		part := tensor{mid.Narrow(1, c.First, c.End), mid.buffer}
		up.Columns, up.Out = c, part.Tensor
		down.Columns, down.X = c, part.Tensor
		mid.buffer.out, out.buffer.out = nil, nil
		l.writes(part, func(_, place int) int { return place })
		l.writes(out, func(pair, _ int) int { return pair })
		r.doPart(&up, &down)
		l.compare(r, x, part, out, c.First)
		if r.o.BatchInvariant {
			r.alike(part, wantMid, "a part of the columns")
		}
	}
}

// compare checks both GEMMs, of the columns of mid, the first of which is an expert's first.
func (l *layer) compare(r *rig, x, mid, out tensor, first int) {
	r.Helper()
	n := mid.Shape[1]
	macs := len(l.ids) * l.k * l.layout.Hidden * n
	inner, outer := r.sampled(n, macs), r.sampled(l.layout.Hidden, macs)
	// Many pairs have the same expert: its weights are decoded once.
	type weightRow struct {
		e    *expert
		part kernels.Part
		i    int
	}
	decoded := map[weightRow][]float64{}
	row := func(e *expert, part kernels.Part, i int) []float64 {
		at := weightRow{e, part, i}
		if decoded[at] == nil {
			decoded[at] = e.parts[part].row(i)
		}
		return decoded[at]
	}
	for place, pair := range l.order {
		e := l.expert(pair)
		if e == nil {
			continue
		}
		in := x.row(pair / l.k)
		var up, down []float64
		for _, i := range inner {
			up = append(up, silu(dot(row(e, kernels.W1, first+i), in))*dot(row(e, kernels.W3, first+i), in))
		}
		r.close(mid, pick(mid.got(place), inner), up, 0.1, place)
		hidden := mid.got(place) // as rounded to the activation type
		for _, i := range outer {
			down = append(down, dot(row(e, kernels.W2, i)[first:first+n], hidden))
		}
		r.close(out, pick(out.got(pair), outer), down, 0.1, pair)
	}
}

func testCombine(r *rig) {
	for i, n := range rowCounts {
		for k := 1; k <= 8; k *= 2 {
			shared := (i+k)%2 == 0
			r.run(fmt.Sprintf("rows=%d/k=%d/shared=%v", n, k, shared), func(r *rig) {
				const hidden = 48
				x := r.normal(r.rows(i%2 == 0, "X", r.act, n*k, hidden), 0, 1)
				weights := r.dense("Weights", kernels.F32, n, k).set(func(int) float64 { return r.rand.Float64() })
				s, sharedArg := optional(shared, func() tensor { return r.normal(r.rows(i%2 == 1, "Shared", r.act, n, hidden), 0, 1) })
				g, gateArg := optional(shared, func() tensor { return r.normal(r.dense("SharedGate", kernels.F32, n, 1), 0, 2) })
				out := r.rows(i%2 == 1, "Out", r.act, n, hidden)
				out.writes()
				r.do(&kernels.Combine{X: x.Tensor, Weights: weights.Tensor, Shared: sharedArg, SharedGate: gateArg, Out: out.Tensor})
				for n := range n {
					r.near(out, combined(x, weights, s, g, shared, n), n)
				}
				r.invariant(out, func(_ *rig, from, to int, out kernels.Tensor) kernels.Op {
					op := &kernels.Combine{X: x.Slice(from*k, to*k), Weights: weights.Slice(from, to), Out: out}
					if shared {
						op.Shared, op.SharedGate = s.Slice(from, to), g.Slice(from, to)
					}
					return op
				})
			})
		}
	}
}

// combined is the reference for token n: the weighted sum of its rows of x, plus the
// shared expert's row of s, scaled by its gate, if shared is set.
func combined(x, weights, s, gate tensor, shared bool, n int) []float64 {
	of := weights.row(n)
	want := make([]float64, x.Shape[1])
	for k, w := range of {
		for i, v := range x.row(n*len(of) + k) {
			want[i] += w * v
		}
	}
	if shared {
		for i, v := range s.row(n) {
			want[i] += v / (1 + math.Exp(-gate.row(n)[0]))
		}
	}
	return want
}

// testCombineNorm also requires the same bits as a Combine followed by a Norm. In every
// fourth column the first two outputs cancel each other and all else is 0, so that only
// the rounding errors of multiplications and additions remain.
func testCombineNorm(r *rig) {
	type shape struct{ rows, k, hidden int }
	var shapes []shape
	for k := 1; k <= 8; k++ {
		shapes = append(shapes, shape{rowCounts[k%len(rowCounts)], k, []int{48, 37, 272}[k%3]})
	}
	shapes = append(shapes, shape{2, 1, 2049}, shape{2, 2, 3584}, shape{3, 3, 2056}, shape{2, 8, 4096}, shape{2, 2, 4097}, shape{2, 5, 6144})
	if r.o.Full {
		shapes = append(shapes, shape{300, 2, 4096}, shape{300, 4, 2048}, shape{300, 8, 2048})
	}
	const eps = 1e-5
	for i, s := range shapes {
		for variant := range 4 {
			kind, shared := kernels.NormKind(variant&1), variant&2 != 0
			w := r.o.Weights[(i+variant)%len(r.o.Weights)]
			bias := kind == kernels.Layer && i%3 != 0
			r.run(fmt.Sprintf("%+v/kind=%d/%s/shared=%v", s, kind, w, shared), func(r *rig) {
				n, k := s.rows, s.k
				normal := func(mean float64) func(i int) float64 {
					return func(i int) float64 {
						if i%s.hidden%4 == 0 {
							return 0
						}
						return mean + r.rand.NormFloat64()
					}
				}
				others, first := normal(0.3), make([]float64, s.hidden)
				x := r.rows((i+variant)%2 == 0, "X", r.act, n*k, s.hidden).set(func(i int) float64 {
					output, column := i/s.hidden%k, i%s.hidden
					switch {
					case column%4 != 0 || output > 1:
						return others(i)
					case output == 1:
						return -first[column]
					}
					first[column] = 8 + 8*r.rand.Float64()
					return first[column]
				})
				var w0 float64
				weights := r.dense("Weights", kernels.F32, n, k).set(func(i int) float64 {
					if i%k != 1 {
						w0 = 0.1 + r.rand.Float64()
					}
					return w0
				})
				sh, sharedArg := optional(shared, func() tensor { return r.rows(i%2 == 1, "Shared", r.act, n, s.hidden).set(normal(0)) })
				g, gateArg := optional(shared, func() tensor { return r.normal(r.rows(i%2 == 0, "SharedGate", kernels.F32, n, 1), 0, 2) })
				residual := r.rows(i%2 == 0, "Residual", r.act, n, s.hidden).set(normal(0))
				weight := r.normal(r.dense("Weight", w, s.hidden), 1, 0.2)
				b, biasArg := optional(bias, func() tensor { return r.normal(r.dense("Bias", w, s.hidden), 0, 0.5) })
				out, sum := r.rows(i%3 == 0, "Out", r.act, n, s.hidden), r.dense("the sum", r.act, n, s.hidden)
				// op is the operation on rows [from, to).
				op := func(from, to int, out kernels.Tensor) *kernels.CombineNorm {
					o := &kernels.CombineNorm{
						X: x.Slice(from*k, to*k), Weights: weights.Slice(from, to),
						Kind: kind, Residual: residual.Slice(from, to), Weight: weight.Tensor, Bias: biasArg, Eps: eps, Out: out,
					}
					if shared {
						o.Shared, o.SharedGate = sharedArg.Slice(from, to), gateArg.Slice(from, to)
					}
					return o
				}
				residual.writes()
				out.writes()
				r.do(op(0, n, out.Tensor))
				for n := range n {
					in := combined(x, weights, sh, g, shared, n)
					for j, v := range residual.row(n) {
						in[j] += v
					}
					r.near(residual, in, n)
					want := norm(kind, residual.got(n), weight.row(), eps) // of what was rounded to the activation type
					if bias {
						for j, v := range b.row() {
							want[j] += v
						}
					}
					r.near(out, want, n)
				}
				wantOut, wantResidual := bytes.Clone(out.buffer.after), bytes.Clone(residual.buffer.after)
				r.invariant(out, func(_ *rig, from, to int, out kernels.Tensor) kernels.Op {
					residual.buffer.out = nil
					tensor{residual.Slice(from, to), residual.buffer}.writes()
					return op(from, to, out)
				})
				residual.writes()
				out.writes()
				sum.writes()
				r.do(&kernels.Combine{X: x.Tensor, Weights: weights.Tensor, Shared: sharedArg, SharedGate: gateArg, Out: sum.Tensor},
					&kernels.Norm{Kind: kind, X: sum.Tensor, Residual: residual.Tensor, Weight: weight.Tensor, Bias: biasArg, Eps: eps, Out: out.Tensor})
				r.alike(residual, wantResidual, "combine and norm")
				r.alike(out, wantOut, "combine and norm")
			})
		}
	}
}

// testLayout checks extents, and that packing in pieces equals packing at once.
func testLayout(r *rig) {
	for _, w := range r.o.Weights {
		for _, s := range []kernels.ExpertShape{{Hidden: 16, Intermediate: 48, DType: w}, {Hidden: 272, Intermediate: 80, DType: w}} {
			r.run(fmt.Sprint(s), func(r *rig) {
				l, err := r.backend.ExpertLayout(s)
				r.must(err)
				if l.ExpertShape != s || l.Tag == "" || l.Size < s.Bytes() || l.Size%256 != 0 {
					r.Fatalf("layout %+v of %+v", l, s)
				}
				pieces := r.newExpert(l, 0, r.stream.Space())
				whole := bytes.Repeat([]byte{poison}, int(l.Size))
				for p, d := range pieces.parts {
					r.must(r.backend.PackExpert(l, kernels.Part(p), 0, d.data, whole))
				}
				if !bytes.Equal(whole, pieces.extent.all()) {
					r.Error("an expert packed in pieces differs from one packed at once")
				}
				row := s.Hidden * w.Size()
				for name, err := range map[string]error{
					"a row too many":    r.backend.PackExpert(l, kernels.W1, s.Intermediate, make([]byte, row), whole),
					"a negative row":    r.backend.PackExpert(l, kernels.W1, -1, make([]byte, row), whole),
					"half a row":        r.backend.PackExpert(l, kernels.W1, 0, make([]byte, row/2), whole),
					"a short extent":    r.backend.PackExpert(l, kernels.W1, 0, make([]byte, row), whole[:l.Size-1]),
					"a fourth matrix":   r.backend.PackExpert(l, kernels.Part(3), 0, make([]byte, row), whole),
					"another's layout":  r.backend.PackExpert(kernels.ExpertLayout{ExpertShape: s, Tag: "unknown", Size: l.Size}, kernels.W1, 0, make([]byte, row), whole),
					"integers":          second(r.backend.ExpertLayout(kernels.ExpertShape{Hidden: 16, Intermediate: 16, DType: kernels.I32})),
					"an empty expert":   second(r.backend.ExpertLayout(kernels.ExpertShape{Intermediate: 16, DType: w})),
					"a negative expert": second(r.backend.ExpertLayout(kernels.ExpertShape{Hidden: 16, Intermediate: -16, DType: w})),
				} {
					if err == nil {
						r.Errorf("%s is no error", name)
					}
				}
			})
		}
	}
}

func second[T any](_ T, err error) error { return err }
