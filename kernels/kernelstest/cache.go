package kernelstest

import (
	"bytes"
	"fmt"
	"math"

	"github.com/moeserve/moeserve/kernels"
)

// pagedCache is one layer's part of a paged cache in which a block's keys and
// values of all layers are contiguous.
type pagedCache struct{ k, v tensor }

func (r *rig) cache(blocks, tokens, heads, d int) pagedCache {
	r.Helper()
	const layers, layer = 3, 1
	one := tokens * heads * d
	all := r.dense("cache", r.act, blocks, layers*2*one)
	view := func(which int) tensor {
		t := kernels.New(all.Narrow(1, (2*layer+which)*one, (2*layer+which+1)*one).Addr, r.act, blocks, tokens, heads, d)
		t.Stride[0] = all.Stride[0]
		return tensor{t, all.buffer}
	}
	return pagedCache{view(0), view(1)}
}

func testAppendKV(r *rig) {
	type shape struct{ rows, blocks, tokens, heads, d int }
	for i, s := range []shape{{1, 3, 16, 1, 16}, {2, 2, 16, 4, 32}, {7, 5, 16, 2, 80}, {33, 4, 32, 2, 128}} {
		r.run(fmt.Sprint(s), func(r *rig) {
			k := r.normal(r.rows(i%2 == 0, "K", r.act, s.rows, s.heads, s.d), 0, 1)
			v := r.normal(r.rows(i%2 == 1, "V", r.act, s.rows, s.heads, s.d), 0, 1)
			cache := r.cache(s.blocks, s.tokens, s.heads, s.d)
			slots := r.rand.Perm(s.blocks * s.tokens)[:s.rows]
			if s.rows > 2 {
				slots[s.rows/2] = -1
			}
			for _, slot := range slots {
				if slot >= 0 {
					b, t := slot/s.tokens, slot%s.tokens
					tensor{cache.k.Narrow(0, b, b+1).Narrow(1, t, t+1), cache.k.buffer}.writes()
					tensor{cache.v.Narrow(0, b, b+1).Narrow(1, t, t+1), cache.v.buffer}.writes()
				}
			}
			r.do(&kernels.AppendKV{
				K: k.Tensor, V: v.Tensor, CacheK: cache.k.Tensor, CacheV: cache.v.Tensor,
				Slots: r.ints("Slots", slots...).Tensor,
			})
			for n, slot := range slots {
				for h := range s.heads {
					if slot >= 0 {
						r.exact(cache.k, k.row(n, h), slot/s.tokens, slot%s.tokens, h)
						r.exact(cache.v, v.row(n, h), slot/s.tokens, slot%s.tokens, h)
					}
				}
			}
		})
	}
}

// sequence has so many rows at the end of so many tokens.
type sequence struct{ context, rows int }

type attentionShape struct {
	heads, kvHeads, d, tokens, window int
	sequences                         []sequence
}

func testAttention(r *rig) {
	shapes := []attentionShape{
		{1, 1, 16, 16, 0, []sequence{{1, 1}}},
		{2, 2, 32, 16, 0, []sequence{{5, 5}}},
		{4, 2, 64, 16, 0, []sequence{{33, 33}, {1, 1}, {17, 2}}},
		{8, 1, 80, 16, 0, []sequence{{40, 7}, {16, 16}}},
		{4, 1, 96, 32, 0, []sequence{{100, 1}, {31, 1}, {32, 1}, {33, 1}}},
		{8, 4, 128, 16, 0, []sequence{{97, 3}, {250, 1}}},
		{2, 1, 16, 16, 5, []sequence{{1, 1}, {4, 4}, {5, 1}, {6, 1}, {40, 33}}},
		{4, 4, 32, 16, 1, []sequence{{20, 3}}},
		{4, 2, 64, 16, 100, []sequence{{300, 5}, {99, 2}, {101, 1}}},
		{16, 2, 32, 16, 0, []sequence{{700, 2}, {5, 0}, {3, 1}}},
	}
	if r.o.Full {
		batch := []sequence{{93, 1}, {1030, 1}, {513, 2}, {64, 64}}
		shapes = append(shapes,
			attentionShape{32, 8, 128, 16, 0, batch},
			attentionShape{16, 4, 128, 16, 2047, []sequence{{2100, 3}, {2046, 1}, {2048, 1}}},
			attentionShape{16, 16, 128, 16, 0, batch},
			attentionShape{28, 4, 128, 16, 0, batch},
			attentionShape{32, 4, 128, 16, 0, batch},
		)
	}
	for i, s := range shapes {
		r.run(fmt.Sprintf("%+v", s), func(r *rig) { testAttentionShape(r, s, i%2 == 0) })
	}
}

