//go:build unix

package cpu

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// edge returns n bytes that end where no more may be read.
func edge(t testing.TB, n int) []byte {
	t.Helper()
	page := unix.Getpagesize()
	size := (n + page - 1) / page * page
	all, err := unix.Mmap(-1, 0, size+page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(all) })
	if err := unix.Mprotect(all[size:], unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	return all[size-n : size : size]
}

func addressOf(b []byte) device.Addr {
	return device.Addr(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
}

// floatsOf returns values in memory that ends behind them.
func floatsOf(t testing.TB, values []float32) []float32 {
	t.Helper()
	b := edge(t, 4*len(values))
	kernels.FromFloat32(b, values, kernels.F32)
	return at[float32](addressOf(b), len(values))
}

func random(r *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	return x
}

func eachSet(t *testing.T, run func(t *testing.T, s *instructions)) {
	for _, s := range available() {
		t.Run(string(s.isa), func(t *testing.T) { run(t, s) })
	}
}

// TestISAs holds the choice to what there is: the best set first, the generic one
// always last, and a panic for what is missing.
func TestISAs(t *testing.T) {
	all := ISAs()
	order := []ISA{AVX512, AVX2, Generic}
	if all[len(all)-1] != Generic || !slices.IsSortedFunc(all, func(a, b ISA) int {
		return slices.Index(order, a) - slices.Index(order, b)
	}) {
		t.Errorf("ISAs are %v", all)
	}
	for _, isa := range append(all, "") {
		b := New(Options{Threads: 1, ISA: isa})
		want := isa
		if isa == "" {
			want = all[0]
		}
		if got := b.ISA(); got != want {
			t.Errorf("a backend of %q has %q", isa, got)
		}
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	}
	defer func() {
		if r := recover(); r == nil || !strings.Contains(fmt.Sprint(r), `no instruction set "sse"`) {
			t.Errorf("an unknown set gives %v", r)
		}
	}()
	New(Options{Threads: 1, ISA: "sse"})
}

// FuzzProduct multiplies matrices of any shape, at any address, on every set: the
// sums must be right, and a row's must be the same, bit for bit, alone and among
// others, and with a second matrix beside the first.
func FuzzProduct(f *testing.F) {
	for _, c := range [][3]int{
		{1, 1, 1},
		{2, 7, 3},
		{3, 16, 5},
		{4, 17, 6},
		{5, 31, 7},
		{8, 1024, 12},
		{9, 1040, 13},
		{16, 1025, 11},
		{1, 4096, 97},
		{17, 2064, 100},
		{129, 48, 9},
		{131, 33, 2},
		{6, 1056, 192},
	} {
		f.Add(uint8(c[0]-1), uint16(c[1]-1), uint8(c[2]-1), uint8(c[2]), uint64(c[1]))
	}
	f.Fuzz(func(t *testing.T, n uint8, columns uint16, out, dtype uint8, seed uint64) {
		rows, inner, outer := int(n)%140+1, int(columns)%4200+1, int(out)%200+1
		if rows*inner*outer > 1<<21 {
			outer = max(1<<21/(rows*inner), 1)
		}
		types := [...]kernels.DType{kernels.BF16, kernels.F16, kernels.F32}
		r := rand.New(rand.NewPCG(seed, 3))
		w := matrix{dtype: types[dtype%3], rows: outer, columns: inner, apart: inner}
		data := edge(t, outer*w.pitch())
		kernels.FromFloat32(data, random(r, outer*inner), w.dtype)
		weights := make([]float32, outer*inner)
		kernels.ToFloat32(weights, data, w.dtype)
		w.addr = addressOf(data)
		x := floatsOf(t, random(r, rows*inner))
		for _, s := range available() {
			pool := newPool(1, s, 0)
			multiply := func(from, to int, v matrix) []float32 {
				y := make([]float32, (to-from)*outer)
				p := gemm{
					w: w, v: v, n: to - from,
					in: func(r int) device.Addr { return device.Addr(uintptr(unsafe.Pointer(&x[(from+r)*inner]))) },
					out: func(r, first int, sums, sums2 []float32) {
						if v.rows > 0 && !slices.Equal(sums, sums2) {
							t.Errorf("%s: row %d from weight row %d on: sums of one matrix twice are %v and %v", s.isa, r, first, sums, sums2)
						}
						copy(y[r*outer+first:][:len(sums)], sums)
					},
				}
				pool.parallel(p.parts(s), func(part int) { p.part(pool, part) })
				return y
			}
			got := multiply(0, rows, matrix{})
			for i := range rows {
				for c := range outer {
					want, size := 0.0, 0.0
					for k := range inner {
						v := float64(x[i*inner+k]) * float64(weights[c*inner+k])
						want += v
						size += math.Abs(v)
					}
					// The error of a sum grows with its length at most; a chunk of the generic
					// set is the longest run.
					if d := math.Abs(float64(got[i*outer+c]) - want); !(d <= size*(sumChunk+32)*0x1p-24) {
						t.Fatalf("%s: row %d, column %d of [%d %d] x [%d %d] %v is %g, want %g", s.isa, i, c, rows, inner, outer, inner, w.dtype, got[i*outer+c], want)
					}
				}
			}
			cut := 1 + r.IntN(rows)
			parts := slices.Concat(multiply(0, cut, w), multiply(cut, rows, matrix{}))
			if !slices.Equal(parts, got) {
				t.Fatalf("%s: [%d %d] x [%d %d] %v in rows up to %d and behind is not what it is at once, bit for bit", s.isa, rows, inner, outer, inner, w.dtype, cut)
			}
			if one := multiply(rows-1, rows, w); !slices.Equal(one, got[(rows-1)*outer:]) {
				t.Fatalf("%s: the last row of [%d %d] x [%d %d] %v alone is not what it is among others, bit for bit", s.isa, rows, inner, outer, inner, w.dtype)
			}
			pool.close()
		}
	})
}

// TestLoad converts every value of both 16-bit types, in vectors and alone.
func TestLoad(t *testing.T) {
	const all = 1 << 16
	data := edge(t, 2*all)
	for i := range all {
		binary.LittleEndian.PutUint16(data[2*i:], uint16(i))
	}
	eachSet(t, func(t *testing.T, s *instructions) {
		for _, dtype := range []kernels.DType{kernels.BF16, kernels.F16} {
			want := make([]float32, all)
			kernels.ToFloat32(want, data, dtype)
			for _, n := range []int{all, all - 1, 33, 17, 16, 15, 7, 1} {
				got := make([]float32, n)
				s.load(got, addressOf(data)+device.Addr(2*(all-n)), dtype)
				for i, w := range want[all-n:] {
					if g := got[i]; math.Float32bits(g) != math.Float32bits(w) && (g == g || w == w) {
						t.Fatalf("%v %#x is %g, want %g", dtype, all-n+i, g, w)
					}
				}
			}
		}
	})
}

// ulps is how far got lies from want, in units of want's last place.
func ulps(got float32, want float64) float64 {
	if math.IsInf(float64(got), 1) && want > math.MaxFloat32 {
		return 0
	}
	_, exponent := math.Frexp(want)
	return math.Abs(float64(got)-want) / math.Ldexp(1, max(exponent-24, -149))
}

// maxExpULP bounds the error of e^x, and maxSiluULP that of silu(x), in units of
// the result's last place: see the package comment.
const (
	maxExpULP  = 1
	maxSiluULP = 2
)

func TestExponentials(t *testing.T) {
	eachSet(t, func(t *testing.T, s *instructions) {
		pad := make([]float32, 2*maxLanes)
		worst := 0.0
		const block = 1 << 12
		x, values := make([]float32, block), make([]float32, block)
		for from := -110.0; from < 95; from += block * 1e-4 {
			for i := range x {
				x[i] = float32(from + float64(i)*1e-4)
			}
			copy(values, x)
			s.exponentials(values, 0, pad)
			for i, v := range values {
				if e := ulps(v, math.Exp(float64(x[i]))); e > worst {
					worst = e
				}
			}
		}
		t.Logf("largest error of e^x: %.2f units in the last place", worst)
		if !(worst <= maxExpULP) {
			t.Errorf("e^x is off by %g units in the last place, want at most %d", worst, maxExpULP)
		}
		nan, inf := float32(math.NaN()), float32(math.Inf(1))
		special := floatsOf(t, []float32{0, float32(math.Copysign(0, -1)), inf, -inf, 1000, -1000, nan, 1e-30, 3.4e38, -3.4e38})
		s.exponentials(special, 0, pad)
		for i, want := range []float32{1, 1, inf, 0, inf, 0, nan, 1, inf, 0} {
			if g := special[i]; g != want && (g == g || want == want) {
				t.Errorf("special value %d gives %g, want %g", i, g, want)
			}
		}
	})
}

// TestSoftmaxSums holds the exponentials of a row to those of its values alone,
// and their sum to what they add up to, for any length.
func TestSoftmaxSums(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 5))
	eachSet(t, func(t *testing.T, s *instructions) {
		pad := make([]float32, maxLanes)
		for n := 1; n < 100; n++ {
			x := floatsOf(t, random(r, n))
			values := slices.Clone(x)
			got := s.exponentials(x, 1.5, pad)
			want := 0.0
			for i, v := range values {
				one := []float32{v}
				s.exponentials(one, 1.5, pad)
				if one[0] != x[i] {
					t.Fatalf("element %d of %d is %g, alone %g", i, n, x[i], one[0])
				}
				want += float64(one[0])
			}
			if math.Abs(float64(got)-want) > 1e-6*want {
				t.Fatalf("the sum of %d is %g, want %g", n, got, want)
			}
		}
	})
}

