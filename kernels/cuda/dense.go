package cuda

import (
	"fmt"
	"math"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// tensorMap tells the copy engine of a matrix of 16-bit numbers in device memory; what it
// holds is the runner's.
type tensorMap [16]uint64

// tileMap is what a tensorMap is made of: rows of so many elements (a multiple of 8) that
// start at multiples of 16 bytes, stride elements apart, of which a copy brings tileRows
// (256 at most) of 64 elements. What lies beyond the matrix comes as zeros.
type tileMap struct {
	at                              device.Addr
	rows, columns, stride, tileRows int
}

// denseShapes as they are instantiated in dense.cu, the most weight rows last.
var denseShapes = [...]expertShape{
	{1, 128, 1, 2, 256, 112 << 10},
	{2, 192, 1, 1, 384, 226 << 10},
	{4, 192, 1, 1, 384, 226 << 10},
}

// chooseDense returns the shape, and the tokens of a tile, for which a product should
// take the least time: rounds of tiles, each as long as its products or, at 64 bytes a
// cycle, its copies take, or, at 40 for each multiprocessor of the device, all copies
// (measured on one H200, see BenchmarkDense).
func (b *Backend) chooseDense(rows, columns int) (shape kernelID, tokens int) {
	best := 0
	for i := range denseShapes {
		e := &denseShapes[i]
		for parts := ceil(rows, e.most); parts <= ceil(rows, e.most)+2; parts++ {
			n := ceil(ceil(rows, parts), tokenStep) * tokenStep
			tiles := ceil(columns, e.units*unitRows) * ceil(rows, n)
			round := e.blocks * max(e.units*2*n, e.step(n)/64) // cycles of one step; blocks share a multiprocessor
			cost := max(ceil(tiles, e.blocks*b.multiprocessors)*round, tiles*e.step(n)/(40*b.multiprocessors))
			if best == 0 || cost < best {
				best, shape, tokens = cost, kernelID(i), n
			}
		}
	}
	return shape, tokens
}

// dense enqueues a product on Hopper's tensor cores. Both operands are of the
// activation type, their rows start at multiples of 16 bytes and have a multiple of 8
// elements; Out is float32, or has an even number of columns whose pairs are aligned.
func (l *lane) dense(o *kernels.MatMul, outFloat bool) error {
	shape, tokens := l.b.chooseDense(o.X.Shape[0], o.W.Shape[0])
	return l.denseIn(o, outFloat, shape, tokens)
}

// denseIn is dense in tiles of that shape and so many tokens.
func (l *lane) denseIn(o *kernels.MatMul, outFloat bool, shape kernelID, tokens int) error {
	rows, columns, inner := o.X.Shape[0], o.W.Shape[0], o.W.Shape[1]
	e := &denseShapes[shape]
	stages := min((e.shared-ringAlign)/e.step(tokens), mostStages)
	across := ceil(rows, tokens)
	tiles := ceil(columns, e.units*unitRows) * across
	a := denseArgs{
		bias: address(&o.Bias), out: address(&o.Out), outStride: int64(o.Out.Stride[0]),
		rows: int32(rows), columns: int32(columns), steps: int32(ceil(inner, tileStep)),
		biasType: int32(o.Bias.DType), outFloat: truth(outFloat),
		most: int32(tokens), stages: int32(stages), band: int32(l.b.band(e.units*unitRows, tokens, across)),
	}
	for i, m := range [...]tileMap{
		{o.W.Addr, columns, inner, rowStride(&o.W), e.units * unitRows},
		{o.X.Addr, rows, inner, rowStride(&o.X), tokens},
	} {
		l.tiles = m
		if err := l.b.run.mapTiles(&l.maps[i], &l.tiles); err != nil {
			return fmt.Errorf("cuda: %s: %w", o.Name(), err)
		}
	}
	a.w, a.x = l.maps[0], l.maps[1]
	g := grid{x: min(tiles, e.blocks*l.b.multiprocessors), threads: e.threads, shared: ringAlign + stages*e.step(tokens)}
	return launch(l, o.Name(), denseKernels+shape, g, &a)
}

// rowStride of a matrix; of one with a single row any would do.
func rowStride(t *kernels.Tensor) int {
	if t.Shape[0] == 1 {
		return t.Shape[1]
	}
	return t.Stride[0]
}

// band is into how many tiles of tokens at once a product of across such tiles is cut, so
// that blocks which run together read about as many weights as tokens.
func (b *Backend) band(weights, tokens, across int) int {
	most := max(1, int(math.Sqrt(float64(b.multiprocessors*weights)/float64(tokens))))
	return ceil(across, ceil(across, most))
}