func testAttentionShape(r *rig, s attentionShape, gaps bool) {
	starts, lens := []int{0}, []int(nil)
	maxContext, maxRows, blocks := 0, 0, 3
	for _, q := range s.sequences {
		starts, lens = append(starts, starts[len(starts)-1]+q.rows), append(lens, q.context)
		maxContext, maxRows = max(maxContext, q.context), max(maxRows, q.rows)
		blocks += (q.context + s.tokens - 1) / s.tokens
	}
	rows := starts[len(starts)-1]
	width := (maxContext+s.tokens-1)/s.tokens + 1

	// Blocks in no order; what no query sees has no block, or is poison.
	cache := r.cache(blocks, s.tokens, s.kvHeads, s.d)
	free := r.rand.Perm(blocks)
	table := make([]int, len(s.sequences)*width)
	for i := range table {
		table[i] = -1
	}
	place := func(seq, t int) (block, row int) { return table[seq*width+t/s.tokens], t % s.tokens }
	for i, q := range s.sequences {
		first := 0
		if s.window > 0 {
			first = max(0, q.context-q.rows-s.window+1)
		}
		for t := first; t < q.context && q.rows > 0; t++ {
			if at := i*width + t/s.tokens; table[at] < 0 {
				table[at], free = free[0], free[1:]
			}
			b, row := place(i, t)
			r.normal(tensor{cache.k.Narrow(0, b, b+1).Narrow(1, row, row+1), cache.k.buffer}, 0, 1)
			r.normal(tensor{cache.v.Narrow(0, b, b+1).Narrow(1, row, row+1), cache.v.buffer}, 0, 1)
		}
	}
	q := r.normal(r.rows(gaps, "Q", r.act, rows, s.heads, s.d), 0, 2)
	out := r.rows(!gaps, "Out", r.act, rows, s.heads, s.d)
	out.writes()
	blockTable := r.dense("BlockTable", kernels.I32, len(s.sequences), width).set(func(i int) float64 { return float64(table[i]) })
	op := kernels.Attention{
		Q: q.Tensor, CacheK: cache.k.Tensor, CacheV: cache.v.Tensor,
		SeqStarts: r.ints("SeqStarts", starts...).Tensor, ContextLens: r.ints("ContextLens", lens...).Tensor,
		BlockTable: blockTable.Tensor,
		Window:     s.window, Scale: float32(1 / math.Sqrt(float64(s.d))), MaxContext: maxContext, MaxRows: maxRows, Out: out.Tensor,
	}
	r.do(&op)

	for i, seq := range s.sequences {
		for j := range seq.rows {
			p := seq.context - seq.rows + j
			first := 0
			if s.window > 0 {
				first = max(0, p-s.window+1)
			}
			for h := range s.heads {
				kvHead := h / (s.heads / s.kvHeads)
				query := q.row(starts[i]+j, h)
				var scores []float64
				largest, sum := math.Inf(-1), 0.0
				for t := first; t <= p; t++ {
					b, row := place(i, t)
					scores = append(scores, dot(query, cache.k.row(b, row, kvHead))*float64(op.Scale))
					largest = max(largest, scores[len(scores)-1])
				}
				want := make([]float64, s.d)
				for n, score := range scores {
					e := math.Exp(score - largest)
					sum += e
					b, row := place(i, first+n)
					for d, v := range cache.v.row(b, row, kvHead) {
						want[d] += e * v
					}
				}
				for d := range want {
					want[d] /= sum
				}
				r.near(out, want, starts[i]+j, h)
			}
		}
	}
	if !r.o.BatchInvariant {
		return
	}

	// Rows alone, as decoding would come upon them.
	want := bytes.Clone(out.buffer.after)
	for i, seq := range s.sequences {
		for j := range min(seq.rows, 5) {
			n := starts[i] + j
			one := tensor{out.Slice(n, n+1), out.buffer}
			alone := op
			alone.Q, alone.Out = q.Slice(n, n+1), one.Tensor
			alone.SeqStarts = r.ints("SeqStarts of one", 0, 1).Tensor
			alone.ContextLens = r.ints("ContextLens of one", seq.context-seq.rows+j+1).Tensor
			alone.BlockTable = blockTable.Slice(i, i+1)
			alone.MaxRows = 1
			out.buffer.out = nil
			one.writes()
			r.doPart(&alone)
			r.alike(one, want, "a row alone")
		}
	}
}
