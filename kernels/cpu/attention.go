package cpu

import (
	"fmt"
	"unsafe"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

const (
	// attentionChunk is the number of positions, from a multiple of it on, that are summed
	// before their sum is added to that of the others. It determines results to the bit: see
	// the package comment.
	attentionChunk = 96
	// queryBlock is the approximate number of queries (tokens times heads that share a KV head)
	// of one part of an attention.
	queryBlock = 32
)

func (b *Backend) appendKV(o *kernels.AppendKV, access device.Access) error {
	slots := vector[int32](&o.Slots)
	if err := declareAppended(o.Name(), slots, &o.CacheK, &o.CacheV, access); err != nil {
		return err
	}
	heads, d, tokens := o.K.Shape[1], o.K.Shape[2], o.CacheK.Shape[1]
	bytes := d * o.K.DType.Size()
	b.rows(len(slots), 2*heads*d, func(from, to int) {
		for n := from; n < to; n++ {
			s := int(slots[n])
			if s < 0 {
				continue
			}
			for h := range heads {
				copy(at[byte](cachedAddr(&o.CacheK, s/tokens, s%tokens, h), bytes), at[byte](headAddr(&o.K, n, h), bytes))
				copy(at[byte](cachedAddr(&o.CacheV, s/tokens, s%tokens, h), bytes), at[byte](headAddr(&o.V, n, h), bytes))
			}
		}
	})
	return nil
}

// declareAppended checks slots and declares that their places in the caches are written.
func declareAppended(op string, slots []int32, cacheK, cacheV *kernels.Tensor, access device.Access) error {
	blocks, tokens := cacheK.Shape[0], cacheK.Shape[1]
	for i, s := range slots {
		if int(s) >= blocks*tokens {
			return errValue(op, "Slots", i, int64(s), "less than %d (%d blocks of %d tokens)", blocks*tokens, blocks, tokens)
		}
	}
	for _, cache := range [...]*kernels.Tensor{cacheK, cacheV} {
		m := merger{declare: access.Write}
		for _, s := range slots {
			if s >= 0 {
				declareToken(&m, cache, int(s)/tokens, int(s)%tokens, cache.Shape[2], cache.Shape[3])
			}
		}
		m.flush()
	}
	return nil
}

// cachedAddr returns the address of one token and head in a cache.
func cachedAddr(t *kernels.Tensor, block, token, h int) device.Addr {
	return t.Addr + device.Addr(t.DType.Size()*(block*t.Stride[0]+token*t.Stride[1]+h*t.Stride[2]))
}

func declareToken(m *merger, t *kernels.Tensor, block, token, heads, d int) {
	size := t.DType.Size()
	a := t.Addr + device.Addr(size*(block*t.Stride[0]+token*t.Stride[1]))
	if t.Stride[2] == d { // the heads follow one another
		m.add(a, size*heads*d)
		return
	}
	for h := range heads {
		m.add(a+device.Addr(size*h*t.Stride[2]), size*d)
	}
}

// span is one part of an attention: tokens [from, to) of sequence seq, and one KV head with all
// the heads of Q that share it. at is the position of token from.
type span struct {
	seq, head, from, to, at int
}

func (b *Backend) attention(o *kernels.Attention, access device.Access) error {
	spans, err := b.spans(o, access)
	if err != nil {
		return err
	}
	// The heads of a token lie together, so a thread that reads one head reads short pieces at a stride. Where there
	// are enough sequences, a thread computes with all heads of some rows, and first reads what they attend to as it
	// lies, if that fits into the cache of a core.
	heads := o.CacheK.Shape[2]
	rows := len(spans) / heads
	if rows < rowsPerThread*b.threads {
		b.parallel(len(spans), func(part int) { b.computeAttention(o, spans[part]) })
		return nil
	}
	b.parallel(rows, func(part int) {
		all := spans[part*heads:][:heads]
		b.readAhead(o, &all[0])
		for i := range all {
			b.computeAttention(o, all[i])
		}
	})
	return nil
}

func (b *Backend) ropeAttention(o *kernels.RoPEAttention, access device.Access) error {
	if err := b.ropeAppendKV(&o.Append, access); err != nil {
		return err
	}
	return b.attention(&o.Attention, access)
}

const (
	// rowsPerThread is how many parts of all heads there are for each thread, at least.
	rowsPerThread = 4
	// coreCache is the size of a core's second-level cache, in bytes: that of current servers, or less.
	coreCache = 1 << 20
	// cacheLine is in bytes.
	cacheLine = 64
)

// readAhead reads the keys and values, of all heads, to which the rows of a span attend, if they fit into
// a core's cache. The result is of no use.
//
//go:noinline
func (b *Backend) readAhead(o *kernels.Attention, s *span) (sum uint64) {
	first, end := 0, s.at+s.to-s.from
	if o.Window > 0 {
		first = max(0, s.at-o.Window+1)
	}
	k := &o.CacheK
	row := k.Shape[2] * k.Shape[3] * k.DType.Size()
	if k.Stride[2] != k.Shape[3] || o.CacheV.Stride[2] != k.Shape[3] || 2*row*(end-first) > coreCache || row%8 != 0 {
		return 0
	}
	table, tokens := blockRow(&o.BlockTable, s.seq), k.Shape[1]
	for _, cache := range [...]*kernels.Tensor{k, &o.CacheV} {
		for t := first; t < end; t++ {
			words := at[uint64](cachedAddr(cache, int(table[t/tokens]), t%tokens, 0), row/8)
			for i := 0; i < len(words); i += cacheLine / 8 {
				sum += words[i]
			}
		}
	}
	return sum
}

// spans checks the device data, declares the parts of the cache that are read, and divides the
// work.
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
		case n > o.MaxSeqTokens:
			return nil, errValue(op, "SeqStarts", s+1, int64(to), "at most MaxSeqTokens (%d) more than %d", o.MaxSeqTokens, from)
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

// computeAttention computes one part in two passes over the positions: scores, then (after
// softmax) the weighted sum of values. All arithmetic is in float32: 16-bit queries, keys and
// values are widened exactly, and results are rounded once.
func (b *Backend) computeAttention(o *kernels.Attention, s span) {
	group := o.Q.Shape[1] / o.CacheK.Shape[2] // heads of Q per KV head
	d := o.Q.Shape[2]
	queries := (s.to - s.from) * group
	// Query i is head s.head*group + i%group of row s.from + i/group.
	first := func(i int) int {
		if o.Window == 0 {
			return 0
		}
		return max(0, s.at+i/group-o.Window+1)
	}
	last := func(i int) int { return s.at + i/group }
	begin, end := first(0), last(queries-1)+1
	table, tokens := blockRow(&o.BlockTable, s.seq), o.CacheK.Shape[1]
	cached := func(t *kernels.Tensor, at int) device.Addr {
		return cachedAddr(t, int(table[at/tokens]), at%tokens, s.head)
	}

	dtype := o.Q.DType
	size, widened := dtype.Size(), 0
	if dtype != kernels.F32 {
		widened = attentionChunk * d
	}
	set, height := b.set, b.set.height
	groups := (queries + height - 1) / height
	tile := height * panel
	scratch := b.floats(queries*(end-begin+1+d) + maxLanes + groups*(height*set.padded(d)+tile) + panel*set.padded(d) + widened)
	defer b.release(scratch)
	rest := *scratch
	take := func(n int) []float32 {
		t := rest[:n:n]
		rest = rest[n:]
		return t
	}
	scores := take(queries * (end - begin)) // of query i and position t at [i*(end-begin) + t - begin]
	sums, totals, pad := take(queries), take(queries*d), take(maxLanes)
	packed, keys, products := take(groups*height*set.padded(d)), take(panel*set.padded(d)), take(groups*tile)

	// Queries and keys are packed in chunks of their elements, as for GEMMs.
	for k := 0; k < d; k += set.chunk {
		n := min(set.chunk, d-k)
		for i := range groups * height {
			q := min(i, queries-1)
			from := headAddr(&o.Q, s.from+q/group, s.head*group+q%group)
			at := packed[groups*height*k+i/height*height*set.padded(n):]
			set.pack(at, i%height, height, from+device.Addr(size*k), dtype, n)
		}
	}
	for t := begin; t < end; t += panel {
		clear(products)
		for k := 0; k < d; k += set.chunk {
			n := min(set.chunk, d-k)
			keys := keys[:panel*set.padded(n)]
			for i := range panel {
				set.pack(keys, i, panel, cached(&o.CacheK, min(t+i, end-1))+device.Addr(size*k), dtype, n)
			}
			each := height * set.padded(n)
			for g := range groups {
				set.tile(products[g*tile:][:tile], packed[groups*height*k+g*each:][:each], keys)
			}
		}
		for q := range queries {
			to := scores[q*(end-begin)+t-begin:]
			for j, v := range products[q*panel:][:min(panel, end-t)] {
				to[j] = float32(v * o.Scale)
			}
		}
	}
	for q := range queries {
		sums[q] = b.softmax(scores[q*(end-begin)+first(q)-begin:][:last(q)+1-first(q)], first(q), pad)
	}
	clear(totals)
	var values [attentionChunk]uint64
	wide := take(widened)
	for t := begin; t < end; {
		n := min(attentionChunk-t%attentionChunk, end-t)
		for i := range n {
			from := cached(&o.CacheV, t+i)
			if widened > 0 {
				to := wide[i*d:][:d]
				set.load(to, from, dtype)
				from = device.Addr(uintptr(unsafe.Pointer(&to[0])))
			}
			values[i] = uint64(from)
		}
		for q := range queries {
			from, to := max(t, first(q)), min(t+n, last(q)+1)
			if from < to {
				set.addWeighted(totals[q*d:][:d], scores[q*(end-begin)+from-begin:][:to-from], values[from-t:to-t])
			}
		}
		t += n
	}
	for q := range queries {
		out := totals[q*d:][:d]
		for i, v := range out {
			out[i] = v / sums[q]
		}
		kernels.FromFloat32(at[byte](headAddr(&o.Out, s.from+q/group, s.head*group+q%group), size*d), out, dtype)
	}
}

// softmax replaces the scores of positions from first on by the exponentials of their
// difference to the largest score, and returns their sum. pad has maxLanes elements.
func (b *Backend) softmax(scores []float32, first int, pad []float32) float32 {
	largest := scores[0]
	for _, v := range scores {
		if v > largest { // several times as fast as max, which has rules for NaN: these make the sum NaN anyway
			largest = v
		}
	}
	var total float32
	for i := 0; i < len(scores); {
		n := min(attentionChunk-(first+i)%attentionChunk, len(scores)-i)
		total += b.set.exponentials(scores[i:][:n], largest, pad)
		i += n
	}
	return total
}
