package kernelstest

import (
	"bytes"
	"fmt"
	"math"
	"slices"

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

// writes declares that the operation must write the cache entries of all non-negative
// slots.
func (c pagedCache) writes(slots []int) {
	tokens := c.k.Shape[1]
	for _, slot := range slots {
		if slot >= 0 {
			b, t := slot/tokens, slot%tokens
			tensor{c.k.Narrow(0, b, b+1).Narrow(1, t, t+1), c.k.buffer}.writes()
			tensor{c.v.Narrow(0, b, b+1).Narrow(1, t, t+1), c.v.buffer}.writes()
		}
	}
}

func testAppendKV(r *rig) {
	type shape struct{ rows, blocks, tokens, heads, d int }
	for i, s := range []shape{{1, 3, 16, 1, 16}, {2, 2, 16, 4, 32}, {7, 5, 16, 2, 80}, {33, 4, 32, 2, 128}, {19, 4, 8, 2, 32}, {33, 2, 64, 1, 128}, {40, 2, 128, 2, 64}} {
		r.run(fmt.Sprint(s), func(r *rig) {
			k := r.normal(r.rows(i%2 == 0, "K", r.act, s.rows, s.heads, s.d), 0, 1)
			v := r.normal(r.rows(i%2 == 1, "V", r.act, s.rows, s.heads, s.d), 0, 1)
			cache := r.cache(s.blocks, s.tokens, s.heads, s.d)
			slots := r.rand.Perm(s.blocks * s.tokens)[:s.rows]
			if s.rows > 2 {
				slots[s.rows/2] = -1
			}
			cache.writes(slots)
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

type ropeAppendShape struct{ rows, heads, kvHeads, d, blocks, tokens int }

func testRoPEAppendKV(r *rig) {
	shapes := []ropeAppendShape{
		{1, 1, 1, 16, 3, 16},
		{2, 4, 1, 32, 2, 16},
		{7, 4, 4, 64, 5, 16},
		{33, 8, 2, 80, 4, 32},
		{5, 2, 1, 96, 2, 16},
		{9, 4, 2, 128, 3, 16},
		{1, 32, 8, 128, 1, 16},
		{6, 3, 2, 20, 2, 16}, // whose rows are not aligned
		{3, 5, 1, 42, 2, 16},
		{4, 1, 1, 2, 2, 16},
		{9, 30, 3, 256, 1, 16},
		{3, 2, 1, 24, 2, 16}, // whose rows are aligned, and upper halves are not
		{4, 4, 2, 88, 2, 16},
		{19, 4, 2, 128, 5, 8},
		{33, 4, 1, 64, 2, 64},
		{40, 2, 2, 32, 2, 128},
	}
	if r.o.Full {
		shapes = append(shapes, ropeAppendShape{3, 32, 8, 128, 2, 16}, ropeAppendShape{3, 32, 4, 128, 2, 16}, ropeAppendShape{180, 16, 16, 128, 12, 16})
	}
	for i, s := range shapes {
		r.run(fmt.Sprint(s), func(r *rig) { testRoPEAppendKVShape(r, s, i, kernels.Invalid) })
		for _, w := range r.o.Weights {
			r.run(fmt.Sprintf("%v/norm=%v", s, w), func(r *rig) { testRoPEAppendKVShape(r, s, i, w) })
		}
	}
}

// testRoPEAppendKVShape uses norms with weights of type w, or no norms. Results must be
// near the reference and have the same bits as Norm, RoPE and AppendKV in sequence.
func testRoPEAppendKVShape(r *rig, s ropeAppendShape, i int, w kernels.DType) {
	const places, eps = 50, 1e-5
	var q, k, v tensor
	if i%3 == 0 { // side by side, as one product leaves them
		all := r.normal(r.rows(i%2 == 0, "QKV", r.act, s.rows, (s.heads+2*s.kvHeads)*s.d), 0.5, 1)
		part := func(from, heads int) tensor {
			return tensor{all.Narrow(1, from*s.d, (from+heads)*s.d).View(s.rows, heads, s.d), all.buffer}
		}
		q, k, v = part(0, s.heads), part(s.heads, s.kvHeads), part(s.heads+s.kvHeads, s.kvHeads)
	} else {
		q = r.normal(r.rows(i%2 == 0, "Q", r.act, s.rows, s.heads, s.d), 0.5, 1)
		k = r.normal(r.rows(i%3 == 1, "K", r.act, s.rows, s.kvHeads, s.d), 0.5, 1)
		v = r.normal(r.rows(i%4 == 1, "V", r.act, s.rows, s.kvHeads, s.d), 0.5, 1)
	}
	norms := w != kernels.Invalid
	qNorm, qNormArg := optional(norms, func() tensor { return r.normal(r.dense("QNorm", w, s.d), 1, 0.2) })
	kNorm, kNormArg := optional(norms, func() tensor { return r.normal(r.dense("KNorm", w, s.d), 1, 0.2) })
	table := r.rotations(places, s.d)
	rows := make([]int, s.rows)
	for i := range rows {
		rows[i] = r.rand.IntN(places)
	}
	rows[0] = places - 1
	at := r.ints("Rows", rows...)
	cache := r.cache(s.blocks, s.tokens, s.kvHeads, s.d)
	slots := r.rand.Perm(s.blocks * s.tokens)[:s.rows]
	if s.rows > 2 {
		slots[s.rows/2] = -1
	}
	slotsArg := r.ints("Slots", slots...)

	q.writes()
	cache.writes(slots)
	r.do(&kernels.RoPEAppendKV{
		Q: q.Tensor, K: k.Tensor, V: v.Tensor, QNorm: qNormArg, KNorm: kNormArg, Eps: eps, Table: table.Tensor, Rows: at.Tensor,
		CacheK: cache.k.Tensor, CacheV: cache.v.Tensor, Slots: slotsArg.Tensor,
	})
	want := func(x, weight tensor, row, head int) []float64 {
		in := x.row(row, head)
		if norms {
			in = norm(kernels.RMS, in, weight.row(), eps)
		}
		return rotated(in, table.row(rows[row]))
	}
	for n, slot := range slots {
		for h := range s.heads {
			r.near(q, want(q, qNorm, n, h), n, h)
		}
		for h := range s.kvHeads {
			if slot >= 0 {
				r.near(cache.k, want(k, kNorm, n, h), slot/s.tokens, slot%s.tokens, h)
				r.exact(cache.v, v.row(n, h), slot/s.tokens, slot%s.tokens, h)
			}
		}
	}

	together := []tensor{q, cache.k, cache.v}
	bits := make([][]byte, len(together))
	for i, t := range together {
		bits[i] = bytes.Clone(t.buffer.after)
	}
	var apart []kernels.Op
	if norms {
		for _, x := range [...]struct{ x, w kernels.Tensor }{{q.Tensor, qNormArg}, {k.Tensor, kNormArg}} {
			apart = append(apart, &kernels.Norm{Kind: kernels.RMS, X: x.x, Weight: x.w, Eps: eps, Out: x.x})
		}
	}
	apart = append(apart, &kernels.RoPE{Q: q.Tensor, K: k.Tensor, Table: table.Tensor, Rows: at.Tensor},
		&kernels.AppendKV{K: k.Tensor, V: v.Tensor, CacheK: cache.k.Tensor, CacheV: cache.v.Tensor, Slots: slotsArg.Tensor})
	k.writes()
	r.doPart(apart...)
	for i, t := range together {
		t.each(func(index ...int) {
			if got, want := t.in(bits[i], index...), t.in(t.buffer.after, index...); !bytes.Equal(got, want) {
				r.Fatalf("%s%v is %v, and of norm, rope and append_kv one after the other %v", t.buffer.name, index, t.decode(got), t.decode(want))
			}
		})
	}
}

// sequence has context tokens, of which the last rows tokens are queries.
type sequence struct{ context, rows int }

type attentionShape struct {
	heads, kvHeads, d, tokens, window int
	sequences                         []sequence
}

// cachedSequences has the blocks of the sequences of a shape, in no order. What no query sees has no
// block.
type cachedSequences struct {
	pagedCache
	attentionShape
	starts, lens, table []int
	width               int // blocks of a row of the table
	maxContext, maxRows int
}

// sequences returns the sequences of a shape, whose keys and values are poison.
func (r *rig) sequences(s attentionShape) *cachedSequences {
	r.Helper()
	c := &cachedSequences{attentionShape: s, starts: []int{0}}
	blocks := 3
	for _, q := range s.sequences {
		c.starts, c.lens = append(c.starts, c.rows()+q.rows), append(c.lens, q.context)
		c.maxContext, c.maxRows = max(c.maxContext, q.context), max(c.maxRows, q.rows)
		blocks += (q.context + s.tokens - 1) / s.tokens
	}
	c.width = (c.maxContext+s.tokens-1)/s.tokens + 1
	c.pagedCache = r.cache(blocks, s.tokens, s.kvHeads, s.d)
	c.table = slices.Repeat([]int{-1}, len(s.sequences)*c.width)
	free := r.rand.Perm(blocks)
	for i, q := range s.sequences {
		for t := c.first(q.context - q.rows); t < q.context && q.rows > 0; t++ {
			if at := i*c.width + t/s.tokens; c.table[at] < 0 {
				c.table[at], free = free[0], free[1:]
			}
		}
	}
	return c
}

func (c *cachedSequences) rows() int { return c.starts[len(c.starts)-1] }

// first is the first position that the token at position p attends to.
func (c *cachedSequences) first(p int) int {
	if c.window == 0 {
		return 0
	}
	return max(0, p-c.window+1)
}

// place is where a sequence has position t.
func (c *cachedSequences) place(seq, t int) (block, row int) {
	return c.table[seq*c.width+t/c.tokens], t % c.tokens
}

// fill sets what the rows of a sequence attend to, except its last positions, without of them.
func (c *cachedSequences) fill(r *rig, seq, without int) {
	q := c.sequences[seq]
	for t := c.first(q.context - q.rows); t < q.context-without && q.rows > 0; t++ {
		c.fillOne(r, seq, t)
	}
}

func (c *cachedSequences) fillOne(r *rig, seq, t int) {
	b, row := c.place(seq, t)
	for _, x := range [...]tensor{c.k, c.v} {
		r.normal(tensor{x.Narrow(0, b, b+1).Narrow(1, row, row+1), x.buffer}, 0, 1)
	}
}

// attention returns the operation on the sequences.
func (c *cachedSequences) attention(r *rig, q, out tensor, early bool) kernels.Attention {
	r.Helper()
	return kernels.Attention{
		Q: q.Tensor, CacheK: c.k.Tensor, CacheV: c.v.Tensor,
		SeqStarts: r.ints("SeqStarts", c.starts...).Tensor, ContextLens: r.ints("ContextLens", c.lens...).Tensor,
		BlockTable: r.dense("BlockTable", kernels.I32, len(c.sequences), c.width).set(func(i int) float64 { return float64(c.table[i]) }).Tensor,
		Window:     c.window, Scale: float32(1 / math.Sqrt(float64(c.d))), MaxContext: c.maxContext, MaxSeqTokens: c.maxRows, PastReady: early, Out: out.Tensor,
	}
}

// headRows are the keys and values of a sequence and a head of theirs, by position; those that no
// query sees are nil.
type headRows struct{ keys, values [][]float64 }

// decode returns what the sequences attend to, by sequence and head of keys and values; at returns a row.
func (c *cachedSequences) decode(at func(t tensor, index ...int) []float64) [][]headRows {
	all := make([][]headRows, len(c.sequences))
	for i, q := range c.sequences {
		all[i] = make([]headRows, c.kvHeads)
		for h := range all[i] {
			x := headRows{make([][]float64, q.context), make([][]float64, q.context)}
			for t := c.first(q.context - q.rows); t < q.context && q.rows > 0; t++ {
				b, row := c.place(i, t)
				x.keys[t], x.values[t] = at(c.k, b, row, h), at(c.v, b, row, h)
			}
			all[i][h] = x
		}
	}
	return all
}

// attended is the attention of a query of a sequence's row and head to what decode returned.
func (c *cachedSequences) attended(query []float64, all [][]headRows, seq, row, head int) []float64 {
	p := c.sequences[seq].context - c.sequences[seq].rows + row
	first, x := c.first(p), &all[seq][head/(c.heads/c.kvHeads)]
	var scores []float64
	for t := first; t <= p; t++ {
		scores = append(scores, dot(query, x.keys[t])/math.Sqrt(float64(c.d)))
	}
	largest, sum, out := slices.Max(scores), 0.0, make([]float64, c.d)
	for n, score := range scores {
		e := math.Exp(score - largest)
		sum += e
		for d, v := range x.values[first+n] {
			out[d] += e * v
		}
	}
	for d := range out {
		out[d] /= sum
	}
	return out
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
		{4, 2, 64, 8, 0, []sequence{{33, 33}, {8, 1}, {9, 2}, {290, 1}}},
		{8, 2, 128, 64, 0, []sequence{{150, 3}, {64, 1}, {65, 40}, {290, 1}}},
		{4, 1, 32, 128, 0, []sequence{{300, 1}, {128, 1}, {129, 2}, {40, 40}}},
		{4, 2, 64, 64, 100, []sequence{{300, 5}, {99, 2}, {101, 1}}},
		// Prompts, whole and from a position on, of heads for which some devices have own kernels.
		{2, 1, 128, 16, 0, []sequence{{530, 530}}},
		{8, 2, 128, 32, 0, []sequence{{700, 70}, {300, 1}, {40, 40}, {260, 4}}},
		{4, 1, 128, 8, 200, []sequence{{650, 90}, {230, 200}, {640, 1}}},
		{2, 2, 128, 256, 0, []sequence{{513, 129}, {256, 1}, {257, 200}}},
		{7, 1, 128, 16, 0, []sequence{{150, 40}, {20, 3}}},
		{4, 2, 128, 24, 0, []sequence{{290, 30}, {25, 1}}}, // whose blocks have no power of two of tokens
		{4, 2, 128, 16, 0, slices.Repeat([]sequence{{1, 1}, {33, 2}, {5, 0}, {20, 20}}, 10)},
		// Few tokens of few sequences, for which some devices have own kernels: a chunk and its parts, several, and windows.
		{8, 4, 128, 16, 0, []sequence{{97, 1}, {65, 2}, {1, 1}}},
		{4, 1, 128, 16, 0, []sequence{{260, 1}, {511, 2}, {700, 1}}},
		{4, 1, 128, 16, 100, []sequence{{300, 2}, {99, 1}, {101, 1}}},
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
		test := func(name string, gaps bool) {
			r.run(fmt.Sprintf("%+v%s", s, name), func(r *rig) {
				testAttentionShape(r, s, func(n int) tensor { return r.rows(!gaps, "Q", r.act, n, s.heads, s.d) }, gaps, gaps)
			})
		}
		test("", i%2 != 0)
		if most := slices.MaxFunc(s.sequences, func(a, b sequence) int { return a.rows - b.rows }); s.d == 128 && most.rows <= 4 {
			test(fmt.Sprintf(", past ready: %v", i%2 == 0), i%2 == 0)
		}
	}
	for _, s := range []attentionShape{{8, 2, 64, 16, 0, []sequence{{33, 20}, {1, 1}, {17, 2}}}, {8, 2, 128, 16, 0, []sequence{{33, 2}, {1, 1}}}} {
		r.run(fmt.Sprintf("rows of queries that are not aligned, of %d", s.d), func(r *rig) {
			testAttentionShape(r, s, func(n int) tensor { return r.between(1, 2, "Q", r.act, n, s.heads, s.d) }, false, s.d == 128)
		})
	}
}

// testAttentionShape gets queries for the given number of rows from newQ; gaps selects
// gaps between the rows of the output, early that keys and values of positions before are there early.
func testAttentionShape(r *rig, s attentionShape, newQ func(rows int) tensor, gaps, early bool) {
	cached := r.sequences(s)
	for i := range s.sequences {
		cached.fill(r, i, 0)
	}
	q := r.normal(newQ(cached.rows()), 0, 2)
	out := r.rows(gaps, "Out", r.act, cached.rows(), s.heads, s.d)
	out.writes()
	starts := cached.starts
	op := cached.attention(r, q, out, early)
	blockTable := op.BlockTable
	r.do(&op)

	all := cached.decode(tensor.row)
	for i, seq := range s.sequences {
		for j := range seq.rows {
			for h := range s.heads {
				r.near(out, cached.attended(q.row(starts[i]+j, h), all, i, j, h), starts[i]+j, h)
			}
		}
	}
	if !r.o.BatchInvariant {
		return
	}

	// Rows alone, as decoding would come upon them, and the rows before and from any one on, as
	// the steps of a prompt that is cut would.
	want := bytes.Clone(out.buffer.after)
	part := func(i, from, to int, what string) {
		first, n := starts[i]+from, to-from
		rows := tensor{out.Slice(first, first+n), out.buffer}
		some := op
		some.Q, some.Out = q.Slice(first, first+n), rows.Tensor
		some.SeqStarts = r.ints("SeqStarts of a part", 0, n).Tensor
		some.ContextLens = r.ints("ContextLens of a part", s.sequences[i].context-s.sequences[i].rows+to).Tensor
		some.BlockTable = blockTable.Slice(i, i+1)
		some.MaxSeqTokens = n
		out.buffer.out = nil
		rows.writes()
		r.doPart(&some)
		r.alike(rows, want, what)
	}
	for i, seq := range s.sequences[:min(len(s.sequences), 6)] {
		for j := range seq.rows {
			if j < 3 || j == seq.rows/2 || j == seq.rows-1 {
				part(i, j, j+1, "a row alone")
			}
		}
		if seq.rows > 1 {
			cut := 1 + r.rand.IntN(seq.rows-1)
			part(i, 0, cut, "without the rows after them")
			part(i, cut, seq.rows, "without the rows before them")
		}
	}
}

func testRoPEAttention(r *rig) {
	shapes := []attentionShape{
		// Few tokens of few sequences, for which some devices have own kernels, at the edges of tiles and chunks.
		{2, 2, 128, 16, 0, []sequence{{1, 1}, {31, 1}, {32, 1}, {33, 2}}},
		{8, 2, 128, 16, 0, []sequence{{97, 3}, {5, 0}, {64, 2}, {3, 3}, {66, 4}}},
		{8, 1, 128, 16, 0, []sequence{{256, 1}, {40, 2}, {255, 2}}},
		{8, 1, 128, 16, 0, []sequence{{257, 2}, {257, 1}, {289, 2}, {20, 1}}}, // a step in two chunks
		{16, 1, 128, 16, 0, []sequence{{300, 1}, {33, 1}}},
		{32, 2, 128, 32, 0, []sequence{{530, 1}}},
		{2, 2, 128, 16, 0, []sequence{{40, 16}, {16, 16}, {7, 1}}}, // more heads than a block has at once
		{7, 1, 128, 64, 0, []sequence{{66, 2}, {64, 1}}},
		{4, 1, 128, 16, 100, []sequence{{300, 2}, {99, 1}, {101, 1}, {600, 3}}},
		{4, 4, 128, 8, 1, []sequence{{20, 3}}},
		{4, 2, 128, 256, 0, []sequence{{70, 2}, {1, 1}}},
		// Others.
		{4, 2, 128, 24, 0, []sequence{{50, 2}, {25, 1}}}, // whose blocks have no power of two of tokens
		{4, 2, 64, 16, 0, []sequence{{33, 3}, {17, 1}}},
		{8, 1, 80, 16, 0, []sequence{{40, 7}}},
		{8, 2, 128, 16, 0, []sequence{{40, 20}, {33, 1}}},
		{17, 1, 128, 16, 0, []sequence{{33, 1}}},
	}
	for i, s := range shapes {
		for j, w := range append([]kernels.DType{kernels.Invalid}, r.o.Weights...) {
			c := ropeAttentionCase{attentionShape: s, norms: w, early: (i+j)%2 == 0, besides: i%3 != 0, inPlace: i%6 == 3, skips: i%2 == 1}
			r.run(fmt.Sprintf("%+v", c), func(r *rig) { testRoPEAttentionCase(r, c) })
		}
	}
	few := attentionShape{8, 2, 128, 16, 0, []sequence{{33, 2}, {1, 1}}}
	for _, c := range []ropeAttentionCase{{off: "Q"}, {off: "K"}, {off: "V"}, {off: "Out"}} {
		c.attentionShape = few
		r.run(c.off+" that is not aligned", func(r *rig) { testRoPEAttentionCase(r, c) })
	}
}

type ropeAttentionCase struct {
	attentionShape
	norms   kernels.DType // of weights; Invalid: no norms
	early   bool          // keys and values of positions before the step's are there early
	besides bool          // queries, keys and values lie side by side
	inPlace bool          // Out is Q, unless they lie side by side
	skips   bool          // the first row of the step, and the last of the first sequence, have no slot
	off     string        // a tensor whose rows are not aligned
}

// testRoPEAttentionCase: results are near the reference and have the bits of RoPEAppendKV and
// Attention in sequence.
func testRoPEAttentionCase(r *rig, c ropeAttentionCase) {
	const places, eps = 50, 1e-5
	cached := r.sequences(c.attentionShape)
	n := cached.rows()
	tokens := func(name string, heads int) tensor {
		if c.off == name {
			return r.between(1, 2, name, r.act, n, heads, c.d)
		}
		return r.rows(c.early, name, r.act, n, heads, c.d)
	}
	var q, k, v tensor
	if c.besides {
		all := r.normal(tokens("QKV", c.heads+2*c.kvHeads), 0.1, 1)
		part := func(from, heads int) tensor { return tensor{all.Narrow(1, from, from+heads), all.buffer} }
		q, k, v = part(0, c.heads), part(c.heads, c.kvHeads), part(c.heads+c.kvHeads, c.kvHeads)
	} else {
		q, k, v = r.normal(tokens("Q", c.heads), 0.1, 1), r.normal(tokens("K", c.kvHeads), 0.1, 1), r.normal(tokens("V", c.kvHeads), 0.1, 1)
	}
	out := q
	if !c.inPlace || c.besides {
		out = tokens("Out", c.heads)
		out.writes()
	}
	q.writes()
	norms := c.norms != kernels.Invalid
	qNorm, qNormArg := optional(norms, func() tensor { return r.normal(r.dense("QNorm", c.norms, c.d), 1, 0.2) })
	kNorm, kNormArg := optional(norms, func() tensor { return r.normal(r.dense("KNorm", c.norms, c.d), 1, 0.2) })
	table := r.rotations(places, c.d)
	var rows, slots []int
	for i, seq := range c.sequences {
		cached.fill(r, i, seq.rows)
		for j := range seq.rows {
			block, row := cached.place(i, seq.context-seq.rows+j)
			slot := block*c.tokens + row
			if c.skips && (len(slots) == 0 || i == 0 && j == seq.rows-1) {
				slot = -1 // the cache holds the position already
				cached.fillOne(r, i, seq.context-seq.rows+j)
			}
			slots, rows = append(slots, slot), append(rows, r.rand.IntN(places))
		}
	}
	cached.writes(slots)
	op := kernels.RoPEAttention{
		Append: kernels.RoPEAppendKV{
			Q: q.Tensor, K: k.Tensor, V: v.Tensor, QNorm: qNormArg, KNorm: kNormArg, Eps: eps, Table: table.Tensor, Rows: r.ints("Rows", rows...).Tensor,
			CacheK: cached.k.Tensor, CacheV: cached.v.Tensor, Slots: r.ints("Slots", slots...).Tensor,
		},
		Attention: cached.attention(r, q, out, c.early),
	}
	r.do(&op)

	turned := func(x, weight tensor, row, head int) []float64 {
		in := x.row(row, head)
		if norms {
			in = norm(kernels.RMS, in, weight.row(), eps)
		}
		return rotated(in, table.row(rows[row]))
	}
	all := cached.decode(tensor.got)
	for i, seq := range c.sequences {
		for j := range seq.rows {
			row := cached.starts[i] + j
			for h := range c.kvHeads {
				if slot := slots[row]; slot >= 0 {
					r.near(cached.k, turned(k, kNorm, row, h), slot/c.tokens, slot%c.tokens, h)
					r.exact(cached.v, v.row(row, h), slot/c.tokens, slot%c.tokens, h)
				}
			}
			for h := range c.heads {
				r.near(out, cached.attended(turned(q, qNorm, row, h), all, i, j, h), row, h)
			}
		}
	}

	together := []tensor{out, cached.k, cached.v}
	bits := make([][]byte, len(together))
	for i, t := range together {
		bits[i] = bytes.Clone(t.buffer.after)
	}
	r.doPart(&op.Append, &op.Attention)
	for i, t := range together {
		r.alike(t, bits[i], "rope_append_kv and attention one after the other")
	}
}
