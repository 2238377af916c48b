package cpu

import (
	"math"
	"unsafe"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// sumChunk is the number of elements that the generic set, and norms on all sets, sum in order
// before their sum is added to that of the others.
const sumChunk = 256

// generic is arithmetic in portable Go. Products are rounded before they are added, so that no
// compiler fuses them: every machine gives the same results.
var generic = instructions{
	isa:        Generic,
	lanes:      1,
	height:     2,
	chunk:      sumChunk,
	tile:       tileGeneric,
	directF32:  [2]directFunc{directF32Generic, nil},
	directBF16: [2]directFunc{directBF16Generic, nil},
	tilesBF16: func(sums, x *float32, stride int, w uintptr, rows, blocks, steps int) {
		tilesGeneric(sums, x, stride, w, rows, blocks, steps, bf16)
	},
	tilesF16: func(sums, x *float32, stride int, w uintptr, rows, blocks, steps int) {
		tilesGeneric(sums, x, stride, w, rows, blocks, steps, half)
	},
	addTiles:    addTilesGeneric,
	weightedSum: func(out, p []float32, rows []uint64) { weightedSumFrom(out, p, rows, 0) },
	expSum:      expSumGeneric,
	siluMul:     siluMulGeneric,
}

func tileGeneric(sums, x, w []float32) {
	n := len(w) / panel
	x, y := x[:n], x[n:2*n]
	for j := 0; j < panel; j += 3 {
		w0, w1, w2 := w[j*n:][:n], w[(j+1)*n:][:n], w[(j+2)*n:][:n]
		var a, b, c, d, e, f float32
		for i, v := range x {
			u := y[i]
			p := w0[i]
			a += float32(v * p)
			d += float32(u * p)
			p = w1[i]
			b += float32(v * p)
			e += float32(u * p)
			p = w2[i]
			c += float32(v * p)
			f += float32(u * p)
		}
		to := (*[panel + 3]float32)(sums[j:])
		to[0] += a
		to[1] += b
		to[2] += c
		to[panel] += d
		to[panel+1] += e
		to[panel+2] += f
	}
}

func directF32Generic(sums, x []float32, w uintptr, stride int, _ uintptr) {
	stride /= 4
	n := len(x)
	all := at[float32](device.Addr(w), (strip-1)*stride+n)
	w0, w1, w2 := all[:n], all[stride:][:n], all[2*stride:][:n]
	var a, b, c float32
	for i, v := range x {
		a += float32(v * w0[i])
		b += float32(v * w1[i])
		c += float32(v * w2[i])
	}
	to := (*[strip]float32)(sums)
	to[0] += a
	to[1] += b
	to[2] += c
}

func directBF16Generic(sums, x []float32, w uintptr, stride int, _ uintptr) {
	stride /= 2
	n := len(x)
	all := at[uint16](device.Addr(w), (strip-1)*stride+n)
	w0, w1, w2 := all[:n], all[stride:][:n], all[2*stride:][:n]
	var a, b, c float32
	for i, v := range x {
		a += float32(v * bf16(w0[i]))
		b += float32(v * bf16(w1[i]))
		c += float32(v * bf16(w2[i]))
	}
	to := (*[strip]float32)(sums)
	to[0] += a
	to[1] += b
	to[2] += c
}

func tilesGeneric(sums, x *float32, stride int, w uintptr, rows, blocks, steps int, widen func(uint16) float32) {
	to := unsafe.Slice(sums, blocks*tileTurns*rows)
	xs := unsafe.Slice(x, (rows-1)*stride/4+steps*kernels.TileColumns)
	for s := range steps {
		for j := range blocks * tileTurns {
			line := at[uint16](device.Addr(w)+device.Addr(s*tileBytes+j*kernels.TileRowBytes), kernels.TileColumns)
			for r := range rows {
				x := xs[r*stride/4+s*kernels.TileColumns:][:kernels.TileColumns]
				sum := to[j*rows+r]
				for i, v := range x {
					sum += float32(v * widen(line[i^j%tileTurns*8]))
				}
				to[j*rows+r] = sum
			}
		}
	}
}

func addTilesGeneric(to, sums *float32, n int) {
	out, s := unsafe.Slice(to, n), unsafe.Slice(sums, n)
	add(out, s)
	clear(s)
}

func bf16(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }

// weightedSumFrom adds to out the sum of p[j] times len(out) elements, from one
// on, of the row at address rows[j].
func weightedSumFrom(out, p []float32, rows []uint64, from int) {
	rows = rows[:len(p)]
	i := 0
	for ; i+4 <= len(out); i += 4 {
		var a, b, c, d float32
		for j, w := range p {
			r := (*[4]float32)(at[float32](device.Addr(rows[j])+device.Addr(4*(from+i)), 4))
			a += float32(w * r[0])
			b += float32(w * r[1])
			c += float32(w * r[2])
			d += float32(w * r[3])
		}
		to := (*[4]float32)(out[i:])
		to[0] += a
		to[1] += b
		to[2] += c
		to[3] += d
	}
	for ; i < len(out); i++ {
		var a float32
		for j, w := range p {
			a += float32(w * at[float32](device.Addr(rows[j])+device.Addr(4*(from+i)), 1)[0])
		}
		out[i] += a
	}
}

func expSumGeneric(x []float32, shift float32) float32 {
	var s float32
	for i, v := range x {
		v = exp(v - shift)
		x[i] = v
		s += v
	}
	return s
}

func siluMulGeneric(out, gate, up []float32) {
	for i, g := range gate[:len(out)] {
		out[i] = silu(g) * up[i]
	}
}

var negativeInfinity = float32(math.Inf(-1))

func exp(x float32) float32 { return float32(math.Exp(float64(x))) }

func sigmoid(x float32) float32 { return 1 / (1 + exp(-x)) }

// silu rounds once, as it is computed in float64.
func silu(x float32) float32 {
	return float32(float64(x) / (1 + math.Exp(-float64(x))))
}

// sum adds up f(x[i]) in runs, each in order.
func sum(x []float32, f func(float32) float32) float32 {
	var total float32
	for len(x) > 0 {
		n := min(len(x), sumChunk)
		var s float32
		for _, v := range x[:n] {
			s += f(v)
		}
		total += s
		x = x[n:]
	}
	return total
}
