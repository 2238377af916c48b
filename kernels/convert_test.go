package kernels

import (
	"math"
	"testing"

	"github.com/x448/float16"
)

func TestBF16(t *testing.T) {
	for i := range 1 << 16 {
		f := FromBF16(uint16(i))
		if math.Float32bits(f) != uint32(i)<<16 {
			t.Fatalf("FromBF16(%#x) is %g", i, f)
		}
		if got := ToBF16(f); got != uint16(i) && f == f {
			t.Fatalf("ToBF16(%g) is %#x, want %#x", f, got, i)
		}
		if got := ToBF16(f); f != f && FromBF16(got) == FromBF16(got) {
			t.Fatalf("ToBF16 of NaN %#x is %#x", i, got)
		}
		if f != f || math.IsInf(float64(f), 0) {
			continue
		}
		// Between a value and the next: below the middle, on it, above it.
		next := uint16(i) + 1
		even := uint16(i)
		if i&1 == 1 {
			even = next
		}
		for low, want := range map[uint32]uint16{0x7fff: uint16(i), 0x8000: even, 0x8001: next} {
			if got := ToBF16(math.Float32frombits(uint32(i)<<16 | low)); got != want {
				t.Fatalf("ToBF16(%#x) is %#x, want %#x", uint32(i)<<16|low, got, want)
			}
		}
	}
	for _, bits := range []uint32{0x7f800001, 0xff800001, 0x7fffffff} { // NaN with its payload in the lower bits alone
		if f := FromBF16(ToBF16(math.Float32frombits(bits))); f == f {
			t.Errorf("NaN %#x becomes %g", bits, f)
		}
	}
}

func TestConvert(t *testing.T) {
	values := []float32{0, 1, -1.5, 3.1415927, 65504, -1e-7, float32(math.Inf(1)), 1e30}
	for _, c := range []struct {
		t    DType
		want func(float32) float32
	}{
		{F32, func(f float32) float32 { return f }},
		{BF16, func(f float32) float32 { return FromBF16(ToBF16(f)) }},
		{F16, func(f float32) float32 { return float16.Fromfloat32(f).Float32() }},
	} {
		raw := make([]byte, len(values)*c.t.Size())
		FromFloat32(raw, values, c.t)
		got := make([]float32, len(values))
		ToFloat32(got, raw, c.t)
		for i, v := range values {
			if got[i] != c.want(v) {
				t.Errorf("%v: %g becomes %g, want %g", c.t, v, got[i], c.want(v))
			}
		}
	}
	for name, f := range map[string]func(){
		"another size": func() { ToFloat32(make([]float32, 2), make([]byte, 3), BF16) },
		"integers":     func() { FromFloat32(make([]byte, 8), make([]float32, 2), I32) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s does not panic", name)
				}
			}()
			f()
		}()
	}
}
