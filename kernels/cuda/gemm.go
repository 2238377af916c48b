package cuda

import (
	"math"

	"github.com/moeserve/moeserve/kernels"
)

// tile is what one block of a GEMM computes.
type tile struct {
	name          string
	rows, weights int // rows of X; rows of W, or of both matrices for gate/up
	terms         int // number of terms that weights are split into
	stages        int
	threads       int
}

// tiles are the instantiations in gemm.cu; the last accepts all types.
var tiles = [...]tile{
	{"16", 16, 64, 1, 6, 128},
	{"64", 64, 128, 1, 4, 256},
	{"128", 128, 128, 1, 3, 256},
	{"any", 64, 128, 2, 2, 256},
}

const anyTile = len(tiles) - 1

// stepBytes is the bytes of one row of a stage: 64 elements.
const stepBytes = 128

func (t *tile) shared() int { return (t.rows + t.terms*t.weights) * stepBytes * t.stages }

// columns is the number of columns of Out per tile.
func (t *tile) columns(mode kernelID) int {
	if mode == gateUpMode {
		return t.weights / 2
	}
	return t.weights
}

// Modes of a GEMM, in the order of the table.
const (
	denseMode kernelID = iota
	gateUpMode
	downMode
)

// gemm enqueues a GEMM with the given tile.
func (l *streamState) gemm(op string, mode kernelID, tile, blocks int, a *gemmArgs) error {
	t := &tiles[tile]
	return launch(l, op, gemmKernels+mode*kernelID(len(tiles))+kernelID(tile), grid{x: blocks, threads: t.threads, shared: t.shared()}, a)
}

// chooseTile selects the largest tile of which more than half is used by the given rows (per
// matrix), provided that there are enough tiles to keep the device busy; matrices is the number
// of GEMMs with that many columns of Out.
func (b *Backend) chooseTile(mode kernelID, rows, columns, matrices int) int {
	for i := anyTile - 1; i > 0; i-- {
		t := &tiles[i]
		if 2*rows > t.rows && ceil(rows, t.rows)*ceil(columns, t.columns(mode))*matrices >= b.multiprocessors {
			return i
		}
	}
	return 0
}

func (l *streamState) matmul(o *kernels.MatMul) error {
	if err := l.b.activation(o.Name(), "X", &o.X); err != nil {
		return err
	}
	rows, columns, inner := o.X.Shape[0], o.W.Shape[0], o.W.Shape[1]
	if rows == 0 || columns == 0 {
		return nil
	}
	same := l.b.sameTypes(o)
	outFloat := o.Out.DType == kernels.F32
	if same && (columns <= maxSkinnyColumns || !l.b.o.BatchInvariant && rows <= maxSkinnyRows || l.b.takesSixteenRows(rows, columns, 16, inner)) {
		return l.skinnyGEMM(o, outFloat)
	}
	if l.b.o.BatchInvariant && l.b.hopper && same && inner > 0 && (outFloat || columns%2 == 0 && paired(&o.Out)) {
		return l.hopperGEMM(o, outFloat)
	}
	if !l.b.o.BatchInvariant && same && inner > 0 && columns%8 == 0 && aligned(&o.Out) && o.Out.Stride[0]%8 == 0 {
		done, err := l.libraryMatMul(o, outFloat)
		if done || err != nil {
			return err
		}
	}
	a := gemmArgs{
		x: address(&o.X), w: address(&o.W), bias: address(&o.Bias), out: address(&o.Out),
		xStride: int64(o.X.Stride[0]), outStride: int64(o.Out.Stride[0]),
		wStride: int64(inner), rows: int32(rows), columns: int32(columns), inner: int32(inner),
		wType: int32(o.W.DType), biasType: int32(o.Bias.DType), outFloat: b2i(outFloat),
		xAligned: b2i(aligned(&o.X)), wAligned: b2i(inner%8 == 0 && aligned(&o.W)), outPaired: b2i(paired(&o.Out)),
	}
	i := anyTile
	if same {
		i = l.b.chooseTile(denseMode, rows, columns, 1)
	}
	blocks := ceil(rows, tiles[i].rows) * ceil(columns, tiles[i].columns(denseMode))
	return l.gemm(o.Name(), denseMode, i, blocks, &a)
}

const (
	// few.cu computes GEMMs of at most maxSkinnyColumns columns (routers of up to 64 experts, with
	// the gate of a shared one) or at most maxSkinnyRows rows; its kernels named sixteen at most maxSixteenRows.
	maxSkinnyColumns, maxSkinnyRows, maxSixteenRows = 65, 8, 16
	skinnyThreads                                   = 512
	// skinnyStageBytes is one stage of a block of few_rows: 64 bytes per thread.
	skinnyStageBytes = 64 * skinnyThreads
	// skinnyLoads are the loads of a block up to which a kernel of few.cu with evict_first reads its weights. That L2 policy makes
	// long reads slower: those of Qwen3's LM head took 10 % longer, with four stages at 8cd63e83.
	skinnyLoads = 16
	// skinnyStageElements of each of 16 weight rows are in a stage.
	skinnyStageElements = skinnyStageBytes / 2 / 16
)

