package planning

import (
	"math"
	"testing"
)

func TestFractionOf(t *testing.T) {
	for _, all := range []int{1, 3, 48, 256, 1440, 6144} {
		for n := range all + 1 {
			f := fractionOf(n, all)
			if got := int(math.Round(f * float64(all))); got != n {
				t.Fatalf("%d of %d is %v, which is %d", n, all, f, got)
			}
		}
	}
	if f := fractionOf(128, 256); f != 0.5 {
		t.Errorf("half is %v", f)
	}
}
