package cuda

import (
	"math"

	"github.com/moeserve/moeserve/kernels"
)

// tile is what one block of a product computes.
type tile struct {
	name          string
	rows, weights int // of X; of W, or of both matrices for the way up
	terms         int // into how many parts weights are taken apart
	stages        int
	threads       int
}

// tiles as they are instantiated in product.cu; the last takes all types.
var tiles = [...]tile{
	{"16", 16, 64, 1, 6, 128},
	{"64", 64, 128, 1, 4, 256},
	{"128", 128, 128, 1, 3, 256},
	{"any", 64, 128, 2, 2, 256},
}

const anyTile = len(tiles) - 1

// stepBytes is one row of a stage: 64 elements.
const stepBytes = 128

func (t *tile) shared() int { return (t.rows + t.terms*t.weights) * stepBytes * t.stages }

// columns of Out that one tile has.
func (t *tile) columns(mode kernelID) int {
	if mode == upMode {
		return t.weights / 2
	}
	return t.weights
}

// Modes of a product, in the order of the table.
const (
	denseMode kernelID = iota
	upMode
	downMode
)

// product enqueues a product with the tile given; across is how many tiles of
// columns there are.
func (l *lane) product(op string, mode kernelID, tile, blocks int, a *productArgs) error {
	t := &tiles[tile]
	return launch(l, op, productKernels+mode*kernelID(len(tiles))+kernelID(tile), grid{x: blocks, threads: t.threads, shared: t.shared()}, a)
}

// chooseTile takes the largest tile that rows rows (of one matrix) fill by more than
// half and of which there are enough to keep the device busy: matrices products with
// so many columns of Out.
func (b *Backend) chooseTile(mode kernelID, rows, columns, matrices int) int {
	for i := anyTile - 1; i > 0; i-- {
		t := &tiles[i]
		if 2*rows > t.rows && ceil(rows, t.rows)*ceil(columns, t.columns(mode))*matrices >= b.multiprocessors {
			return i
		}
	}
	return 0
}

func (l *lane) matmul(o *kernels.MatMul) error {
	if err := l.b.activation(o.Name(), "X", &o.X); err != nil {
		return err
	}
	rows, columns, inner := o.X.Shape[0], o.W.Shape[0], o.W.Shape[1]
	if rows == 0 || columns == 0 {
		return nil
	}
	same := o.W.DType == o.X.DType && inner%8 == 0 && aligned(&o.X, &o.W)
	if l.b.o.BatchInvariant && o.X.Stride[0]%8 != 0 {
		same = false // a row alone may be aligned where others are not
	}
	outFloat := o.Out.DType == kernels.F32
	if same && (columns <= mostFewColumns || !l.b.o.BatchInvariant && rows <= mostFewRows) {
		return l.few(o, outFloat)
	}
	if l.b.o.BatchInvariant && l.b.hopper && same && inner > 0 && (outFloat || columns%2 == 0 && paired(&o.Out)) {
		return l.dense(o, outFloat)
	}
	if !l.b.o.BatchInvariant && same && inner > 0 && columns%8 == 0 && aligned(&o.Out) && o.Out.Stride[0]%8 == 0 {
		done, err := l.libraryMatMul(o, outFloat)
		if done || err != nil {
			return err
		}
	}
	a := productArgs{
		x: address(&o.X), w: address(&o.W), bias: address(&o.Bias), out: address(&o.Out),
		xStride: int64(o.X.Stride[0]), outStride: int64(o.Out.Stride[0]),
		rows: int32(rows), columns: int32(columns), inner: int32(inner),
		wType: int32(o.W.DType), biasType: int32(o.Bias.DType), outFloat: truth(outFloat),
		xAligned: truth(aligned(&o.X)), wAligned: truth(inner%8 == 0 && aligned(&o.W)), outPaired: truth(paired(&o.Out)),
	}
	i := anyTile
	if same {
		i = l.b.chooseTile(denseMode, rows, columns, 1)
	}
	blocks := ceil(rows, tiles[i].rows) * ceil(columns, tiles[i].columns(denseMode))
	return l.product(o.Name(), denseMode, i, blocks, &a)
}

const (
	// mostFewColumns is up to how many columns few.cu takes products, routers and gates,
	// and mostFewRows up to how many rows.
	mostFewColumns, mostFewRows = 64, 8
	fewThreads                  = 512
	// fewStage is one stage of the rings of a block of few_rows: 64 bytes a thread.
	fewStage = 64 * fewThreads
)