// sameTypes reports whether tensor cores can load both operands unconverted, 16 bytes at a time.
func (b *Backend) sameTypes(o *kernels.MatMul) bool {
	if b.o.BatchInvariant && o.X.Stride[0]%8 != 0 {
		return false // a single row may be aligned where others are not
	}
	return o.W.DType == o.X.DType && o.W.Shape[1]%8 == 0 && aligned(&o.X, &o.W)
}

// gatedMatmul enqueues one kernel for few rows, else GEMM and silu_mul.
func (l *streamState) gatedMatmul(o *kernels.GatedMatMul) error {
	if err := l.b.activation(o.Name(), "X", &o.X); err != nil {
		return err
	}
	product, silu := o.Apart()
	rows, columns := o.X.Shape[0], o.Out.Shape[1]/2
	sixteen := l.b.takesSixteenRows(rows, columns, 8, o.X.Shape[1])
	if l.b.o.BatchInvariant || rows == 0 || rows > maxSkinnyRows && !sixteen || columns == 0 || !l.b.sameTypes(&product) {
		if err := l.matmul(&product); err != nil {
			return err
		}
		return l.siluMul(&silu)
	}
	k, g := fewRowsGated2, grid{x: min(ceil(columns, 8), l.b.multiprocessors), threads: skinnyThreads, shared: 2 * skinnyStageBytes}
	if sixteen {
		k, g.shared = sixteenRowsGated5, 5*skinnyStageBytes
	} else if l.b.largeSmem {
		k, g.shared = fewRowsGatedOnce5, 5*skinnyStageBytes
		if skinnyLoadsOf(columns, 8, g.x, o.X.Shape[1]) > skinnyLoads {
			k = fewRowsGated5
		}
	}
	a := fewArguments(&product, false)
	a.columns = int32(columns)
	return launch(l, o.Name(), k, g, &a)
}

// takesSixteenRows reports whether sixteen_rows_4, or with tiles of eight columns sixteen_rows_gated_5, computes a GEMM.
// Long reads of weights, those of LM heads, are the library's: the kernels read X again for each tile.
func (b *Backend) takesSixteenRows(rows, columns, tile, inner int) bool {
	return b.largeSmem && !b.o.BatchInvariant && rows > maxSkinnyRows && rows <= maxSixteenRows && columns > 0 &&
		skinnyLoadsOf(columns, tile, min(ceil(columns, tile), b.multiprocessors), inner) <= skinnyLoads
}

// skinnyLoadsOf is the number of stages that a block of few_rows loads, with that many columns a tile.
func skinnyLoadsOf(columns, tile, blocks, inner int) int {
	return ceil(ceil(columns, tile), blocks) * ceil(inner, skinnyStageElements)
}

// skinnyGEMM enqueues a GEMM with few columns or few rows.
func (l *streamState) skinnyGEMM(o *kernels.MatMul, outFloat bool) error {
	rows, columns := o.X.Shape[0], o.W.Shape[0]
	var k kernelID
	var g grid
	switch {
	case l.b.takesSixteenRows(rows, columns, 16, o.X.Shape[1]):
		g = grid{x: min(ceil(columns, 16), l.b.multiprocessors)}
		k, g.shared = sixteenRows4, min(skinnyLoadsOf(columns, 16, g.x, o.X.Shape[1]), 4)*skinnyStageBytes
	case !l.b.o.BatchInvariant && rows <= maxSkinnyRows:
		k, g = fewRows2, grid{x: min(ceil(columns, 16), l.b.multiprocessors), shared: 2 * skinnyStageBytes}
		if l.b.largeSmem {
			// A block has no memory for stages that it does not use, so that it finds room beside one of attention, and
			// loads while that runs.
			loads := skinnyLoadsOf(columns, 16, g.x, o.X.Shape[1])
			k, g.shared = fewRows4, min(loads, 4)*skinnyStageBytes
			switch {
			case loads > skinnyLoads:
				k, g.shared = fewRows5, 5*skinnyStageBytes
			case loads == 4 && 2*g.x > l.b.multiprocessors:
				// With three stages a multiprocessor has room for a narrow block of the next expert GEMM, too
				// (docs/log/small-steps-beside-2026-11-30.md).
				k, g.shared = fewRows3, 3*skinnyStageBytes
			}
		}
	case columns <= 8:
		k, g = fewColumns8, grid{x: ceil(rows, 16)}
	default:
		k, g = fewColumns16, grid{x: ceil(rows, 16), y: ceil(columns, 16)}
		if g.y > 1 && g.x >= l.b.multiprocessors {
			k, g.y = fewColumns64, ceil(columns, 64) // with this many rows, each is read once
		}
	}
	g.threads = skinnyThreads
	a := fewArguments(o, outFloat)
	return launch(l, o.Name(), k, g, &a)
}

