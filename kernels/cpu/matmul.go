package cpu

import (
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

const (
	// weightBlock is how many columns of a panel of weights are converted at a
	// time, so that they stay in the first cache; a multiple of sumChunk.
	weightBlock = 4 * sumChunk
	// rowBlock is how many rows one part of a product takes, against one
	// conversion of the weights.
	rowBlock = 128
)

// matrix is a dense weight matrix in memory.
type matrix struct {
	addr          device.Addr
	dtype         kernels.DType
	rows, columns int
}

func (m matrix) bytes() int { return m.rows * m.columns * m.dtype.Size() }

// row is the address of row i.
func (m matrix) row(i int) device.Addr {
	return m.addr + device.Addr(i*m.columns*m.dtype.Size())
}

// multiply sets acc[r][c] to the product of rows(r) and row first+c of m, for all
// r and the panel rows from first on. Where m ends earlier, the last sums mean
// nothing. scratch has panel * weightBlock elements.
func (m matrix) multiply(acc [][panel]float32, rows func(r int) []float32, first int, scratch []float32) {
	if m.dtype == kernels.F32 && first+panel <= m.rows {
		dots(acc, rows, at[float32](m.row(first), panel*m.columns), m.columns, m.columns)
		return
	}
	clear(acc)
	if m.dtype == kernels.BF16 && len(acc) == 1 && first+panel <= m.rows {
		x, w := rows(0), at[uint16](m.row(first), panel*m.columns)
		for k := 0; k < m.columns; k += sumChunk {
			dot1BF16(&acc[0], x[k:min(k+sumChunk, m.columns)], w[k:], m.columns)
		}
		return
	}
	for k := 0; k < m.columns; k += weightBlock {
		n := min(weightBlock, m.columns-k)
		for c := range panel {
			i := min(first+c, m.rows-1)
			load(scratch[c*weightBlock:][:n], m.row(i)+device.Addr(k*m.dtype.Size()), m.dtype)
		}
		addDots(acc, rows, k, scratch, weightBlock, n)
	}
}

// product is out = rows times the transpose of one or two matrices of one shape.
type product struct {
	w, v matrix // v.rows is 0 where there is one
	n    int    // rows
	in   func(r int) []float32
	// out takes the sums of row r and of weight rows [first, first+count); sums2
	// are v's.
	out func(r, first, count int, sums, sums2 *[panel]float32)
}

// tile is how many rows and weight rows one part of the product has.
func (p *product) tile() (rows, columns int) {
	rows = max(min(p.n, rowBlock), 1)
	return rows, split(p.w.rows, rows*p.w.columns, panel)
}

// parts is how many parts the product is cut into.
func (p *product) parts() int {
	if p.n == 0 || p.w.rows == 0 {
		return 0
	}
	rows, columns := p.tile()
	return (p.n + rows - 1) / rows * ((p.w.rows + columns - 1) / columns)
}

// part computes one tile.
func (p *product) part(pool *pool, part int) {
	rows, columns := p.tile()
	across := (p.w.rows + columns - 1) / columns
	r0, c0 := part/across*rows, part%across*columns
	r1, c1 := min(r0+rows, p.n), min(c0+columns, p.w.rows)
	tile := pool.tiles()
	defer pool.releaseTile(tile)
	acc, acc2 := tile.acc[:r1-r0], tile.acc2[:r1-r0]
	in := func(r int) []float32 { return p.in(r0 + r) }
	for c := c0; c < c1; c += panel {
		p.w.multiply(acc, in, c, tile.weights[:])
		if p.v.rows > 0 {
			p.v.multiply(acc2, in, c, tile.weights[:])
		}
		for r := range acc {
			p.out(r0+r, c, min(panel, c1-c), &acc[r], &acc2[r])
		}
	}
}

// tile is the scratch memory of one part.
type tile struct {
	weights   [panel * weightBlock]float32
	acc, acc2 [rowBlock][panel]float32
}

func (b *Backend) matmul(o *kernels.MatMul, _ device.Access) error {
	var bias []float32
	if !o.Bias.None() {
		scratch := b.floats(o.Bias.Shape[0])
		defer b.release(scratch)
		bias = *scratch
		load(bias, o.Bias.Addr, o.Bias.DType)
	}
	p := product{
		w:  matrix{o.W.Addr, o.W.DType, o.W.Shape[0], o.W.Shape[1]},
		n:  o.X.Shape[0],
		in: func(r int) []float32 { return row(&o.X, r) },
		out: func(r, first, count int, sums, _ *[panel]float32) {
			out := row(&o.Out, r)[first:][:count]
			copy(out, sums[:count])
			if bias != nil {
				for i, v := range bias[first:][:count] {
					out[i] += v
				}
			}
		},
	}
	b.parallel(p.parts(), func(part int) { p.part(b.pool, part) })
	return nil
}

// share is one listed expert's part of an expert product.
type share struct {
	pairs  []int32 // its pairs, each token*K + k
	extent device.Addr
}

// shares reads which pairs and which extents the listed experts of an operation
// have, and leaves out those without pairs.
func shares(op string, offsets, order, slots, experts *kernels.Tensor, l *kernels.ExpertLayout) ([]share, error) {
	starts, pairs, extents := vector[int32](offsets), vector[int32](order), vector[uint64](slots)
	seen := make([]bool, len(extents))
	found := make([]share, 0, experts.Shape[0])
	for i, e := range vector[int32](experts) {
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
		for j, p := range pairs[from:to] {
			if int(p) < 0 || int(p) >= len(pairs) {
				return nil, errValue(op, "Order", from+j, int64(p), "0 to %d", len(pairs)-1)
			}
		}
		a := extents[e]
		if a == 0 || a%uint64(l.DType.Size()) != 0 {
			return nil, fmt.Errorf("cpu: %s: Slots[%d] is %#x, want the address of expert %d, which has %d rows", op, e, a, e, to-from)
		}
		found = append(found, share{pairs: pairs[from:to], extent: device.Addr(a)})
	}
	return found, nil
}

// declareRows declares rows index(pair) of t, for all pairs of all shares.
func declareRows(declare func(device.Range), t *kernels.Tensor, found []share, index func(pair int) int) {
	m := merger{declare: declare}
	last := -1
	for _, s := range found {
		for _, p := range s.pairs {
			if i := index(int(p)); i != last {
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
		total += products[i].parts()
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
	found, err := shares(o.Name(), &o.Offsets, &o.Order, &o.Slots, &o.Experts, &o.Layout)
	if err != nil || len(found) == 0 {
		return err
	}
	k := o.Order.Shape[0] / o.X.Shape[0]
	w1 := matrix{dtype: o.Layout.DType, rows: o.Layout.Intermediate, columns: o.Layout.Hidden}
	for _, s := range found {
		access.Read(device.Range{Addr: s.extent, Bytes: 2 * int64(w1.bytes())})
	}
	declareRows(access.Read, &o.X, found, func(p int) int { return p / k })
	declareRows(access.Write, &o.Out, found, func(p int) int { return p })
	products := make([]product, len(found))
	for i, s := range found {
		w1, w3 := w1, w1
		w1.addr, w3.addr = s.extent, s.extent+device.Addr(w1.bytes())
		products[i] = product{
			w: w1, v: w3, n: len(s.pairs),
			in: func(r int) []float32 { return row(&o.X, int(s.pairs[r])/k) },
			out: func(r, first, count int, gate, up *[panel]float32) {
				out := row(&o.Out, int(s.pairs[r]))[first:][:count]
				for c := range out {
					out[c] = silu(gate[c]) * up[c]
				}
			},
		}
	}
	b.runProducts(products)
	return nil
}

func (b *Backend) expertDown(o *kernels.ExpertDown, access device.Access) error {
	found, err := shares(o.Name(), &o.Offsets, &o.Order, &o.Slots, &o.Experts, &o.Layout)
	if err != nil || len(found) == 0 {
		return err
	}
	w2 := matrix{dtype: o.Layout.DType, rows: o.Layout.Hidden, columns: o.Layout.Intermediate}
	for _, s := range found {
		access.Read(device.Range{Addr: s.extent + device.Addr(2*w2.bytes()), Bytes: int64(w2.bytes())})
	}
	self := func(p int) int { return p }
	declareRows(access.Read, &o.X, found, self)
	declareRows(access.Write, &o.Out, found, self)
	products := make([]product, len(found))
	for i, s := range found {
		w2 := w2
		w2.addr = s.extent + device.Addr(2*w2.bytes())
		products[i] = product{
			w: w2, n: len(s.pairs),
			in: func(r int) []float32 { return row(&o.X, int(s.pairs[r])) },
			out: func(r, first, count int, sums, _ *[panel]float32) {
				copy(row(&o.Out, int(s.pairs[r]))[first:][:count], sums[:])
			},
		}
	}
	b.runProducts(products)
	return nil
}