// few enqueues a product with few columns, or few rows.
func (l *lane) few(o *kernels.MatMul, outFloat bool) error {
	rows, columns := o.X.Shape[0], o.W.Shape[0]
	var k kernelID
	var g grid
	switch {
	case !l.b.o.BatchInvariant && rows <= mostFewRows:
		k, g = fewRows2, grid{x: min(ceil(columns, 16), l.b.multiprocessors), shared: 2 * fewStage}
		if l.b.deep {
			k, g.shared = fewRows5, 5*fewStage
		}
	case columns <= 8:
		k, g = fewColumns8, grid{x: ceil(rows, 16)}
	default:
		k, g = fewColumns16, grid{x: ceil(rows, 16), y: ceil(columns, 16)}
		if g.y > 1 && g.x >= l.b.multiprocessors {
			k, g.y = fewColumns64, 1 // rows enough: each is read once
		}
	}
	g.threads = fewThreads
	return launch(l, o.Name(), k, g, &fewArgs{
		x: address(&o.X), w: address(&o.W), bias: address(&o.Bias), out: address(&o.Out),
		xStride: int64(o.X.Stride[0]), outStride: int64(o.Out.Stride[0]),
		rows: int32(rows), columns: int32(columns), inner: int32(o.W.Shape[1]), biasType: int32(o.Bias.DType), outFloat: truth(outFloat),
	})
}

// libraryMatMul enqueues a product through the library, or returns false. Its bias
// has to be of the type of Out.
func (l *lane) libraryMatMul(o *kernels.MatMul, outFloat bool) (bool, error) {
	p := &l.library
	*p = libraryProduct{
		x: o.X.Addr, w: o.W.Addr, out: o.Out.Addr,
		rows: o.X.Shape[0], columns: o.W.Shape[0], inner: o.W.Shape[1],
		xStride: o.X.Stride[0], outStride: o.Out.Stride[0], outFloat: outFloat,
	}
	after := false // the bias is added by a kernel of its own
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
	if !done || err != nil || !after {
		return done, err
	}
	return true, launch(l, o.Name(), addBias, byRow(p.rows, p.columns/8), &addBiasArgs{
		x: address(&o.Out), bias: address(&o.Bias), stride: int64(p.outStride),
		columns: int32(p.columns), biasType: int32(o.Bias.DType), aligned: truth(aligned(&o.Bias)),
	})
}

// paired says whether two neighbors of an even column lie in one aligned word.
func paired(t *kernels.Tensor) bool {
	return int(t.Addr)%(2*t.DType.Size()) == 0 && t.Stride[0]%2 == 0
}

func (l *lane) expertUp(o *kernels.ExpertUp) error {
	return l.experts(o.Name(), upMode, &o.ExpertGEMM)
}

func (l *lane) expertDown(o *kernels.ExpertDown) error {
	return l.experts(o.Name(), downMode, &o.ExpertGEMM)
}

// experts enqueues a product with the experts listed, in tiles that are chosen by what
// an expert has to do on average.
func (l *lane) experts(op string, mode kernelID, p *kernels.ExpertGEMM) error {
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
		return l.tiledExperts(op, mode, p)
	}
	columns, inner := p.Out.Shape[1], p.X.Shape[1]
	a := productArgs{
		x: address(&p.X), out: address(&p.Out), offsets: address(&p.Offsets), order: address(&p.Order), slots: address(&p.Slots), experts: address(&p.Experts),
		xStride: int64(p.X.Stride[0]), outStride: int64(p.Out.Stride[0]),
		columns: int32(columns), inner: int32(inner),
		listed: int32(listed), expertsAll: int32(all), topK: int32(pairs / max(p.X.Shape[0], 1)), wType: int32(p.Layout.DType),
		xAligned: truth(aligned(&p.X)), wAligned: truth(inner%8 == 0), outPaired: truth(paired(&p.Out)),
	}
	i := anyTile
	if p.Layout.DType == p.X.DType && inner%8 == 0 && aligned(&p.X) {
		i = l.b.chooseTile(mode, ceil(pairs, all), columns, listed)
	}
	t := &tiles[i]
	// The worst case: as many tiles as pairs fill, and one more for each expert.
	rows := min(pairs, pairs/t.rows+listed)
	if rows > math.MaxInt32/ceil(columns, t.columns(mode)) {
		rows = math.MaxInt32 // launch refuses it
	}
	return l.product(op, mode, i, rows*ceil(columns, t.columns(mode)), &a)
}
