package cpu

import (
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

const (
	// attentionChunk is how many positions, from one of its multiples on, are
	// summed in order before their sum is added to the others'; a multiple of
	// panel. It fixes results: see the package comment.
	attentionChunk = 96
	// queryBlock is about how many queries (rows times heads that share keys) one
	// part of an attention takes.
	queryBlock = 16
)

func (b *Backend) appendKV(o *kernels.AppendKV, access device.Access) error {
	blocks, tokens := o.CacheK.Shape[0], o.CacheK.Shape[1]
	slots := vector[int32](&o.Slots)
	for i, s := range slots {
		if int(s) >= blocks*tokens {
			return errValue(o.Name(), "Slots", i, int64(s), "less than %d (%d blocks of %d tokens)", blocks*tokens, blocks, tokens)
		}
	}
	heads, d := o.K.Shape[1], o.K.Shape[2]
	for _, cache := range [...]*kernels.Tensor{&o.CacheK, &o.CacheV} {
		m := merger{declare: access.Write}
		for _, s := range slots {
			if s >= 0 {
				declareToken(&m, cache, int(s)/tokens, int(s)%tokens, heads, d)
			}
		}
		m.flush()
	}
	b.rows(len(slots), 2*heads*d, func(from, to int) {
		for n := from; n < to; n++ {
			s := int(slots[n])
			if s < 0 {
				continue
			}
			for h := range heads {
				copy(cached(&o.CacheK, s/tokens, s%tokens, h), head(&o.K, n, h))
				copy(cached(&o.CacheV, s/tokens, s%tokens, h), head(&o.V, n, h))
			}
		}
	})
	return nil
}

// cached returns what a cache holds for one token and head.
func cached(t *kernels.Tensor, block, token, h int) []float32 {
	return at[float32](t.Addr+device.Addr(4*(block*t.Stride[0]+token*t.Stride[1]+h*t.Stride[2])), t.Shape[3])
}

func declareToken(m *merger, t *kernels.Tensor, block, token, heads, d int) {
	a := t.Addr + device.Addr(4*(block*t.Stride[0]+token*t.Stride[1]))
	for h := range heads {
		m.add(a+device.Addr(4*h*t.Stride[2]), 4*d)
	}
}

// span is a part of an attention: rows [from, to) of sequence seq, whose row from
// stands at position at, and all heads of one head of the cache.
type span struct {
	seq, head, from, to, at int
}

func (b *Backend) attention(o *kernels.Attention, access device.Access) error {
	spans, err := b.spans(o, access)
	if err != nil {
		return err
	}
	b.parallel(len(spans), func(part int) { b.attend(o, spans[part]) })
	return nil
}

// spans checks what the data says, declares the cache's parts that are read, and
// cuts the work.
func (b *Backend) spans(o *kernels.Attention, access device.Access) ([]span, error) {
	op := o.Name()
	starts, lens := vector[int32](&o.SeqStarts), vector[int32](&o.ContextLens)
	rows, heads, kvHeads := o.Q.Shape[0], o.Q.Shape[1], o.CacheK.Shape[2]
	blocks, tokens := o.CacheK.Shape[0], o.CacheK.Shape[1]
	if starts[0] != 0 {
		return nil, errValue(op, "SeqStarts", 0, int64(starts[0]), "0")
	}
	if last := len(lens); int(starts[last]) != rows {
		return nil, errValue(op, "SeqStarts", last, int64(starts[last]), "%d, the rows of Q", rows)
	}
	each := max(queryBlock*kvHeads/max(heads, 1), 1)
	var spans []span
	keys, values := merger{declare: access.Read}, merger{declare: access.Read}
	for s, context := range lens {
		from, to := int(starts[s]), int(starts[s+1])
		n, context := to-from, int(context)
		switch {
		case n < 0 || to > rows:
			return nil, errValue(op, "SeqStarts", s+1, int64(to), "%d to %d", from, rows)
		case n > o.MaxRows:
			return nil, errValue(op, "SeqStarts", s+1, int64(to), "at most MaxRows (%d) more than %d", o.MaxRows, from)
		case context < n || context > o.MaxContext:
			return nil, errValue(op, "ContextLens", s, int64(context), "%d (the sequence's rows) to %d (MaxContext)", n, o.MaxContext)
		case n == 0:
			continue
		}
		first := 0
		if o.Window > 0 {
			first = max(0, context-n-o.Window+1)
		}
		table := blockRow(&o.BlockTable, s)
		for t := first; t < context; t++ {
			block := int(table[t/tokens])
			if block < 0 || block >= blocks {
				return nil, fmt.Errorf("cpu: %s: BlockTable[%d, %d] is %d, want 0 to %d", op, s, t/tokens, block, blocks-1)
			}
			declareToken(&keys, &o.CacheK, block, t%tokens, kvHeads, o.CacheK.Shape[3])
			declareToken(&values, &o.CacheV, block, t%tokens, kvHeads, o.CacheV.Shape[3])
		}
		for r := from; r < to; r += each {
			for h := range kvHeads {
				spans = append(spans, span{seq: s, head: h, from: r, to: min(r+each, to), at: context - (to - r)})
			}
		}
	}
	keys.flush()
	values.flush()
	return spans, nil
}

func blockRow(t *kernels.Tensor, s int) []int32 {
	return at[int32](t.Addr+device.Addr(4*s*t.Stride[0]), t.Shape[1])
}

// attend computes one part, in two passes over the positions: scores, and after
// their softmax the sum of values.
func (b *Backend) attend(o *kernels.Attention, s span) {
	group := o.Q.Shape[1] / o.CacheK.Shape[2] // heads of Q per head of the cache
	d := o.Q.Shape[2]
	queries := (s.to - s.from) * group
	// Query i is head s.head*group + i%group of row s.from + i/group.
	query := func(i int) []float32 { return head(&o.Q, s.from+i/group, s.head*group+i%group) }
	first := func(i int) int {
		if o.Window == 0 {
			return 0
		}
		return max(0, s.at+i/group-o.Window+1)
	}
	last := func(i int) int { return s.at + i/group }
	begin, end := first(0), last(queries-1)+1
	table, tokens := blockRow(&o.BlockTable, s.seq), o.CacheK.Shape[1]

	const chunk = attentionChunk
	scratch := b.floats(queries*(end-begin+1+d) + d + chunk*d)
	defer b.release(scratch)
	rest := *scratch
	take := func(n int) []float32 {
		t := rest[:n:n]
		rest = rest[n:]
		return t
	}
	scores := take(queries * (end - begin)) // of query i and position t at [i*(end-begin) + t - begin]
	sums, totals, partial := take(queries), take(queries*d), take(d)
	keys := take(chunk * d)
	tile := b.tiles()
	defer b.releaseTile(tile)
	acc := tile.acc[:]
	if queries > len(acc) {
		acc = make([][panel]float32, queries)
	}
	acc = acc[:queries]

	for t := begin; t < end; {
		n := min(chunk, end-t)
		for i := range n {
			copy(keys[i*d:], cached(&o.CacheK, int(table[(t+i)/tokens]), (t+i)%tokens, s.head))
		}
		for i := 0; i < n; i += panel {
			dots(acc, query, keys[i*d:], d, d)
			for q := range acc {
				to := scores[q*(end-begin)+t-begin+i:]
				for j, v := range acc[q][:min(panel, n-i)] {
					to[j] = float32(v * o.Scale)
				}
			}
		}
		t += n
	}
	for q := range queries {
		sums[q] = expScores(scores[q*(end-begin)+first(q)-begin:][:last(q)+1-first(q)], first(q))
	}
	clear(totals)
	var values [chunk][]float32
	for t := begin; t < end; {
		n := min(chunk-t%chunk, end-t)
		for i := range n {
			values[i] = cached(&o.CacheV, int(table[(t+i)/tokens]), (t+i)%tokens, s.head)
		}
		for q := range queries {
			from, to := max(t, first(q)), min(t+n, last(q)+1)
			if from >= to {
				continue
			}
			clear(partial)
			addValues(partial, scores[q*(end-begin)+from-begin:][:to-from], values[from-t:])
			axpy(totals[q*d:][:d], 1, partial)
		}
		t += n
	}
	for q := range queries {
		out := head(&o.Out, s.from+q/group, s.head*group+q%group)
		for i, v := range totals[q*d:][:d] {
			out[i] = v / sums[q]
		}
	}
}

// expScores turns the scores of positions from first on into their exponentials,
// less the largest score, and returns the sum of these.
func expScores(scores []float32, first int) float32 {
	largest := scores[0]
	for _, v := range scores {
		largest = max(largest, v)
	}
	var total float32
	for i := 0; i < len(scores); {
		n := min(attentionChunk-(first+i)%attentionChunk, len(scores)-i)
		var s float32
		for j, v := range scores[i:][:n] {
			v = exp(v - largest)
			scores[i+j] = v
			s += v
		}
		total += s
		i += n
	}
	return total
}

// addValues adds weights[i] times values[i], in order, to out.
func addValues(out, weights []float32, values [][]float32) {
	i := 0
	for ; i+4 <= len(weights); i += 4 {
		axpy4(out, (*[4]float32)(weights[i:]), values[i], values[i+1], values[i+2], values[i+3])
	}
	for ; i < len(weights); i++ {
		axpy(out, weights[i], values[i])
	}
}
