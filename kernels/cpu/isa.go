package cpu

import (
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// ISA names an instruction set.
type ISA string

// The instruction sets. Their results differ in rounding.
const (
	AVX512  ISA = "avx512"  // AVX-512 F, BW, DQ and VL
	AVX2    ISA = "avx2"    // AVX2, FMA and F16C
	Generic ISA = "generic" // portable Go
)

// ISAs returns the instruction sets that this machine and its operating system support, the
// fastest first. GODEBUG=cpu.avx512f=off hides AVX-512, and GODEBUG=cpu.avx2=off AVX2.
func ISAs() []ISA {
	var names []ISA
	for _, s := range available() {
		names = append(names, s.isa)
	}
	return names
}

// instructionsOf returns the arithmetic of an instruction set, or of the best
// where none is named.
func instructionsOf(isa ISA) *instructions {
	all := available()
	i := slices.IndexFunc(all, func(s *instructions) bool { return isa == "" || s.isa == isa })
	if i < 0 {
		panic(fmt.Sprintf("cpu: this machine has no instruction set %q: see ISAs", isa))
	}
	return all[i]
}

// available returns the sets of this machine, the fastest first.
func available() []*instructions { return append(vectorInstructions(), &generic) }

const (
	// panel is the number of weight rows of a tile: times its rows of x, as many sums as fit in
	// registers beside their operands.
	panel = 6
	// strip is the number of weight rows that are read from memory at once.
	strip = panel / 2
	// maxLanes and maxChunk are the maximum lanes and chunk of any set.
	maxLanes = 16
	maxChunk = 1024
)

// directFunc adds to sums[strip*r + c] the dot product of row r of x (one row, or some packed
// ones) and weight row c, at address w + c*stride bytes. It may write sums up to the next
// multiple of 8 as well. It prefetches the weights at next, which are read after these.
type directFunc func(sums, x []float32, w uintptr, stride int, next uintptr)

// packFunc packs n elements of strip weight rows, stride bytes apart from address w on, as half
// of a panel; next is as for a directFunc.
type packFunc func(dst *float32, w uintptr, stride int, next uintptr, n int)

// instructions is the arithmetic of an instruction set: nearly all of the backend's. Its
// functions keep one order of sums, for any number of rows.
//
// Rows are packed together in blocks: for each run of lanes elements, this run of the first
// row, of the second, and so on; in a block of the generic set, which has no lanes, rows follow
// one another. The last run is padded with zeros.
type instructions struct {
	isa ISA
	// lanes is the number of elements of a vector; 1 without vectors.
	lanes int
	// height is the number of rows of x of a tile.
	height int
	// chunk is the number of elements of a GEMM's inner dimension that are summed before their
	// sum is added to that of the others; a multiple of lanes.
	chunk int
	// tile adds to sums[panel*r + c] the dot product of row r of x and row c of w, for height
	// and panel packed rows of at most chunk elements.
	tile func(sums, x, w []float32)
	// direct multiplies with weights in place, for one row of x and for as many as a tile has.
	// nil if there is no such function.
	directF32, directBF16, directF16 [2]directFunc
	// pack packs whole panels of rows whose length is a multiple of lanes. nil if packed rows
	// follow one another.
	packF32, packBF16, packF16 packFunc
	// widen converts that many vectors of weights at src to float32; results are step bytes
	// apart.
	widenF32, widenBF16, widenF16 func(dst *float32, step int, src uintptr, vectors int)
	// tiles adds to sums, of which each has lanes parts, the products of rows of x with consecutive
	// tiles of one unit. addTiles adds up the parts of each, adds that to to, and clears the parts: see
	// tiledLoop.sums.
	tilesBF16, tilesF16 func(sums, x *float32, stride int, w uintptr, rows, blocks, steps int)
	addTiles            func(to, sums *float32, n int)
	// weightedSum adds to out the sum of p[j] times the row at address rows[j], in
	// order. len(out) is a multiple of lanes.
	weightedSum func(out, p []float32, rows []uint64)
	// expSum replaces x[i] by e^(x[i] - shift), and returns the sum. len(x) is a
	// multiple of lanes.
	expSum func(x []float32, shift float32) float32
	// siluMul sets out[i] to silu(gate[i]) * up[i]. len(out) is a multiple of lanes.
	siluMul func(out, gate, up []float32)
}

// padded returns n rounded up to whole vectors.
func (s *instructions) padded(n int) int { return (n + s.lanes - 1) / s.lanes * s.lanes }

// direct returns the directFunc for x of n rows, at most s.height, or nil.
func (s *instructions) direct(t kernels.DType, n int) directFunc {
	of := &s.directF32
	switch t {
	case kernels.BF16:
		of = &s.directBF16
	case kernels.F16:
		of = &s.directF16
	}
	return of[min(n-1, 1)]
}

// load converts len(dst) weights of type t at address a to float32.
func (s *instructions) load(dst []float32, a device.Addr, t kernels.DType) {
	if s.lanes > 1 && len(dst) >= s.lanes {
		n := len(dst) / s.lanes
		s.widen(&dst[0], 4*s.lanes, a, t, n)
		dst, a = dst[n*s.lanes:], a+device.Addr(n*s.lanes*t.Size())
	}
	load(dst, a, t)
}

func (s *instructions) widen(dst *float32, step int, a device.Addr, t kernels.DType, vectors int) {
	switch t {
	case kernels.F32:
		s.widenF32(dst, step, uintptr(a), vectors)
	case kernels.BF16:
		s.widenBF16(dst, step, uintptr(a), vectors)
	case kernels.F16:
		s.widenF16(dst, step, uintptr(a), vectors)
	default:
		panic(fmt.Sprintf("cpu: weights of type %v", t)) // Check lets none through
	}
}

// packPanel packs n elements, from column k on, of panel rows of m from first on; the last row
// is repeated at the end of m.
func (s *instructions) packPanel(block []float32, m matrix, first, k, n int, next device.Addr) {
	if s.lanes > 1 && n%s.lanes == 0 && m.rows >= panel {
		pack := s.packF32
		switch m.dtype {
		case kernels.BF16:
			pack = s.packBF16
		case kernels.F16:
			pack = s.packF16
		}
		stride := m.pitch()
		for half := range panel / strip {
			pack(&block[half*strip*s.lanes], uintptr(m.at(first+half*strip, k)), stride, uintptr(next)+uintptr(half*strip*stride), n)
		}
		return
	}
	for c := range panel {
		s.pack(block, c, panel, m.at(min(first+c, m.rows-1), k), m.dtype, n)
	}
}

// pack packs n elements of type t at address a as row r of a block of that many rows.
func (s *instructions) pack(block []float32, r, rows int, a device.Addr, t kernels.DType, n int) {
	if s.lanes == 1 {
		load(block[r*n:][:n], a, t)
		return
	}
	full := n / s.lanes
	if full > 0 {
		s.widen(&block[r*s.lanes], 4*rows*s.lanes, a, t, full)
	}
	if rest := n - full*s.lanes; rest > 0 {
		last := block[(full*rows+r)*s.lanes:][:s.lanes]
		load(last[:rest], a+device.Addr(full*s.lanes*t.Size()), t)
		clear(last[rest:])
	}
}

// addWeighted is weightedSum for any length of out.
func (s *instructions) addWeighted(out, p []float32, rows []uint64) {
	whole := len(out) - len(out)%s.lanes
	if whole > 0 {
		s.weightedSum(out[:whole], p, rows)
	}
	if whole < len(out) {
		weightedSumFrom(out[whole:], p, rows, whole)
	}
}

// exponentials is expSum for any length of x. pad has maxLanes elements.
func (s *instructions) exponentials(x []float32, shift float32, pad []float32) float32 {
	rest := len(x) % s.lanes
	sum := s.expSum(x[:len(x)-rest], shift)
	if rest > 0 {
		pad = pad[:s.lanes]
		n := copy(pad, x[len(x)-rest:])
		for i := range pad[n:] {
			pad[n+i] = negativeInfinity // whose exponential is 0
		}
		sum += s.expSum(pad, shift)
		copy(x[len(x)-rest:], pad)
	}
	return sum
}

// gated is siluMul for any length of out. pad has 2*maxLanes elements.
func (s *instructions) gated(out, gate, up, pad []float32) {
	rest := len(out) % s.lanes
	whole := len(out) - rest
	s.siluMul(out[:whole], gate[:whole], up[:whole])
	if rest > 0 {
		g, u := pad[:s.lanes], pad[maxLanes:][:s.lanes]
		clear(pad)
		copy(g, gate[whole:])
		copy(u, up[whole:])
		s.siluMul(g, g, u)
		copy(out[whole:], g)
	}
}
