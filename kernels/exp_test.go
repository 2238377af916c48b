package kernels

import (
	"math"
	"testing"
)

// TestExp compares Exp with float64, and pins the bits of some values for other
// backends.
func TestExp(t *testing.T) {
	last, worst := float32(1), 0.0
	for i := range 1 << 21 {
		x := -87 * float32(i) / (1 << 21)
		got := Exp(x)
		want := math.Exp(float64(x))
		worst = max(worst, math.Abs(float64(got)-want)/want)
		if got > last*(1+1e-6) || got <= 0 {
			t.Fatalf("Exp(%g) is %g, behind %g", x, got, last)
		}
		last = got
	}
	if worst > 2.0/(1<<23) {
		t.Errorf("relative error %.3g, want at most 2 units in the last place", worst)
	}
	for x, want := range map[float32]uint32{
		0: 0x3f800000, -1: 0x3ebc5ab2, -0.3465: 0x3f35085c, -22: 0x2f995a46, -86.9: 0x00c60f89, -87.1: 0,
		float32(math.Inf(-1)): 0, float32(math.NaN()): 0,
	} {
		if got := math.Float32bits(Exp(x)); got != want {
			t.Errorf("Exp(%g) has bits %#x, want %#x", x, got, want)
		}
	}
	for e, want := range map[float32]uint64{0: 0, 1: 1 << 32, 0.75: 3 << 30, 1e-10: 0, 3e-10: 1} {
		if got := SampleWeight(e); got != want {
			t.Errorf("SampleWeight(%g) is %d, want %d", e, got, want)
		}
	}
}
