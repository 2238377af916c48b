package cpu

import (
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

const (
	// rowBlock is the number of rows of one part of a GEMM, which share one conversion of the
	// weights; a multiple of any set's rows.
	rowBlock = 128
	// blockColumns is the number of weight rows of one part of a GEMM with packed weights; they
	// share the packing of the rows. A multiple of panel.
	blockColumns = 96
	// directGroups is the maximum number of groups of rows for which weights are multiplied in
	// place; for more, packing them is faster.
	directGroups = 2
	// directWeights is the approximate number of weights that one part then reads, and
	// directColumns the maximum of weight rows; a multiple of panel.
	directWeights = 256 << 10
	directColumns = 1536
	// maxSums is the maximum number of sums of one part.
	maxSums = max(rowBlock*blockColumns/panel*8, directColumns/strip*directGroups*16)
)

// matrix is a weight matrix in memory, whose rows are so many elements apart.
type matrix struct {
	addr          device.Addr
	dtype         kernels.DType
	rows, columns int
	apart         int
}

// pitch is the bytes from one row to the next.
func (m matrix) pitch() int { return m.apart * m.dtype.Size() }

// at returns the address of element k of row i.
func (m matrix) at(i, k int) device.Addr {
	return m.addr + device.Addr((i*m.apart+k)*m.dtype.Size())
}

// gemm is out = X Wᵀ for one or two weight matrices of one shape.
type gemm struct {
	w, v matrix // v.rows is 0 if there is one
	n    int    // rows
	// in returns the address of row r of X, in float32.
	in func(r int) device.Addr
	// out receives the sums of row r and of weight rows [first, first+len(sums)); sums2 are
	// those of v. It may change them, and maxLanes elements after them.
	out func(r, first int, sums, sums2 []float32)
}

// size returns the rows and weight rows of one part. Results do not depend on them.
func (p *gemm) size(s *instructions) (rows, columns int) {
	rows = max(min(p.n, rowBlock), 1)
	columns = blockColumns
	if rows <= directGroups*s.height {
		columns = min(max(directWeights/max(p.w.columns, 1)/panel*panel, panel), directColumns)
	}
	return rows, columns
}

// parts returns the number of parts.
func (p *gemm) parts(s *instructions) int {
	if p.n == 0 || p.w.rows == 0 {
		return 0
	}
	rows, columns := p.size(s)
	return (p.n + rows - 1) / rows * ((p.w.rows + columns - 1) / columns)
}

// part computes one part.
func (p *gemm) part(pool *pool, part int) {
	s := pool.set
	rows, columns := p.size(s)
	across := (p.w.rows + columns - 1) / columns
	r0, c0 := part/across*rows, part%across*columns
	t := tile{
		gemm: p, set: s, scratch: pool.tiles(),
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

// tile is one part of a GEMM: rows [r0, r1) and weight rows [c0, c1). Its sums are in blocks:
// for each panel or strip of weight rows, of groups of rows.
type tile struct {
	*gemm
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

// block returns the distance of consecutive blocks of sums, in elements.
func (t *tile) block() int { return (t.group*t.across + 7) / 8 * 8 }

// first returns the first weight row of the block at c: c, or less at the end of the matrix.
func (t *tile) first(c int) int { return max(min(c, t.w.rows-t.across), 0) }

// clear sets sums to 0.
func (t *tile) clear(matrices int) {
	for i := range matrices {
		clear(t.scratch.sums[i][:(t.c1-t.c0+t.across-1)/t.across*t.groups()*t.block()])
	}
}

// multiplyOne computes the sums of one row with weights in place, one strip of them after
// another, from end to end: memory is read in address order.
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
				direct(sums, x[k:][:n], uintptr(w)+uintptr(k*size), m.pitch(), uintptr(next)+uintptr(strip*k*size))
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

// multiply computes the sums of all groups of rows, a chunk of the inner dimension at a time,
// with direct or, if that is nil, with packed weights.
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
						direct(sums, x, uintptr(here), m.pitch(), uintptr(next))
						next = here // already prefetched
					}
					sums = sums[t.block():]
				}
			}
		}
	}
}

// next returns the address of the weights that multiply reads after those at column k of the
// block at c.
func (t *tile) next(m matrix, c, k int) device.Addr {
	switch {
	case c+t.across < t.c1:
		c += t.across
	case k+t.set.chunk < m.columns:
		c, k = t.c0, k+t.set.chunk
	}
	return m.at(t.first(c), k)
}

// finish passes the sums to out.
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

func (b *Backend) gatedMatmul(o *kernels.GatedMatMul, access device.Access) error {
	product, silu := o.Apart()
	if err := b.matmul(&product, access); err != nil {
		return err
	}
	return b.siluMul(&silu, access)
}

func (b *Backend) routerGateUp(o *kernels.RouterGateUp, access device.Access) error {
	if err := b.matmul(&o.Router, access); err != nil {
		return err
	}
	return b.gatedMatmul(&o.GateUp, access)
}

