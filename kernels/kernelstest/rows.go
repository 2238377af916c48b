package kernelstest

import (
	"fmt"
	"math"
	"slices"

	"github.com/moeserve/moeserve/kernels"
)

// rowCounts are the ragged numbers of rows at which most operations are tested.
var rowCounts = []int{1, 2, 7, 33}

// optional is a tensor, or none.
func optional(has bool, t func() tensor) (tensor, kernels.Tensor) {
	if !has {
		return tensor{}, kernels.Tensor{}
	}
	x := t()
	return x, x.Tensor
}

func testEmbed(r *rig) {
	for i, n := range rowCounts {
		for _, w := range r.o.Weights {
			r.run(fmt.Sprintf("rows=%d/%s", n, w), func(r *rig) {
				const vocabulary, hidden = 41, 48
				ids := make([]int, n)
				for i := range ids {
					ids[i] = r.rand.IntN(vocabulary)
				}
				ids[0] = vocabulary - 1
				ids[n/2] = -1 // where there was no token
				table := r.normal(r.rows(i%2 == 1, "Table", w, vocabulary, hidden), 0, 1)
				out := r.rows(i%2 == 0, "Out", r.act, n, hidden)
				out.writes()
				r.do(&kernels.Embed{IDs: r.ints("IDs", ids...).Tensor, Table: table.Tensor, Out: out.Tensor})
				for n, id := range ids {
					if id >= 0 {
						r.near(out, table.row(id), n)
					} else if got := out.got(n); slices.ContainsFunc(got, func(v float64) bool { return !math.IsNaN(v) }) {
						r.Fatalf("row %d, of no token, is %v, want NaN", n, got)
					}
				}
			})
		}
	}
}

func testNorm(r *rig) {
	type shape struct {
		rows, heads, d int // heads 0: rank 2
	}
	shapes := []shape{{1, 0, 16}, {2, 0, 64}, {7, 0, 272}, {33, 0, 128}, {5, 4, 16}, {3, 2, 128}, {1, 1, 96}, {2, 0, 1500}, {2, 0, 3000}, {1, 0, 5000}}
	if r.o.Full {
		shapes = append(shapes, shape{3, 0, 4096}, shape{3, 0, 3584}, shape{3, 32, 128})
	}
	for i, s := range shapes {
		for _, kind := range []kernels.NormKind{kernels.RMS, kernels.Layer} {
			w := r.o.Weights[i%len(r.o.Weights)]
			for variant := range 4 {
				residual, inPlace := variant&1 != 0, variant&2 != 0
				bias := kind == kernels.Layer && i%3 != 0
				r.run(fmt.Sprintf("%v/kind=%d/%s/residual=%v/in-place=%v", s, kind, w, residual, inPlace), func(r *rig) {
					dims := []int{s.rows, s.heads, s.d}
					if s.heads == 0 {
						dims = []int{s.rows, s.d}
					}
					x := r.normal(r.rows(i%2 == 0, "X", r.act, dims...), 0.5, 2)
					res, resArg := optional(residual, func() tensor { return r.normal(r.rows(i%2 == 1, "Residual", r.act, dims...), 0, 1) })
					weight := r.normal(r.dense("Weight", w, s.d), 1, 0.2)
					b, biasArg := optional(bias, func() tensor { return r.normal(r.dense("Bias", w, s.d), 0, 0.5) })
					out := x
					if !inPlace {
						out = r.rows(variant == 1, "Out", r.act, dims...)
					}
					out.writes()
					if residual {
						res.writes()
					}
					const eps = 1e-5
					r.do(&kernels.Norm{Kind: kind, X: x.Tensor, Residual: resArg, Weight: weight.Tensor, Bias: biasArg, Eps: eps, Out: out.Tensor})
					x.each(func(index ...int) {
						in := x.row(index...)
						if residual {
							for j, v := range res.row(index...) {
								in[j] += v
							}
							r.near(res, in, index...)
							in = res.got(index...) // rounded to the activation type before it is normed
						}
						want := norm(kind, in, weight.row(), eps)
						if bias {
							for j, v := range b.row() {
								want[j] += v
							}
						}
						r.near(out, want, index...)
					})
					if !residual {
						r.invariant(out, func(_ *rig, from, to int, out kernels.Tensor) kernels.Op {
							return &kernels.Norm{Kind: kind, X: x.Slice(from, to), Weight: weight.Tensor, Bias: biasArg, Eps: eps, Out: out}
						})
					}
				})
			}
		}
	}
}

func norm(kind kernels.NormKind, x, weight []float64, eps float64) []float64 {
	n := float64(len(x))
	var mean, square float64
	if kind == kernels.Layer {
		for _, v := range x {
			mean += v / n
		}
	}
	for _, v := range x {
		square += (v - mean) * (v - mean) / n
	}
	want := make([]float64, len(x))
	for i, v := range x {
		want[i] = (v - mean) / math.Sqrt(square+eps) * weight[i]
	}
	return want
}

