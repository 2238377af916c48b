package cuda

import (
	"fmt"
	"math"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// tensorMap is a TMA descriptor (CUtensorMap) of a matrix of 16-bit elements in device memory,
// in the runner's encoding.
type tensorMap [16]uint64

// tileMap has the parameters of a tensorMap: rows of columns elements (a multiple of 8) that
// start at multiples of 16 bytes, stride elements apart. A TMA copy loads tileRows rows (at
// most 256) of 64 elements; elements outside of the matrix are zeros.
type tileMap struct {
	at                              device.Addr
	rows, columns, stride, tileRows int
}

// denseShapes are the instantiations in dense.cu, in ascending order of weight rows.
var denseShapes = [...]expertShape{
	{1, 128, 1, 2, 256, 112 << 10},
	{2, 192, 1, 1, 384, 226 << 10},
	{4, 192, 1, 1, 384, 226 << 10},
}

// chooseHopperTile returns the kernel, and the tokens of a tile, with the shortest estimated
// time: the number of waves of tiles times the longest of a tile's MMAs, its loads at 64 bytes
// per cycle, and all loads of the device at 40 bytes per cycle and multiprocessor (measured on
// one H200, see BenchmarkDense).
func (b *Backend) chooseHopperTile(rows, columns int) (shape kernelID, tokens int) {
	best := 0
	for i := range denseShapes {
		e := &denseShapes[i]
		for parts := ceil(rows, e.maxTokens); parts <= ceil(rows, e.maxTokens)+2; parts++ {
			n := ceil(ceil(rows, parts), tokenStep) * tokenStep
			tiles := ceil(columns, e.units*unitRows) * ceil(rows, n)
			round := e.blocks * max(e.units*2*n, e.step(n)/64) // cycles of one k-step; blocks share a multiprocessor
			cost := max(ceil(tiles, e.blocks*b.multiprocessors)*round, tiles*e.step(n)/(40*b.multiprocessors))
			if best == 0 || cost < best {
				best, shape, tokens = cost, kernelID(i), n
			}
		}
	}
	return shape, tokens
}

// hopperGEMM enqueues a dense GEMM on Hopper's tensor cores. Both operands have the activation
// type, their rows start at multiples of 16 bytes and have a multiple of 8 elements. Out is
// float32, or has an even number of columns with aligned pairs.
func (l *streamState) hopperGEMM(o *kernels.MatMul, outFloat bool) error {
	shape, tokens := l.b.chooseHopperTile(o.X.Shape[0], o.W.Shape[0])
	return l.hopperGEMMTiled(o, outFloat, shape, tokens)
}

// hopperGEMMTiled is hopperGEMM with the given kernel and tokens per tile.
func (l *streamState) hopperGEMMTiled(o *kernels.MatMul, outFloat bool, shape kernelID, tokens int) error {
	rows, columns, inner := o.X.Shape[0], o.W.Shape[0], o.W.Shape[1]
	e := &denseShapes[shape]
	stages := min((e.shared-ringAlign)/e.step(tokens), maxStages)
	across := ceil(rows, tokens)
	tiles := ceil(columns, e.units*unitRows) * across
	a := denseArgs{
		bias: address(&o.Bias), out: address(&o.Out), outStride: int64(o.Out.Stride[0]),
		rows: int32(rows), columns: int32(columns), steps: int32(ceil(inner, tileStep)),
		biasType: int32(o.Bias.DType), outFloat: b2i(outFloat),
		maxTokens: int32(tokens), stages: int32(stages), swizzle: int32(l.b.swizzle(e.units*unitRows, tokens, across)),
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

// rowStride is the stride of a matrix; that of a matrix with a single row does not matter.
func rowStride(t *kernels.Tensor) int {
	if t.Shape[0] == 1 {
		return t.Shape[1]
	}
	return t.Stride[0]
}

// swizzle returns the token tiles per band of the tile rasterization, out of across, for which
// blocks that run concurrently read about as many bytes of weights as of tokens.
func (b *Backend) swizzle(weights, tokens, across int) int {
	most := max(1, int(math.Sqrt(float64(b.multiprocessors*weights)/float64(tokens))))
	return ceil(across, ceil(across, most))
}
