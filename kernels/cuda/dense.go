package cuda

import "github.com/moeserve/moeserve/kernels"

type denseArgs struct {
	x, w, bias, out               uint64
	xStride, outStride            int64
	rows, columns, inner          int32
	biasType, outFloat, outPaired int32
	most, stages                  int32
}

// denseShapes as they are instantiated in dense.cu, the most weight rows last.
var denseShapes = [...]expertShape{
	{1, 64, 1, 2, 256, 112 << 10},
	{2, 192, 1, 1, 384, 226 << 10},
	{4, 128, 1, 1, 384, 226 << 10},
}

// chooseDense returns the shape, and the tokens of a tile, for which a product should
// take the least time: rounds of tiles, each as long as its products or, at some 40
// bytes a cycle, its copies take.
func (b *Backend) chooseDense(rows, columns int) (shape kernelID, tokens int) {
	best := 0
	for i := range denseShapes {
		e := &denseShapes[i]
		for parts := ceil(rows, e.most); parts <= ceil(rows, e.most)+2; parts++ {
			n := ceil(ceil(rows, parts), tokenStep) * tokenStep
			tiles := ceil(columns, e.units*unitRows) * ceil(rows, n)
			cycles := max(e.units*2*n, (e.units*unitRows+n)*tileRow/40) // of one step
			if cost := ceil(tiles, b.multiprocessors) * cycles; best == 0 || cost < best {
				best, shape, tokens = cost, kernelID(i), n
			}
		}
	}
	return shape, tokens
}

// dense enqueues a product on Hopper's tensor cores. Both operands are of the
// activation type, their rows start at multiples of 16 bytes and have a multiple of 8
// elements.
func (b *Backend) dense(l *lane, o *kernels.MatMul, outFloat bool) error {
	rows, columns := o.X.Shape[0], o.W.Shape[0]
	shape, tokens := b.chooseDense(rows, columns)
	e := &denseShapes[shape]
	stages := min((e.shared-ringAlign)/e.step(tokens), mostStages)
	tiles := ceil(columns, e.units*unitRows) * ceil(rows, tokens)
	g := grid{x: min(tiles, e.blocks*b.multiprocessors), threads: e.threads, shared: ringAlign + stages*e.step(tokens)}
	return launch(b, l, o.Name(), denseKernels+shape, g, &denseArgs{
		x: address(&o.X), w: address(&o.W), bias: address(&o.Bias), out: address(&o.Out),
		xStride: int64(o.X.Stride[0]), outStride: int64(o.Out.Stride[0]),
		rows: int32(rows), columns: int32(columns), inner: int32(o.W.Shape[1]),
		biasType: int32(o.Bias.DType), outFloat: truth(outFloat), outPaired: truth(paired(&o.Out)),
		most: int32(tokens), stages: int32(stages),
	})
}