func fewArguments(o *kernels.MatMul, outFloat bool) fewArgs {
	return fewArgs{
		x: address(&o.X), w: address(&o.W), bias: address(&o.Bias), out: address(&o.Out),
		xStride: int64(o.X.Stride[0]), outStride: int64(o.Out.Stride[0]),
		rows: int32(o.X.Shape[0]), columns: int32(o.W.Shape[0]), inner: int32(o.W.Shape[1]), biasType: int32(o.Bias.DType), outFloat: b2i(outFloat),
	}
}

// libraryMatMul enqueues a GEMM of cuBLASLt, or returns false. The library requires the bias to
// have the type of Out.
func (l *streamState) libraryMatMul(o *kernels.MatMul, outFloat bool) (bool, error) {
	p := &l.library
	*p = libraryGEMM{
		x: o.X.Addr, w: o.W.Addr, out: o.Out.Addr,
		rows: o.X.Shape[0], columns: o.W.Shape[0], inner: o.W.Shape[1],
		xStride: o.X.Stride[0], outStride: o.Out.Stride[0], outFloat: outFloat,
	}
	after := false // the bias is added by a separate kernel
	if !o.Bias.None() {
		switch {
		case outFloat:
			after = true
		case o.Bias.DType == o.Out.DType && aligned(&o.Bias):
			p.bias = o.Bias.Addr
		default:
			return false, nil
		}
	}
	done, err := l.b.run.matmul(l.stream, l.work, p)
	if done {
		l.last = lastLaunch{}
	}
	if !done || err != nil || !after {
		return done, err
	}
	return true, launch(l, o.Name(), addBias, rowGrid(p.rows, p.columns/8), &addBiasArgs{
		x: address(&o.Out), bias: address(&o.Bias), stride: int64(p.outStride),
		columns: int32(p.columns), biasType: int32(o.Bias.DType), aligned: b2i(aligned(&o.Bias)),
	})
}

// paired reports whether an even column and its neighbor are in one aligned word.
func paired(t *kernels.Tensor) bool {
	return int(t.Addr)%(2*t.DType.Size()) == 0 && t.Stride[0]%2 == 0
}

func (l *streamState) expertUp(o *kernels.ExpertUp) error {
	return l.experts(o.Name(), gateUpMode, &o.ExpertGEMM)
}

func (l *streamState) expertDown(o *kernels.ExpertDown) error {
	return l.experts(o.Name(), downMode, &o.ExpertGEMM)
}

// experts enqueues the grouped GEMM of the listed experts, in tiles selected by the average
// number of pairs per expert.
func (l *streamState) experts(op string, mode kernelID, p *kernels.ExpertGEMM) error {
	if err := l.b.activation(op, "X", &p.X); err != nil {
		return err
	}
	if err := l.b.checkLayout(op, &p.Layout); err != nil {
		return err
	}
	pairs, listed, all := p.Order.Shape[0], p.Experts.Shape[0], p.Slots.Shape[0]
	if pairs == 0 || listed == 0 {
		return nil
	}
	if p.Layout.Tag == Tiles {
		return l.hopperExpertGEMM(op, mode, p, nil)
	}
	columns, inner, matrix := p.Out.Shape[1], p.X.Shape[1], int64(p.Layout.Hidden)*int64(p.Layout.Intermediate)
	first, _ := p.ColumnRange()
	start, stride := int64(first)*int64(p.Layout.Hidden), p.Layout.Hidden
	if mode == downMode {
		start, stride = 2*matrix+int64(first), p.Layout.Intermediate
	}
	a := gemmArgs{
		x: address(&p.X), out: address(&p.Out), offsets: address(&p.Offsets), order: address(&p.Order), slots: address(&p.Slots), experts: address(&p.Experts),
		xStride: int64(p.X.Stride[0]), outStride: int64(p.Out.Stride[0]),
		wStart: start, wMatrix: matrix, wStride: int64(stride), columns: int32(columns), inner: int32(inner),
		listed: int32(listed), expertsAll: int32(all), topK: int32(pairs / max(p.X.Shape[0], 1)), wType: int32(p.Layout.DType),
		xAligned: b2i(aligned(&p.X)), wAligned: b2i(stride%8 == 0), outPaired: b2i(paired(&p.Out)),
	}
	i := anyTile
	if p.Layout.DType == p.X.DType && stride%8 == 0 && inner%8 == 0 && aligned(&p.X) {
		i = l.b.chooseTile(mode, ceil(pairs, all), columns, listed)
	}
	t := &tiles[i]
	// The worst case: as many tiles as the pairs fill, and one more for each expert.
	rows := min(pairs, pairs/t.rows+listed)
	if rows > math.MaxInt32/ceil(columns, t.columns(mode)) {
		rows = math.MaxInt32 // launch returns an error
	}
	return l.gemm(op, mode, i, rows*ceil(columns, t.columns(mode)), &a)
}
