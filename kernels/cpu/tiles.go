package cpu

import (
	"sync/atomic"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// Experts in host memory have the layout of the GPU that they are offloaded from. In the layout
// kernels.Tiles, a part of a GEMM is some weight rows of a unit, whose tiles follow one another in
// memory: it is read from one end to the other. Sums are in memory too, lane by lane, small enough
// for the first cache. With few rows of x the time is that of reading weights, on whatever
// processor: multiplying pairs of bf16 by one instruction would save nothing.
//
// All experts of an operation are one parallel loop, so that threads start and end together once.

const (
	tileTurns = 8 // weight rows of a block: one of each swizzle
	tileBytes = kernels.TileRows * kernels.TileRowBytes
	// tiledRows is the maximum number of rows of x that are multiplied with weights at once.
	// Results do not depend on it.
	tiledRows = 8
	// minBlocks is the minimum number of blocks of a part: w1 and w3 alternate by one.
	minBlocks = 2
	// maxBlocks is the maximum number of blocks times rows of a part: the sums of 32, of 16 KiB, stay
	// in the first cache.
	maxBlocks = 32
	// partsPerThread is the number of parts that a thread should have at least, so that all end
	// at about the same time. Small parts read only some KiB of memory at a stretch.
	partsPerThread = 2
)

const tilePad = 16

// tiledExperts computes experts in the layout kernels.Tiles.
func (b *Backend) tiledExperts(o *kernels.ExpertFFN, found []expertPairs) {
	l, rows, most, columns := o.Layout, 0, 0, 0
	experts := make([]tiledExpert, len(found))
	for i, s := range found {
		experts[i] = tiledExpert{expertPairs: s, row: rows}
		rows += len(s.pairs)
		most = max(most, len(s.pairs))
		columns += s.columns
	}
	x, between := b.floats(rows*(l.Hidden+tilePad)), b.floats(rows*(l.Intermediate+tilePad))
	defer b.release(x)
	defer b.release(between)
	t := &tiledLoop{
		pool: b.pool, o: o, experts: experts, x: *x, between: *between, multiply: b.set.tilesBF16,
		up:   b.divide(2*columns, len(found), most),
		down: b.divide(l.Hidden*len(found), len(found), most),
	}
	for i := range found {
		t.up.add(2 * found[i].columns)
		t.down.add(l.Hidden)
	}
	if l.DType == kernels.F16 {
		t.multiply = b.set.tilesF16
	}
	b.parallel(len(found)+t.up.all()+t.down.all(), t.part)
}

// tiledLoop is the parallel loop over all parts of experts: first those that convert their rows of X
// to float32, then those of their gate/up projections, then those of their down projections. A part
// waits for those parts of its expert that it needs, which precede it: others compute them already.
type tiledLoop struct {
	pool    *pool
	o       *kernels.ExpertFFN
	experts []tiledExpert
	// x and between have a row for each pair, in the experts' order, of Hidden and of Intermediate
	// elements, each followed by tilePad elements, which keep rows from falling into the same sets
	// of a cache.
	x, between []float32
	up, down   division
	multiply   func(sums, x *float32, stride int, w uintptr, rows, blocks, steps int)
}

// tiledExpert is one expert of a loop, of which row is the first among all pairs' rows.
type tiledExpert struct {
	expertPairs
	row int
	// converted is 1 once its rows of X are; ups counts its parts of the gate/up projection that
	// have ended.
	converted, ups atomic.Int32
}

// division of the units of experts into parts, of so many blocks of a unit each.
type division struct {
	blocks int
	// ends are the number of parts up to each expert's last one.
	ends []int
}

// add adds an expert with so many weight rows.
func (d *division) add(weightRows int) {
	d.ends = append(d.ends, d.all()+weightRows/tileTurns/d.blocks)
}

// all is the number of parts.
func (d *division) all() int {
	if len(d.ends) == 0 {
		return 0
	}
	return d.ends[len(d.ends)-1]
}

// of returns the expert of a part, and which of its parts it is.
func (d *division) of(part int) (expert, index int) {
	first := 0
	for part >= d.ends[expert] {
		first = d.ends[expert]
		expert++
	}
	return expert, part - first
}

// parts of an expert.
func (d *division) parts(expert int) int {
	if expert == 0 {
		return d.ends[0]
	}
	return d.ends[expert] - d.ends[expert-1]
}

// divide returns the division of so many weight rows of some experts with at most so many rows of x,
// which are to be added to it.
func (b *Backend) divide(weightRows, experts, rows int) division {
	const all = kernels.TileRows / tileTurns
	blocks := all
	for blocks > minBlocks && (weightRows/tileTurns/blocks < partsPerThread*b.threads || blocks*min(rows, tiledRows) > maxBlocks) {
		blocks /= 2
	}
	return division{blocks: blocks, ends: make([]int, 0, experts)}
}

// part runs one part.
func (t *tiledLoop) part(part int) {
	if part < len(t.experts) {
		e := &t.experts[part]
		t.convert(e)
		e.converted.Store(1)
		return
	}
	part -= len(t.experts)
	if n := t.up.all(); part >= n {
		i, index := t.down.of(part - n)
		e := &t.experts[i]
		waitFor(&e.ups, t.up.parts(i))
		t.downPart(e, index)
		return
	}
	i, index := t.up.of(part)
	e := &t.experts[i]
	waitFor(&e.converted, 1)
	t.upPart(e, index)
	e.ups.Add(1)
}

// convert widens an expert's rows of X.
func (t *tiledLoop) convert(e *tiledExpert) {
	x := &t.o.X
	k, size, stride := t.o.Order.Shape[0]/x.Shape[0], x.DType.Size(), t.o.Layout.Hidden+tilePad
	for r, pair := range e.pairs {
		from := x.Addr + device.Addr(size*(int(pair)/k)*x.Stride[0])
		t.pool.set.load(t.x[(e.row+r)*stride:][:t.o.Layout.Hidden], from, x.DType)
	}
}

// upPart computes w1's and w3's products of one part, and what the down projection gets.
func (t *tiledLoop) upPart(e *tiledExpert, part int) {
	l, s := t.o.Layout, t.pool.tiles()
	defer t.pool.releaseTile(s)
	blocks := t.up.blocks
	w := e.extent + device.Addr(2*e.column*l.Hidden*l.DType.Size())
	sums := t.sums(s, e, t.x, w, l.Hidden, l.Hidden, part, blocks)
	// Rows of w1 and w3 alternate by eight.
	n, column := blocks*tileTurns/2, part*blocks*tileTurns/2
	var gate, up [kernels.TileRows/2 + maxLanes]float32
	for r := range e.pairs {
		from, rows := sums.of(r)
		for block := range blocks / 2 {
			for j := range tileTurns {
				gate[block*tileTurns+j] = from[(2*block*tileTurns+j)*rows]
				up[block*tileTurns+j] = from[((2*block+1)*tileTurns+j)*rows]
			}
		}
		whole := t.pool.set.padded(n)
		t.pool.set.siluMul(gate[:whole], gate[:whole], up[:whole])
		out := t.between[(e.row+r)*(l.Intermediate+tilePad)+column:][:n]
		roundTo(out, gate[:n], t.o.X.DType)
	}
}

// downPart computes w2's products of one part.
func (t *tiledLoop) downPart(e *tiledExpert, part int) {
	l, s := t.o.Layout, t.pool.tiles()
	defer t.pool.releaseTile(s)
	w2 := e.extent + device.Addr(2*matrixBytes(l)) + device.Addr(e.column/kernels.TileColumns*tileBytes)
	sums := t.sums(s, e, t.between, w2, l.Intermediate, e.columns, part, t.down.blocks)
	n := t.down.blocks * tileTurns
	var out [kernels.TileRows]float32
	for r, pair := range e.pairs {
		from, rows := sums.of(r)
		for j := range n {
			out[j] = from[kernels.TilePlace(kernels.W2, j)*rows]
		}
		store(&t.o.Out, int(pair), part*n, out[:n])
	}
}

// tiledSums are the sums of a part: for each group of tiledRows rows of x, [weight row][row].
type tiledSums struct {
	sums             []float32
	weightRows, rows int
}

// of returns the sums of row r of x, which begin there and are rows apart.
func (s *tiledSums) of(r int) (from []float32, rows int) {
	group := r / tiledRows * tiledRows
	return s.sums[s.weightRows*group+r-group:], min(tiledRows, s.rows-group)
}

// sums multiplies an expert's rows of x, with room for width elements each, of which the first inner
// ones, with some blocks of its units at w, which have tiles for all of width.
func (t *tiledLoop) sums(scratch *scratch, e *tiledExpert, x []float32, w device.Addr, width, inner, part, blocks int) tiledSums {
	const all = kernels.TileRows / tileTurns
	set, n := t.pool.set, len(e.pairs)
	steps, stride, weightRows := width/kernels.TileColumns, width+tilePad, blocks*tileTurns
	unit, first := part*blocks/all, part*blocks%all
	at := uintptr(w) + uintptr(unit*steps*tileBytes+first*tileTurns*kernels.TileRowBytes)
	lanes, sums := scratch.sums[0][:weightRows*min(tiledRows, n)*set.lanes], scratch.tiled(weightRows*n)
	clear(lanes)
	clear(sums)
	for k := 0; k < inner; k += set.chunk {
		tiles := min(set.chunk, inner-k) / kernels.TileColumns
		for r := 0; r < n; r += tiledRows {
			rows := min(tiledRows, n-r)
			t.multiply(&lanes[0], &x[(e.row+r)*stride+k], 4*stride, at+uintptr(k/kernels.TileColumns*tileBytes), rows, blocks, tiles)
			set.addTiles(&sums[weightRows*r], &lanes[0], weightRows*rows)
		}
	}
	return tiledSums{sums: sums, weightRows: weightRows, rows: n}
}

// tiled returns scratch for n sums.
func (s *scratch) tiled(n int) []float32 {
	if n <= len(s.sums[1]) {
		return s.sums[1][:n]
	}
	return s.rowsOf(n)
}

// roundTo sets to to values rounded to a type.
func roundTo(to, values []float32, t kernels.DType) {
	if t == kernels.F32 {
		copy(to, values)
		return
	}
	var data [2 * kernels.TileRows]byte
	kernels.FromFloat32(data[:2*len(values)], values, t)
	kernels.ToFloat32(to, data[:2*len(values)], t)
}
