package philox

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/kernels"
)

// TestPhilox uses the vectors published with the generator (Random123's
// known-answer tests).
func TestPhilox(t *testing.T) {
	const all = 0xffffffff
	for _, c := range []struct {
		counter [4]uint32
		key     [2]uint32
		want    [4]uint32
	}{
		{[4]uint32{}, [2]uint32{}, [4]uint32{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
		{[4]uint32{all, all, all, all}, [2]uint32{all, all}, [4]uint32{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
		{[4]uint32{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, [2]uint32{0xa4093822, 0x299f31d0}, [4]uint32{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
	} {
		if got := Block(c.counter, c.key); got != c.want {
			t.Errorf("Block(%x, %x) is %x, want %x", c.counter, c.key, got, c.want)
		}
	}
}

// TestGumbelMapping compares the float32 mapping with float64, over all of its
// range, and pins the bits of some values for other backends.
func TestGumbelMapping(t *testing.T) {
	for i := range 1 << 20 {
		w := uint32(i) * 4099
		switch i % 3 {
		case 1:
			w = 1 << (i / 3 % 32)
		case 2:
			w = ^uint32(1 << (i / 3 % 32))
		}
		e := -math.Log1p(-float64(w|1) / (1 << 32))
		if w >= 1<<31 {
			e = -math.Log(float64(^w|1) / (1 << 32))
		}
		want := -math.Log(e)
		if got := float64(gumbel(w)); math.Abs(got-want) > 3e-7*max(1, math.Abs(want)) {
			t.Fatalf("gumbel(%#x) is %.9g, want %.9g", w, got, want)
		}
	}
	for w, want := range map[uint32]uint32{
		0: 0x41b17218, 1: 0x41b17218, 1<<31 - 1: 0x3ebba795, 1 << 31: 0x3ebba795,
		0x12345678: 0x4026d6b8, 0xfedcba98: 0xbfd83d7a, math.MaxUint32: 0xc04659ab,
	} {
		if got := math.Float32bits(gumbel(w)); got != want {
			t.Errorf("gumbel(%#x) has bits %#x, want %#x", w, got, want)
		}
	}
}

// TestGumbelNoise checks that blocks agree with single variates, that every key
// matters, and the distribution's moments.
func TestGumbelNoise(t *testing.T) {
	const n = 1 << 18
	var sum, squares float64
	for i := range int32(n) {
		g := Gumbel(1, 2, 3, i)
		if b := GumbelBlock(1, 2, 3, i/4); b[i%4] != g {
			t.Fatalf("token %d: %g in its block, %g alone", i, b[i%4], g)
		}
		sum += float64(g)
		squares += float64(g) * float64(g)
	}
	mean, variance := sum/n, squares/n-sum/n*sum/n
	if math.Abs(mean-0.5772157) > 0.01 || math.Abs(variance-math.Pi*math.Pi/6) > 0.02 {
		t.Errorf("mean %g and variance %g, want 0.577 and 1.645", mean, variance)
	}
	g := Gumbel(1, 2, 3, 4)
	for _, other := range []float32{
		Gumbel(0, 2, 3, 4), Gumbel(1|1<<32, 2, 3, 4), Gumbel(1, 1, 3, 4), Gumbel(1, 2, 4, 4), Gumbel(1, 2, 3, 5), Gumbel(1, 2, 3, 8),
	} {
		if g == other {
			t.Errorf("another key gives the same variate %g", g)
		}
	}
}

// TestGumbelDraw checks that the largest of logit + noise has the softmax's
// frequencies.
func TestGumbelDraw(t *testing.T) {
	const n = 100_000
	logits := []float32{0, 1, -1, 2}
	var total float64
	for _, l := range logits {
		total += math.Exp(float64(l))
	}
	var counts [4]int
	for i := range int32(n) {
		g := GumbelBlock(99, 0, i, 0)
		best := 0
		for j := range logits {
			if logits[j]+g[j] > logits[best]+g[best] {
				best = j
			}
		}
		counts[best]++
	}
	for i, l := range logits {
		p := math.Exp(float64(l)) / total
		if got := float64(counts[i]) / n; math.Abs(got-p) > 5*math.Sqrt(p*(1-p)/n) {
			t.Errorf("token %d is drawn with frequency %g, want %g", i, got, p)
		}
	}
}

// TestFillDummy checks that pieces agree with the whole, and all types with each
// other.
func TestFillDummy(t *testing.T) {
	const elements = 1000
	rapid.Check(t, func(t *rapid.T) {
		dtype := rapid.SampledFrom([]kernels.DType{kernels.F32, kernels.BF16, kernels.F16}).Draw(t, "dtype")
		seed := rapid.Uint64().Draw(t, "seed")
		base := rapid.SampledFrom([]int64{0, 5, 1 << 20, 1<<36 - 500}).Draw(t, "base") // past 2^32 blocks too
		exponent := rapid.IntRange(-8, 24).Draw(t, "exponent")
		whole := make([]byte, elements*dtype.Size())
		FillDummy(whole, dtype, seed, "w", base, exponent)
		var pieces []byte
		for at := 0; at < elements; {
			n := min(rapid.IntRange(1, 100).Draw(t, "piece"), elements-at)
			piece := make([]byte, n*dtype.Size())
			FillDummy(piece, dtype, seed, "w", base+int64(at), exponent)
			pieces = append(pieces, piece...)
			at += n
		}
		if !bytes.Equal(whole, pieces) {
			t.Fatalf("pieces of %v from %d differ from the whole", dtype, base)
		}
		values, reference := make([]float32, elements), make([]float32, elements)
		kernels.ToFloat32(values, whole, dtype)
		raw := make([]byte, 4*elements)
		FillDummy(raw, kernels.F32, seed, "w", base, exponent)
		kernels.ToFloat32(reference, raw, kernels.F32)
		for i, v := range values {
			if n := math.Ldexp(float64(v), exponent); v != reference[i] || n != math.Trunc(n) || n < -128 || n > 127 {
				t.Fatalf("element %d of %v is %g (%g), in float32 %g", i, dtype, v, n, reference[i])
			}
		}
	})
}

// TestFillDummyPinned pins bytes that every backend must write.
func TestFillDummyPinned(t *testing.T) {
	b := make([]byte, 1<<16)
	FillDummy(b, kernels.BF16, 42, "model.layers.0.mlp.gate.weight", 123, 10)
	sum := sha256.Sum256(b)
	if got, want := hex.EncodeToString(sum[:8]), "444cd7c8b6f273d9"; got != want {
		t.Errorf("hash %s, want %s", got, want)
	}
	if got, want := dummyKey(42, "model.layers.0.mlp.gate.weight"), uint64(0x44020cf3d83e4c48); got != want {
		t.Errorf("key %#x, want %#x", got, want)
	}
}

func TestFillDummyDistribution(t *testing.T) {
	const n = 1 << 18
	var counts [256]int
	b := make([]byte, 4*n)
	FillDummy(b, kernels.F32, 3, "w", 0, 0)
	values := make([]float32, n)
	kernels.ToFloat32(values, b, kernels.F32)
	for _, v := range values {
		counts[int(v)+128]++
	}
	const expected = n / 256
	var chi float64
	for _, c := range counts {
		chi += float64(c-expected) * float64(c-expected) / expected
	}
	if chi < 150 || chi > 380 { // 255 degrees of freedom: mean 255, deviation 22.6
		t.Errorf("chi-square %g of 256 values, want about 255", chi)
	}
	other := make([]byte, 4*n)
	for _, c := range []struct {
		seed   uint64
		tensor string
	}{{4, "w"}, {3, "v"}, {3, ""}} {
		FillDummy(other, kernels.F32, c.seed, c.tensor, 0, 0)
		if bytes.Equal(b, other) {
			t.Errorf("seed %d, tensor %q gives the same weights as seed 3, w", c.seed, c.tensor)
		}
	}
}

func TestFillDummyPanics(t *testing.T) {
	for name, f := range map[string]func(){
		"integers":            func() { FillDummy(nil, kernels.I32, 0, "", 0, 0) },
		"half an element":     func() { FillDummy(make([]byte, 3), kernels.BF16, 0, "", 0, 0) },
		"a negative element":  func() { FillDummy(nil, kernels.BF16, 0, "", -1, 0) },
		"below half's range":  func() { FillDummy(nil, kernels.F16, 0, "", 0, 25) },
		"above half's range":  func() { FillDummy(nil, kernels.F16, 0, "", 0, -9) },
		"below float's range": func() { FillDummy(nil, kernels.F32, 0, "", 0, 127) },
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

func BenchmarkFillDummy(b *testing.B) {
	for _, t := range []kernels.DType{kernels.BF16, kernels.F16, kernels.F32} {
		b.Run("dtype="+t.String(), func(b *testing.B) {
			buf := make([]byte, 1<<20)
			b.SetBytes(int64(len(buf)))
			for b.Loop() {
				FillDummy(buf, t, 1, "w", 0, 10)
			}
		})
	}
}
