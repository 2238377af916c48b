package cpu

import "math"

const (
	// panel is how many weight rows a product takes at once: as many sums as
	// registers hold beside their operands.
	panel = 6
	// sumChunk is how many elements of the inner dimension one sum takes in order.
	// It fixes results: see the package comment.
	sumChunk = 256
)

// The functions below hold nearly all arithmetic of the backend.

// dot1 adds to acc[c] the product of x, of at most sumChunk elements, and row c
// of w; rows of w begin stride elements apart.
func dot1(acc *[panel]float32, x, w []float32, stride int) {
	n := len(x)
	w0, w1, w2 := w[:n], w[stride:][:n], w[2*stride:][:n]
	w3, w4, w5 := w[3*stride:][:n], w[4*stride:][:n], w[5*stride:][:n]
	var a, b, c, d, e, f float32
	for i, v := range x {
		a += float32(v * w0[i])
		b += float32(v * w1[i])
		c += float32(v * w2[i])
		d += float32(v * w3[i])
		e += float32(v * w4[i])
		f += float32(v * w5[i])
	}
	acc[0] += a
	acc[1] += b
	acc[2] += c
	acc[3] += d
	acc[4] += e
	acc[5] += f
}

// dot1BF16 does what dot1 does with bfloat16 weights: converting them on the way
// is faster than beforehand where one row uses them.
func dot1BF16(acc *[panel]float32, x []float32, w []uint16, stride int) {
	n := len(x)
	w0, w1, w2 := w[:n], w[stride:][:n], w[2*stride:][:n]
	w3, w4, w5 := w[3*stride:][:n], w[4*stride:][:n], w[5*stride:][:n]
	var a, b, c, d, e, f float32
	for i, v := range x {
		a += float32(v * bf16(w0[i]))
		b += float32(v * bf16(w1[i]))
		c += float32(v * bf16(w2[i]))
		d += float32(v * bf16(w3[i]))
		e += float32(v * bf16(w4[i]))
		f += float32(v * bf16(w5[i]))
	}
	acc[0] += a
	acc[1] += b
	acc[2] += c
	acc[3] += d
	acc[4] += e
	acc[5] += f
}

func bf16(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }

// dot2 does what dot1 does for two rows x and y of the same length.
func dot2(accX, accY *[panel]float32, x, y, w []float32, stride int) {
	n := len(x)
	y = y[:n]
	for j := 0; j < panel; j += 3 {
		w0, w1, w2 := w[j*stride:][:n], w[(j+1)*stride:][:n], w[(j+2)*stride:][:n]
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
		accX[j] += a
		accX[j+1] += b
		accX[j+2] += c
		accY[j] += d
		accY[j+1] += e
		accY[j+2] += f
	}
}

// axpy4 adds p[0] v0, then p[1] v1, p[2] v2 and p[3] v3, to out.
func axpy4(out []float32, p *[4]float32, v0, v1, v2, v3 []float32) {
	n := len(out)
	v0, v1, v2, v3 = v0[:n], v1[:n], v2[:n], v3[:n]
	a, b, c, d := p[0], p[1], p[2], p[3]
	for i := range out {
		s := out[i] + float32(a*v0[i])
		s += float32(b * v1[i])
		s += float32(c * v2[i])
		out[i] = s + float32(d*v3[i])
	}
}

// axpy adds p v to out.
func axpy(out []float32, p float32, v []float32) {
	v = v[:len(out)]
	for i := range out {
		out[i] += float32(p * v[i])
	}
}

// dots sets acc[r] to the products of rows(r), for all r, and the panel rows of
// w, all of n elements.
func dots(acc [][panel]float32, rows func(r int) []float32, w []float32, stride, n int) {
	clear(acc)
	addDots(acc, rows, 0, w, stride, n)
}

// addDots adds to acc[r] the products of elements [from, from+n) of rows(r) and
// the panel rows of w.
func addDots(acc [][panel]float32, rows func(r int) []float32, from int, w []float32, stride, n int) {
	r := 0
	for ; r+1 < len(acc); r += 2 {
		x, y := rows(r)[from:][:n], rows(r + 1)[from:][:n]
		for i := 0; i < n; i += sumChunk {
			to := min(i+sumChunk, n)
			dot2(&acc[r], &acc[r+1], x[i:to], y[i:to], w[i:], stride)
		}
	}
	if r < len(acc) {
		x := rows(r)[from:][:n]
		for i := 0; i < n; i += sumChunk {
			to := min(i+sumChunk, n)
			dot1(&acc[r], x[i:to], w[i:], stride)
		}
	}
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

func exp(x float32) float32 { return float32(math.Exp(float64(x))) }

func sigmoid(x float32) float32 { return 1 / (1 + exp(-x)) }

// silu rounds once, as it is computed in float64.
func silu(x float32) float32 {
	return float32(float64(x) / (1 + math.Exp(-float64(x))))
}
