package cpu

import (
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

const (
	// rowBlock is how many rows one part of a product takes, against one conversion
	// of the weights; a multiple of any set's rows.
	rowBlock = 128
	// blockColumns is how many weight rows one part takes where weights are
	// packed: packing the rows is shared by them. A multiple of panel.
	blockColumns = 96
	// directGroups is with how many groups of rows weights are multiplied where they
	// lie: with more, packing them is faster.
	directGroups = 2
	// directWeights is about how many weights one part reads then, and directColumns
	// the most weight rows; a multiple of panel.
	directWeights = 256 << 10
	directColumns = 1536
	// maxSums is the largest number of sums of one part.
	maxSums = max(rowBlock*blockColumns/panel*8, directColumns/strip*directGroups*16)
)

// matrix is a dense weight matrix in memory.
type matrix struct {
	addr          device.Addr
	dtype         kernels.DType
	rows, columns int
}

func (m matrix) bytes() int { return m.rows * m.columns * m.dtype.Size() }

// at is the address of element k of row i.
func (m matrix) at(i, k int) device.Addr {
	return m.addr + device.Addr((i*m.columns+k)*m.dtype.Size())
}

// product is out = rows times the transpose of one or two matrices of one shape.
type product struct {
	w, v matrix // v.rows is 0 where there is one
	n    int    // rows
	// in is the address of row r, of float32.
	in func(r int) device.Addr
	// out takes the sums of row r and of weight rows [first, first+len(sums));
	// sums2 are v's. It may change them, and maxLanes elements behind them.
	out func(r, first int, sums, sums2 []float32)
}

// size is how many rows and weight rows one part of the product has. Results do
// not depend on it.
func (p *product) size(s *instructions) (rows, columns int) {
	rows = max(min(p.n, rowBlock), 1)
	columns = blockColumns
	if rows <= directGroups*s.height {
		columns = min(max(directWeights/max(p.w.columns, 1)/panel*panel, panel), directColumns)
	}
	return rows, columns
}

// parts is how many parts the product is cut into.
func (p *product) parts(s *instructions) int {
	if p.n == 0 || p.w.rows == 0 {
		return 0
	}
	rows, columns := p.size(s)
	return (p.n + rows - 1) / rows * ((p.w.rows + columns - 1) / columns)
}

// part computes one part.
func (p *product) part(pool *pool, part int) {
	s := pool.set
	rows, columns := p.size(s)
	across := (p.w.rows + columns - 1) / columns
	r0, c0 := part/across*rows, part%across*columns
	t := tile{
		product: p, set: s, scratch: pool.tiles(),
		r0: r0, r1: min(r0+rows, p.n), c0: c0, c1: min(c0+columns, p.w.rows),
	}
	defer pool.releaseTile(t.scratch)
	matrices := []matrix{p.w, p.v}
	if p.v.rows == 0 {
		matrices = matrices[:1]
	}
	n := t.r1 - t.r0
	t.group, t.across = s.height, panel
	direct := s.direct(p.w.dtype, n)
	switch {
	case direct == nil || n > directGroups*s.height || p.w.rows < strip || p.w.columns%s.lanes != 0:
		t.multiply(matrices, nil)
	case n > 1:
		t.across = strip
		t.multiply(matrices, direct)
	default:
		t.group, t.across = 1, strip
		t.multiplyOne(matrices, direct)
	}
	t.finish()
}

// tile is one part of a product: rows [r0, r1) and weight rows [c0, c1). Its sums
// lie in blocks: for each panel or strip of weight rows, of groups of rows.
type tile struct {
	*product
	set            *instructions
	scratch        *scratch
	r0, r1, c0, c1 int
	group, across  int // rows and weight rows of a block
}

// scratch is the memory of one part.
type scratch struct {
	x       []float32 // packed rows
	w       [panel * maxChunk]float32
	sums    [2][maxSums]float32
	results [2][directColumns + maxLanes]float32 // of one row
}

// rowsOf returns scratch for n elements of packed rows.
func (s *scratch) rowsOf(n int) []float32 {
	if cap(s.x) < n {
		s.x = make([]float32, n)
	}
	return s.x[:n]
}

func (t *tile) groups() int { return (t.r1 - t.r0 + t.group - 1) / t.group }

// block is how many elements lie between a block's sums and the next one's.
func (t *tile) block() int { return (t.group*t.across + 7) / 8 * 8 }

// first is the first weight row of the block at c: c, or less where the matrix
// ends.
func (t *tile) first(c int) int { return max(min(c, t.w.rows-t.across), 0) }

// clear sets sums to 0.
func (t *tile) clear(matrices int) {
	for i := range matrices {
		clear(t.scratch.sums[i][:(t.c1-t.c0+t.across-1)/t.across*t.groups()*t.block()])
	}
}

// multiplyOne computes the sums of one row with weights where they lie, each
// strip of them from end to end: memory is read in order of addresses.
func (t *tile) multiplyOne(matrices []matrix, direct directFunc) {
	t.clear(len(matrices))
	columns := t.w.columns
	x := at[float32](t.in(t.r0), columns)
	for i, m := range matrices {
		size := m.dtype.Size()
		sums := t.scratch.sums[i][:]
		for c := t.c0; c < t.c1; c += strip {
			w, next := m.at(t.first(c), 0), m.at(t.first(min(c+strip, t.c1-1)), 0)
			for k := 0; k < columns; k += t.set.chunk {
				n := min(t.set.chunk, columns-k)
				direct(sums, x[k:][:n], uintptr(w)+uintptr(k*size), columns*size, uintptr(next)+uintptr(strip*k*size))
			}
			sums = sums[t.block():]
		}
	}
}

// packRows packs n elements from k on of the rows of group g.
func (t *tile) packRows(block []float32, g, k, n int) {
	for r := range t.group {
		row := min(t.r0+g*t.group+r, t.r1-1)
		t.set.pack(block, r, t.group, t.in(row)+device.Addr(4*k), kernels.F32, n)
	}
}

// multiply computes the sums of all groups of rows, a chunk of the inner dimension
// at a time, with direct or, if this is nil, with packed weights.
func (t *tile) multiply(matrices []matrix, direct directFunc) {
	t.clear(len(matrices))
	columns, groups := t.w.columns, t.groups()
	for k := 0; k < columns; k += t.set.chunk {
		n := min(t.set.chunk, columns-k)
		padded := t.group * t.set.padded(n) // elements of a group
		x := t.scratch.rowsOf(groups * padded)
		for g := range groups {
			t.packRows(x[g*padded:], g, k, n)
		}
		w := t.scratch.w[:panel*t.set.padded(n)]
		for i, m := range matrices {
			sums := t.scratch.sums[i][:]
			for c := t.c0; c < t.c1; c += t.across {
				here, next := m.at(t.first(c), k), t.next(m, c, k)
				if direct == nil {
					t.set.packPanel(w, m, t.first(c), k, n, next)
				}
				for g := range groups {
					x := x[g*padded:][:padded]
					if direct == nil {
						t.set.tile(sums, x, w)
					} else {
						direct(sums, x, uintptr(here), m.columns*m.dtype.Size(), uintptr(next))
						next = here // which is fetched already
					}
					sums = sums[t.block():]
				}
			}
		}
	}
}

// next is where the weights lie that multiply reads after those at column k of
// the block at c.
func (t *tile) next(m matrix, c, k int) device.Addr {
	switch {
	case c+t.across < t.c1:
		c += t.across
	case k+t.set.chunk < m.columns:
		c, k = t.c0, k+t.set.chunk
	}
	return m.at(t.first(c), k)
}

// finish hands out the sums.
func (t *tile) finish() {
	groups, block := t.groups(), t.block()
	results := [2][]float32{t.scratch.results[0][:t.c1-t.c0], t.scratch.results[1][:t.c1-t.c0]}
	for r := t.r0; r < t.r1; r++ {
		at := (r-t.r0)/t.group*block + (r-t.r0)%t.group*t.across
		for i := range results {
			if i == 1 && t.v.rows == 0 {
				break
			}
			sums := t.scratch.sums[i][at:]
			for c := t.c0; c < t.c1; c += t.across {
				copy(results[i][c-t.c0:], sums[(c-t.c0)/t.across*groups*block:][c-t.first(c):t.across])
			}
		}
		t.out(r, t.c0, results[0], results[1])
	}
}

func (b *Backend) matmul(o *kernels.MatMul, _ device.Access) error {
	var bias []float32
	if !o.Bias.None() {
		scratch := b.floats(o.Bias.Shape[0])
		defer b.release(scratch)
		bias = *scratch
		b.set.load(bias, o.Bias.Addr, o.Bias.DType)
	}
	p := product{
		w:  matrix{o.W.Addr, o.W.DType, o.W.Shape[0], o.W.Shape[1]},
		n:  o.X.Shape[0],
		in: func(r int) device.Addr { return rowAddr(&o.X, r) },
		out: func(r, first int, sums, _ []float32) {
			out := row(&o.Out, r)[first:][:len(sums)]
			copy(out, sums)
			if bias != nil {
				for i, v := range bias[first:][:len(sums)] {
					out[i] += v
				}
			}
		},
	}
	b.parallel(p.parts(b.set), func(part int) { p.part(b.pool, part) })
	return nil
}

// share is one listed expert's part of an expert product.
type share struct {
	pairs  []int32 // its pairs, each token*K + k
	first  int     // the first one's place among all
	extent device.Addr
}

// shares reads which pairs and which extents the listed experts of an operation
// have, and leaves out those without pairs.
func shares(op string, p *kernels.ExpertGEMM) ([]share, error) {
	starts, pairs, extents := vector[int32](&p.Offsets), vector[int32](&p.Order), vector[uint64](&p.Slots)
	seen := make([]bool, len(extents))
	found := make([]share, 0, p.Experts.Shape[0])
	for i, e := range vector[int32](&p.Experts) {
		if int(e) < 0 || int(e) >= len(extents) {
			return nil, errValue(op, "Experts", i, int64(e), "0 to %d", len(extents)-1)
		}
		if seen[e] {
			return nil, errValue(op, "Experts", i, int64(e), "each expert once")
		}
		seen[e] = true
		from, to := int(starts[e]), int(starts[e+1])
		if from < 0 || from > len(pairs) {
			return nil, errValue(op, "Offsets", int(e), int64(from), "0 to %d", len(pairs))
		}
		if to < from || to > len(pairs) {
			return nil, errValue(op, "Offsets", int(e)+1, int64(to), "%d to %d", from, len(pairs))
		}
		if from == to {
			continue
		}
		for j, pair := range pairs[from:to] {
			if int(pair) < 0 || int(pair) >= len(pairs) {
				return nil, errValue(op, "Order", from+j, int64(pair), "0 to %d", len(pairs)-1)
			}
		}
		a := extents[e]
		if a == 0 || a%uint64(p.Layout.DType.Size()) != 0 {
			return nil, fmt.Errorf("cpu: %s: Slots[%d] is %#x, want the address of expert %d, which has %d rows", op, e, a, e, to-from)
		}
		found = append(found, share{pairs: pairs[from:to], first: from, extent: device.Addr(a)})
	}
	return found, nil
}

// declareRows declares rows index(pair, its place) of t, for all pairs of all shares.
func declareRows(declare func(device.Range), t *kernels.Tensor, found []share, index func(pair, place int) int) {
	m := merger{declare: declare}
	last := -1
	for _, s := range found {
		for j, p := range s.pairs {
			if i := index(int(p), s.first+j); i != last {
				m.add(t.Addr+device.Addr(4*i*t.Stride[0]), 4*t.Shape[1])
				last = i
			}
		}
	}
	m.flush()
}

// runProducts carries out one product per share, their parts side by side.
func (b *Backend) runProducts(products []product) {
	total := 0
	ends := make([]int, len(products))
	for i := range products {
		total += products[i].parts(b.set)
		ends[i] = total
	}
	b.parallel(total, func(part int) {
		i, start := 0, 0
		for part >= ends[i] {
			start = ends[i]
			i++
		}
		products[i].part(b.pool, part-start)
	})
}

func (b *Backend) expertUp(o *kernels.ExpertUp, access device.Access) error {
	found, err := shares(o.Name(), &o.ExpertGEMM)
	if err != nil || len(found) == 0 {
		return err
	}
	k := o.Order.Shape[0] / o.X.Shape[0]
	w1 := matrix{dtype: o.Layout.DType, rows: o.Layout.Intermediate, columns: o.Layout.Hidden}
	for _, s := range found {
		access.Read(device.Range{Addr: s.extent, Bytes: 2 * int64(w1.bytes())})
	}
	declareRows(access.Read, &o.X, found, func(p, _ int) int { return p / k })
	declareRows(access.Write, &o.Out, found, func(_, place int) int { return place })
	products := make([]product, len(found))
	for i, s := range found {
		w1, w3 := w1, w1
		w1.addr, w3.addr = s.extent, s.extent+device.Addr(w1.bytes())
		products[i] = product{
			w: w1, v: w3, n: len(s.pairs),
			in: func(r int) device.Addr { return rowAddr(&o.X, int(s.pairs[r])/k) },
			out: func(r, first int, gate, up []float32) {
				n := b.set.padded(len(gate))
				b.set.siluMul(gate[:n], gate[:n], up[:n])
				copy(row(&o.Out, s.first+r)[first:], gate)
			},
		}
	}
	b.runProducts(products)
	return nil
}

func (b *Backend) expertDown(o *kernels.ExpertDown, access device.Access) error {
	found, err := shares(o.Name(), &o.ExpertGEMM)
	if err != nil || len(found) == 0 {
		return err
	}
	w2 := matrix{dtype: o.Layout.DType, rows: o.Layout.Hidden, columns: o.Layout.Intermediate}
	for _, s := range found {
		access.Read(device.Range{Addr: s.extent + device.Addr(2*w2.bytes()), Bytes: int64(w2.bytes())})
	}
	declareRows(access.Read, &o.X, found, func(_, place int) int { return place })
	declareRows(access.Write, &o.Out, found, func(p, _ int) int { return p })
	products := make([]product, len(found))
	for i, s := range found {
		w2 := w2
		w2.addr = s.extent + device.Addr(2*w2.bytes())
		products[i] = product{
			w: w2, n: len(s.pairs),
			in: func(r int) device.Addr { return rowAddr(&o.X, s.first+r) },
			out: func(r, first int, sums, _ []float32) {
				copy(row(&o.Out, int(s.pairs[r]))[first:], sums)
			},
		}
	}
	b.runProducts(products)
	return nil
}