func testClamp(r *rig) {
	for i, n := range rowCounts {
		r.run(fmt.Sprintf("rows=%d", n), func(r *rig) {
			const limit = 0.75
			x := r.normal(r.rows(i%2 == 0, "X", r.act, n, 48), 0, 1)
			x.writes()
			r.do(&kernels.Clamp{X: x.Tensor, Limit: limit})
			x.each(func(index ...int) {
				want := x.row(index...)
				for i, v := range want {
					want[i] = min(max(v, -limit), limit)
				}
				r.exact(x, want, index...)
			})
		})
	}
}

func testRoPE(r *rig) {
	type shape struct{ rows, heads, kvHeads, d int }
	shapes := []shape{
		{1, 1, 1, 16},
		{2, 4, 1, 32},
		{7, 4, 4, 64},
		{33, 8, 2, 80},
		{5, 2, 1, 96},
		{9, 4, 2, 128},
		{3, 2, 1, 24}, // of these two rows are aligned, and upper halves are not
		{4, 4, 2, 88},
	}
	if r.o.Full {
		shapes = append(shapes, shape{3, 32, 8, 128}, shape{3, 28, 4, 128}, shape{3, 16, 16, 128})
	}
	for i, s := range shapes {
		r.run(fmt.Sprint(s), func(r *rig) {
			const places = 50
			q := r.normal(r.rows(i%2 == 0, "Q", r.act, s.rows, s.heads, s.d), 0, 1)
			k := r.normal(r.rows(i%3 == 0, "K", r.act, s.rows, s.kvHeads, s.d), 0, 1)
			table := r.rotations(places, s.d)
			rows := make([]int, s.rows)
			for i := range rows {
				rows[i] = r.rand.IntN(places)
			}
			rows[0] = places - 1
			at := r.ints("Rows", rows...)
			q.writes()
			k.writes()
			r.do(&kernels.RoPE{Q: q.Tensor, K: k.Tensor, Table: table.Tensor, Rows: at.Tensor})
			for _, t := range []tensor{q, k} {
				t.each(func(index ...int) {
					r.near(t, rotated(t.row(index...), table.row(rows[index[0]])), index...)
				})
			}
		})
	}
}

// rotations returns a table of cosines and sines.
func (r *rig) rotations(places, d int) tensor {
	r.Helper()
	half := d / 2
	return r.dense("Table", kernels.F32, places, d).set(func(i int) float64 {
		angle := float64(i/d) * math.Pow(100, -float64(i%half)/float64(half))
		if i%d < half {
			return math.Cos(angle)
		}
		return math.Sin(angle)
	})
}

// rotated returns x rotated by one row of the table.
func rotated(x, angles []float64) []float64 {
	half := len(x) / 2
	want := make([]float64, len(x))
	for i := range half {
		c, s := angles[i], angles[half+i]
		want[i] = x[i]*c - x[i+half]*s
		want[i+half] = x[i+half]*c + x[i]*s
	}
	return want
}

func silu(x float64) float64 { return x / (1 + math.Exp(-x)) }

func testSiluMul(r *rig) {
	for i, n := range rowCounts {
		for _, inPlace := range []bool{false, true} {
			r.run(fmt.Sprintf("rows=%d/in-place=%v", n, inPlace), func(r *rig) {
				const columns = 112
				gate := r.normal(r.rows(i%2 == 0, "Gate", r.act, n, columns), 0, 4)
				up := r.normal(r.rows(i%2 == 1, "Up", r.act, n, columns), 0, 1)
				copy(gate.in(gate.buffer.before, 0), up.in(up.buffer.before, 0)) // a few far from 0
				out := gate
				if !inPlace {
					out = r.rows(i%3 == 0, "Out", r.act, n, columns)
				}
				out.writes()
				r.do(&kernels.SiluMul{Gate: gate.Tensor, Up: up.Tensor, Out: out.Tensor})
				for n := range n {
					want := up.row(n)
					for i, g := range gate.row(n) {
						want[i] *= silu(g)
					}
					r.near(out, want, n)
				}
			})
		}
	}
}

func testGather(r *rig) {
	for i, n := range rowCounts {
		r.run(fmt.Sprintf("rows=%d", n), func(r *rig) {
			const from, columns = 11, 48
			x := r.normal(r.rows(i%2 == 0, "X", r.act, from, columns), 0, 1)
			x.buffer.partly = true
			rows := make([]int, n)
			for i := range rows {
				rows[i] = r.rand.IntN(from)
			}
			rows[n/2] = from - 1
			out := r.rows(i%2 == 1, "Out", r.act, n, columns)
			out.writes()
			r.do(&kernels.Gather{X: x.Tensor, Rows: r.ints("Rows", rows...).Tensor, Out: out.Tensor})
			for i, from := range rows {
				r.exact(out, x.row(from), i)
			}
		})
	}
}