func TestGated(t *testing.T) {
	eachSet(t, func(t *testing.T, s *instructions) {
		pad := make([]float32, 2*maxLanes)
		worst := 0.0
		for n := 1; n < 2000; n += 13 {
			gate, up := make([]float32, n), make([]float32, n)
			for i := range gate {
				gate[i], up[i] = float32(i-n/2)*0.087, 1
			}
			gate, up = floatsOf(t, gate), floatsOf(t, up)
			out := floatsOf(t, make([]float32, n))
			s.gated(out, gate, up, pad)
			for i, g := range gate {
				if want := float64(g) / (1 + math.Exp(-float64(g))); math.Abs(want) > 1e-37 {
					worst = max(worst, ulps(out[i], want))
				}
			}
			s.gated(gate, gate, up, pad) // in place
			if !slices.Equal(gate, out) {
				t.Fatalf("%d elements in place differ from those beside", n)
			}
		}
		t.Logf("largest error of silu: %.2f units in the last place", worst)
		if !(worst <= maxSiluULP) {
			t.Errorf("silu is off by %g units in the last place, want at most %d", worst, maxSiluULP)
		}
	})
}

func TestAddWeighted(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 6))
	eachSet(t, func(t *testing.T, s *instructions) {
		for _, d := range []int{1, 3, 8, 15, 16, 40, 64, 80, 127, 128, 129, 256, 300} {
			for _, n := range []int{0, 1, 2, 7, 96} {
				p, start := random(r, n), random(r, d)
				var values [][]float32
				var rows []uint64
				for range n {
					v := floatsOf(t, random(r, d))
					values = append(values, v)
					rows = append(rows, uint64(uintptr(unsafe.Pointer(&v[0]))))
				}
				out := floatsOf(t, start)
				s.addWeighted(out, p, rows)
				for i, g := range out {
					want, size := float64(start[i]), math.Abs(float64(start[i]))
					for j, v := range values {
						want += float64(p[j]) * float64(v[i])
						size += math.Abs(float64(p[j]) * float64(v[i]))
					}
					if math.Abs(float64(g)-want) > size*float64(n+4)*0x1p-24 {
						t.Fatalf("element %d of %d, %d rows, is %g, want %g", i, d, n, g, want)
					}
				}
			}
		}
	})
}
