package cpu

import (
	"math"
	"testing"

	"github.com/x448/float16"
)

func TestHalf(t *testing.T) {
	for i := range 1 << 16 {
		got, want := half(uint16(i)), float16.Frombits(uint16(i)).Float32()
		if math.Float32bits(got) != math.Float32bits(want) && !(got != got && want != want) {
			t.Fatalf("half(%#04x) is %g, want %g", i, got, want)
		}
	}
}
