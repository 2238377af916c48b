package philox

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"

	"github.com/moeserve/moeserve/kernels"
)

// The uses differ in the counter's last word.
const (
	domainGumbel = 1
	domainDummy  = 2
)

// Block is one block of Philox4x32-10.
func Block(counter [4]uint32, key [2]uint32) [4]uint32 {
	const (
		m0, m1 = 0xd2511f53, 0xcd9e8d57 // multipliers
		w0, w1 = 0x9e3779b9, 0xbb67ae85 // what the key grows by each round
	)
	c0, c1, c2, c3 := counter[0], counter[1], counter[2], counter[3]
	k0, k1 := key[0], key[1]
	for range 10 {
		p0, p1 := m0*uint64(c0), m1*uint64(c2)
		c0, c1, c2, c3 = uint32(p1>>32)^c1^k0, uint32(p1), uint32(p0>>32)^c3^k1, uint32(p0)
		k0 += w0
		k1 += w1
	}
	return [4]uint32{c0, c1, c2, c3}
}

// GumbelBlock returns the variates of tokens 4*block to 4*block+3: see Gumbel.
func GumbelBlock(seed uint64, sample, position, block int32) [4]float32 {
	r := Block([4]uint32{uint32(block), uint32(position), uint32(sample), domainGumbel}, [2]uint32{uint32(seed), uint32(seed >> 32)})
	return [4]float32{gumbel(r[0]), gumbel(r[1]), gumbel(r[2]), gumbel(r[3])}
}

// Gumbel is the standard Gumbel variate that Sample adds to a token's
// logit: word token%4 of the Philox block with key (low, high half of seed) and
// counter (token/4, position, sample, 1), mapped as follows, in float32, every
// single operation (+, -, *, /, conversion) rounded to nearest and none fused,
// so that all backends get the same bits.
//
//   - An exponential variate E = -ln(1 - t) of t = w / 2^32, w with its lowest
//     bit set and converted to float32: for w < 2^31 with y = 1 - t,
//     E = -(ln y - ((y - 1) + t) / y); else E = -ln((^w | 1) / 2^32).
//   - The variate is -ln E.
//   - ln x, x = m 2^k with m in [0.70710677, 1.4142135): with s = (m-1) / (m+1)
//     and z = s*s, P = 2/3 + z (2/5 + z (2/7 + z (2/9 + z 2/11))) (the series of
//     2 artanh s), ln x = k*hi + (2s + (s*z*P + k*lo)), hi = 0.693359375,
//     lo = -2.12194442e-4 (ln 2 in two parts, k*hi exact).
//
// Small E, which decide what is drawn, have a resolution of 2^-31. The values
// lie in [-3.11, 22.19].
func Gumbel(seed uint64, sample, position, token int32) float32 {
	return GumbelBlock(seed, sample, position, token>>2)[token&3]
}

func gumbel(w uint32) float32 {
	const scale = 1.0 / (1 << 32)
	var e float32
	if w < 1<<31 {
		t := float32(w|1) * scale
		y := 1 - t
		d := float32(float32(y-1) + t)
		e = -(ln(y) - float32(d/y))
	} else {
		e = -ln(float32(^w|1) * scale)
	}
	return -ln(e)
}

// ln is the natural logarithm of a normal positive x, within 2 units in the last
// place, with the operations that Gumbel lists. The conversions keep
// compilers from contracting multiplications and additions to FMA.
func ln(x float32) float32 {
	const (
		hi = 0.693359375
		lo = -2.12194442e-4
	)
	b := math.Float32bits(x)
	k := int32(b>>23) - 127
	b = b&0x7fffff | 127<<23
	if b > 0x3fb504f2 { // m would be sqrt(2) or more
		b -= 1 << 23
		k++
	}
	m := math.Float32frombits(b)
	s := (m - 1) / (m + 1)
	z := float32(s * s)
	p := float32(2.0/9) + float32(z*float32(2.0/11))
	p = float32(2.0/7) + float32(z*p)
	p = float32(2.0/5) + float32(z*p)
	p = float32(2.0/3) + float32(z*p)
	fk := float32(k)
	tail := float32(float32(s*z)*p) + float32(fk*lo)
	return float32(fk*hi) + (float32(2*s) + tail)
}

