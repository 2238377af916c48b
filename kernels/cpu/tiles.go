package cpu

import (
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// Experts in host memory have the layout of the GPU that they are offloaded from. In the layout
// kernels.Tiles, a part of a GEMM is some weight rows of a unit, whose tiles follow one another in
// memory: it is read from one end to the other. Sums are in memory too, lane by lane, small enough
// for the first cache. With few rows of x the time is that of reading weights, on whatever
// processor: multiplying pairs of bf16 by one instruction would save nothing.

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
	// at about the same time.
	partsPerThread = 4
)

// tiledGEMM is X Wᵀ for the units of one expert: those of w1 and w3, or of w2.
type tiledGEMM struct {
	w            device.Addr
	units, inner int
	// x has n rows of inner elements, each followed by tilePad elements, which keep rows from
	// falling into the same sets of a cache.
	x []float32
	n int
	// out receives the sums of blocks [first, first+blocks) of a unit, [weight row][row of x].
	out func(unit, first, blocks int, sums []float32)
}

const tilePad = 16

// newTiled returns a GEMM with rows of x converted to float32, in scratch memory that the caller
// releases.
func (b *Backend) newTiled(w device.Addr, units, inner, n int, row func(r int) device.Addr, t kernels.DType) (tiledGEMM, *[]float32) {
	scratch := b.floats(n * (inner + tilePad))
	for r := range n {
		b.set.load((*scratch)[r*(inner+tilePad):][:inner], row(r), t)
	}
	return tiledGEMM{w: w, units: units, inner: inner, x: *scratch, n: n}, scratch
}

// runTiled runs GEMMs, with their parts in parallel.
func (b *Backend) runTiled(t kernels.DType, products []tiledGEMM) {
	units, rows := 0, 0
	for i := range products {
		units += products[i].units
		rows = max(rows, products[i].n)
	}
	const all = kernels.TileRows / tileTurns
	blocks := all
	for blocks > minBlocks && (units*all/blocks < partsPerThread*b.threads || blocks*min(rows, tiledRows) > maxBlocks) {
		blocks /= 2
	}
	parts := all / blocks // of a unit
	multiply := b.set.tilesBF16
	if t == kernels.F16 {
		multiply = b.set.tilesF16
	}
	b.parallel(units*parts, func(part int) {
		p, unit := &products[0], part/parts
		for i := 1; unit >= p.units; i++ {
			unit -= p.units
			p = &products[i]
		}
		scratch := b.tiles()
		defer b.releaseTile(scratch)
		p.part(b.set, multiply, scratch, unit, part%parts*blocks, blocks)
	})
}

// part computes some blocks of a unit.
func (p *tiledGEMM) part(s *instructions, multiply func(sums, x *float32, stride int, w uintptr, rows, blocks, steps int), scratch *scratch, unit, first, blocks int) {
	weightRows := blocks * tileTurns
	steps, stride := p.inner/kernels.TileColumns, p.inner+tilePad
	w := uintptr(p.w) + uintptr(unit*steps*tileBytes+first*tileTurns*kernels.TileRowBytes)
	lanes, sums := scratch.sums[0][:weightRows*min(tiledRows, p.n)*s.lanes], scratch.tiled(weightRows*p.n)
	clear(lanes)
	clear(sums)
	for k := 0; k < p.inner; k += s.chunk {
		n := min(s.chunk, p.inner-k) / kernels.TileColumns
		for r := 0; r < p.n; r += tiledRows {
			rows := min(tiledRows, p.n-r)
			multiply(&lanes[0], &p.x[r*stride+k], 4*stride, w+uintptr(k/kernels.TileColumns*tileBytes), rows, blocks, n)
			s.addTiles(&sums[weightRows*r], &lanes[0], weightRows*rows)
		}
	}
	p.out(unit, first, blocks, sums)
}

// sumOf returns where a part's sums have weight row j and row r of x.
func (p *tiledGEMM) sumOf(weightRows, j, r int) int {
	group := r / tiledRows * tiledRows
	rows := min(tiledRows, p.n-group)
	return weightRows*group + j*rows + r - group
}

// tiled returns scratch for n sums.
func (s *scratch) tiled(n int) []float32 {
	if n <= len(s.sums[1]) {
		return s.sums[1][:n]
	}
	return s.rowsOf(n)
}

// expertUpTiled is expertUp in the layout kernels.Tiles.
func (b *Backend) expertUpTiled(o *kernels.ExpertUp, found []expertPairs) {
	k, size := o.Order.Shape[0]/o.X.Shape[0], o.X.DType.Size()
	products := make([]tiledGEMM, len(found))
	for i := range found {
		s := &found[i]
		p, scratch := b.newTiled(s.extent, 2*o.Layout.Intermediate/kernels.TileRows, o.Layout.Hidden, len(s.pairs), func(r int) device.Addr {
			return o.X.Addr + device.Addr(size*(int(s.pairs[r])/k)*o.X.Stride[0])
		}, o.X.DType)
		defer b.release(scratch)
		p.out = func(unit, first, blocks int, sums []float32) {
			var gate, up [kernels.TileRows/2 + maxLanes]float32
			rows := blocks * tileTurns
			n := rows / 2
			for r := range s.pairs {
				for j := range n {
					at := j/tileTurns*2*tileTurns + j%tileTurns // w1's row, which w3's follows
					gate[j], up[j] = sums[products[i].sumOf(rows, at, r)], sums[products[i].sumOf(rows, at+tileTurns, r)]
				}
				whole := b.set.padded(n)
				b.set.siluMul(gate[:whole], gate[:whole], up[:whole])
				column := (unit*kernels.TileRows + first*tileTurns) / 2
				store(&o.Out, s.first+r, column, gate[:n])
			}
		}
		products[i] = p
	}
	b.runTiled(o.Layout.DType, products)
}

// expertDownTiled is expertDown in the layout kernels.Tiles.
func (b *Backend) expertDownTiled(o *kernels.ExpertDown, found []expertPairs) {
	l, size := o.Layout, o.X.DType.Size()
	products := make([]tiledGEMM, len(found))
	for i := range found {
		s := &found[i]
		w2 := s.extent + device.Addr(2*l.Hidden*l.Intermediate*l.DType.Size())
		p, scratch := b.newTiled(w2, l.Hidden/kernels.TileRows, l.Intermediate, len(s.pairs), func(r int) device.Addr {
			return o.X.Addr + device.Addr(size*(s.first+r)*o.X.Stride[0])
		}, o.X.DType)
		defer b.release(scratch)
		p.out = func(unit, first, blocks int, sums []float32) {
			var out [kernels.TileRows]float32
			rows := blocks * tileTurns
			for r, pair := range s.pairs {
				for j := range rows {
					out[j] = sums[products[i].sumOf(rows, kernels.TilePlace(kernels.W2, j), r)]
				}
				store(&o.Out, int(pair), unit*kernels.TileRows+first*tileTurns, out[:rows])
			}
		}
		products[i] = p
	}
	b.runTiled(l.DType, products)
}

// store rounds values to the type of a tensor of rank 2, into a row of it, from a column on.
func store(t *kernels.Tensor, row, column int, values []float32) {
	size := t.DType.Size()
	a := t.Addr + device.Addr(size*(row*t.Stride[0]+column))
	kernels.FromFloat32(at[byte](a, size*len(values)), values, t.DType)
}