func (b *Backend) routeDown(o *kernels.RouteDown, access device.Access) error {
	if err := b.route(&o.Route, access); err != nil {
		return err
	}
	return b.matmul(&o.Down, access)
}

func (b *Backend) routeExpertUp(o *kernels.RouteExpertUp, access device.Access) error {
	if err := b.route(&o.Route, access); err != nil {
		return err
	}
	return b.expertUp(&o.Up, access)
}

func (b *Backend) matmul(o *kernels.MatMul, _ device.Access) error {
	var bias []float32
	if !o.Bias.None() {
		scratch := b.floats(o.Bias.Shape[0])
		defer b.release(scratch)
		bias = *scratch
		b.set.load(bias, o.Bias.Addr, o.Bias.DType)
	}
	p := gemm{
		w:  matrix{o.W.Addr, o.W.DType, o.W.Shape[0], o.W.Shape[1], o.W.Shape[1]},
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

// expertPairs is the pairs and the extent of one listed expert.
type expertPairs struct {
	pairs  []int32 // its pairs, each token*K + k
	first  int     // index of the first one among all pairs
	extent device.Addr
	// column is the first of its columns that are computed, of so many.
	column, columns int
}

// rowMajorUp are the rows of w1 and w3 that are computed.
func (e *expertPairs) rowMajorUp(l *kernels.ExpertLayout) (w1, w3 matrix) {
	w1 = matrix{dtype: l.DType, rows: e.columns, columns: l.Hidden, apart: l.Hidden}
	w1.addr = e.extent + device.Addr(e.column*w1.pitch())
	w3 = w1
	w3.addr += device.Addr(matrixBytes(*l))
	return w1, w3
}

// rowMajorDown are the columns of w2 that are computed with.
func (e *expertPairs) rowMajorDown(l *kernels.ExpertLayout) (w2 matrix) {
	w2 = matrix{dtype: l.DType, rows: l.Hidden, columns: e.columns, apart: l.Intermediate}
	w2.addr = e.extent + device.Addr(2*matrixBytes(*l)+int64(e.column*l.DType.Size()))
	return w2
}

// declare declares the reads of a matrix.
func (m matrix) declare(read func(device.Range)) {
	if m.columns == m.apart {
		read(device.Range{Addr: m.addr, Bytes: int64(m.rows) * int64(m.pitch())})
		return
	}
	for r := range m.rows {
		read(device.Range{Addr: m.at(r, 0), Bytes: int64(m.columns * m.dtype.Size())})
	}
}

// listedPairs reads pairs and extents of the listed experts, and skips experts without pairs.
func listedPairs(op string, p *kernels.ExpertGEMM) ([]expertPairs, error) {
	starts, pairs, extents := vector[int32](&p.Offsets), vector[int32](&p.Order), vector[uint64](&p.Slots)
	seen := make([]bool, len(extents))
	column, columns := p.ColumnRange()
	found := make([]expertPairs, 0, p.Experts.Shape[0])
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
			return nil, fmt.Errorf("cpu: %s: Slots[%d] is %#x, want the address of expert %d, which has %d pairs", op, e, a, e, to-from)
		}
		found = append(found, expertPairs{pairs: pairs[from:to], first: from, extent: device.Addr(a), column: column, columns: columns})
	}
	if !p.Runs.None() {
		return found, checkRuns(op, vector[int32](&p.Runs), starts)
	}
	return found, nil
}

// checkRuns checks that runs are those of all experts, with those offsets.
func checkRuns(op string, runs, offsets []int32) error {
	want := make([]int32, len(runs))
	listRuns(want, offsets)
	for i, v := range runs {
		if v != want[i] {
			return errValue(op, "Runs", i, int64(v), "%d by Offsets", want[i])
		}
	}
	return nil
}

// declareRows declares rows index(pair, its index among all pairs) of t, for all pairs of the
// experts found.
func declareRows(declare func(device.Range), t *kernels.Tensor, found []expertPairs, index func(pair, place int) int) {
	m, size := merger{declare: declare}, t.DType.Size()
	last := -1
	for _, s := range found {
		for j, p := range s.pairs {
			if i := index(int(p), s.first+j); i != last {
				m.add(t.Addr+device.Addr(size*i*t.Stride[0]), size*t.Shape[1])
				last = i
			}
		}
	}
	m.flush()
}

// runGEMMs runs one GEMM per expert, with their parts in parallel.
func (b *Backend) runGEMMs(products []gemm) {
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
	found, err := listedPairs(o.Name(), &o.ExpertGEMM)
	if err != nil || len(found) == 0 {
		return err
	}
	k := o.Order.Shape[0] / o.X.Shape[0]
	for i := range found {
		w1, w3 := found[i].rowMajorUp(&o.Layout)
		w1.declare(access.Read)
		w3.declare(access.Read)
	}
	declareRows(access.Read, &o.X, found, func(p, _ int) int { return p / k })
	declareRows(access.Write, &o.Out, found, func(_, place int) int { return place })
	b.up(&o.ExpertGEMM, found, &o.Out)
	return nil
}