// dummyKey is the generator's key for a tensor's dummy weights: the FNV-1a hash
// of its name (64 bit), xor seed times 0x9e3779b97f4a7c15, put through the
// finalizer of SplitMix64.
func dummyKey(seed uint64, tensor string) uint64 {
	h := uint64(0xcbf29ce484222325)
	for i := range len(tensor) {
		h = (h ^ uint64(tensor[i])) * 0x100000001b3
	}
	h ^= seed * 0x9e3779b97f4a7c15
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}

// dummyExponents are the exponents that FillDummy takes for a type: those whose
// every value the type holds exactly.
func dummyExponents(t kernels.DType) (lowest, highest int) {
	if t == kernels.F16 {
		return -8, 24
	}
	return -100, 126
}

// FillDummy fills dst with elements [first, first + len(dst)/size) of a tensor's
// dummy weights: integers of [-128, 127], evenly distributed, times 2^-exponent
// (standard deviation 73.9 * 2^-exponent), exact in all of F32, BF16 and F16.
// Element e is byte e%16 (words and bytes in rising order) of the Philox block
// with dummyKey's halves as key (low, high) and counter (low and high half of
// e/16, 0, 2), as int8. So it does not matter how a tensor is cut into pieces,
// and several goroutines may fill its parts. It panics for a type or exponent it
// does not take, and for bytes that are no whole number of elements.
func FillDummy(dst []byte, t kernels.DType, seed uint64, tensor string, first int64, exponent int) {
	switch t {
	case kernels.F32, kernels.BF16, kernels.F16:
	default:
		panic(fmt.Sprintf("philox: dummy weights of type %d, want float32, bfloat16 or float16", t))
	}
	if lo, hi := dummyExponents(t); exponent < lo || exponent > hi {
		panic(fmt.Sprintf("philox: dummy weights of %v with exponent %d, want %d to %d", t, exponent, lo, hi))
	}
	size := t.Size()
	if len(dst)%size != 0 || first < 0 {
		panic(fmt.Sprintf("philox: dummy weights of %v in %d bytes from element %d", t, len(dst), first))
	}
	var table [256]uint32 // the element's bits by its random byte
	for i := range table {
		f := float32(math.Ldexp(float64(int8(i)), -exponent))
		switch t {
		case kernels.F32:
			table[i] = math.Float32bits(f)
		case kernels.BF16:
			table[i] = uint32(kernels.ToBF16(f))
		case kernels.F16:
			table[i] = uint32(kernels.ToF16(f))
		}
	}
	k := dummyKey(seed, tensor)
	key := [2]uint32{uint32(k), uint32(k >> 32)}
	block := uint64(first) / 16
	skip := int(first%16) * size
	var edge [64]byte // a block that dst holds only a part of
	for len(dst) > 0 {
		r := Block([4]uint32{uint32(block), uint32(block >> 32), 0, domainDummy}, key)
		block++
		if skip == 0 && len(dst) >= 16*size {
			putDummy(dst, size, &table, &r)
			dst = dst[16*size:]
			continue
		}
		putDummy(edge[:], size, &table, &r)
		n := copy(dst, edge[skip:16*size])
		dst, skip = dst[n:], 0
	}
}

// putDummy writes one block's 16 elements.
func putDummy(dst []byte, size int, table *[256]uint32, r *[4]uint32) {
	if size == 2 {
		dst = dst[:32]
		for i, w := range r {
			lo := table[w&255] | table[w>>8&255]<<16
			hi := table[w>>16&255] | table[w>>24]<<16
			binary.LittleEndian.PutUint64(dst[8*i:], uint64(hi)<<32|uint64(lo))
		}
		return
	}
	dst = dst[:64]
	for i, w := range r {
		for j := range 4 {
			binary.LittleEndian.PutUint32(dst[16*i+4*j:], table[bits.RotateLeft32(w, -8*j)&255])
		}
	}
}