func (b *Backend) expertDown(o *kernels.ExpertDown, access device.Access) error {
	found, err := listedPairs(o.Name(), &o.ExpertGEMM)
	if err != nil || len(found) == 0 {
		return err
	}
	for i := range found {
		found[i].rowMajorDown(&o.Layout).declare(access.Read)
	}
	declareRows(access.Read, &o.X, found, func(_, place int) int { return place })
	declareRows(access.Write, &o.Out, found, func(p, _ int) int { return p })
	b.down(&o.ExpertGEMM, found, &o.X)
	return nil
}

func (b *Backend) expertFFN(o *kernels.ExpertFFN, access device.Access) error {
	found, err := listedPairs(o.Name(), &o.ExpertGEMM)
	if err != nil || len(found) == 0 {
		return err
	}
	if err := beginAt(o, found); err != nil {
		return err
	}
	k, matrix := o.Order.Shape[0]/o.X.Shape[0], matrixBytes(o.Layout)
	for _, s := range found {
		access.Read(device.Range{Addr: s.extent, Bytes: 3 * matrix})
	}
	declareRows(access.Read, &o.X, found, func(p, _ int) int { return p / k })
	declareRows(access.Write, &o.Out, found, func(p, _ int) int { return p })
	if o.Layout.Tag == kernels.Tiles {
		b.tiledExperts(o, found)
		return nil
	}
	scratch := b.floats(o.Order.Shape[0] * o.Layout.Intermediate)
	defer b.release(scratch)
	between := kernels.New(addrOf(*scratch), o.X.DType, o.Order.Shape[0], o.Layout.Intermediate)
	b.up(&o.ExpertGEMM, found, &between)
	b.down(&o.ExpertGEMM, found, &between)
	return nil
}

// beginAt has each expert begin at its first column.
func beginAt(o *kernels.ExpertFFN, found []expertPairs) error {
	if o.First.None() {
		return nil
	}
	starts, all, next := vector[int32](&o.Offsets), o.Layout.Intermediate, 0
	first := vector[int32](&o.First)
	for i, e := range vector[int32](&o.Experts) {
		if starts[e] == starts[e+1] {
			continue // it is not among those found
		}
		n := int(first[i])
		if n < 0 || n >= all || n%kernels.TileColumns != 0 {
			return errValue(o.Name(), "First", i, int64(n), "a multiple of %d below %d", kernels.TileColumns, all)
		}
		found[next].column, found[next].columns = n, all-n
		next++
	}
	return nil
}

// matrixBytes is the size of one of an expert's three matrices.
func matrixBytes(l kernels.ExpertLayout) int64 {
	return int64(l.Hidden) * int64(l.Intermediate) * int64(l.DType.Size())
}

// up computes the gate/up projection of row-major experts, with the rows of X of tokens.
func (b *Backend) up(o *kernels.ExpertGEMM, found []expertPairs, out *kernels.Tensor) {
	k := o.Order.Shape[0] / o.X.Shape[0]
	x, scratch := b.widened(&o.X, found, func(p, _ int) int { return p / k })
	defer b.release(scratch)
	products := make([]gemm, len(found))
	for i, s := range found {
		w1, w3 := s.rowMajorUp(&o.Layout)
		products[i] = gemm{
			w: w1, v: w3, n: len(s.pairs),
			in: func(r int) device.Addr { return rowAddr(&x, int(s.pairs[r])/k) },
			out: func(r, first int, gate, up []float32) {
				n := b.set.padded(len(gate))
				b.set.siluMul(gate[:n], gate[:n], up[:n])
				store(out, s.first+r, first, gate)
			},
		}
	}
	b.runGEMMs(products)
}

// down computes the down projection of row-major experts: in has a row for each pair.
func (b *Backend) down(o *kernels.ExpertGEMM, found []expertPairs, in *kernels.Tensor) {
	x, scratch := b.widened(in, found, func(_, place int) int { return place })
	defer b.release(scratch)
	products := make([]gemm, len(found))
	for i, s := range found {
		products[i] = gemm{
			w: s.rowMajorDown(&o.Layout), n: len(s.pairs),
			in: func(r int) device.Addr { return rowAddr(&x, s.first+r) },
			out: func(r, first int, sums, _ []float32) {
				store(&o.Out, int(s.pairs[r]), first, sums)
			},
		}
	}
	b.runGEMMs(products)
}

// store rounds values to the type of a tensor of rank 2, into a row of it, from a column on.
func store(t *kernels.Tensor, row, column int, values []float32) {
	size := t.DType.Size()
	a := t.Addr + device.Addr(size*(row*t.Stride[0]+column))
	kernels.FromFloat32(at[byte](a, size*len(values)), values, t.DType)
}
