package harvest

import (
	"math"
	"slices"
	"testing"
)

func TestFairShares(t *testing.T) {
	const all = math.MaxInt64
	for _, c := range []struct {
		total         int64
		demands, want []int64
	}{
		{100, []int64{all}, []int64{100}},
		{100, []int64{all, all}, []int64{50, 50}},
		{100, []int64{10, all, all}, []int64{10, 45, 45}},
		{100, []int64{90, all}, []int64{50, 50}},
		{100, []int64{all, 0, 30, 20}, []int64{50, 0, 30, 20}},
		{10, []int64{20, 20, 5}, []int64{3, 4, 3}},
		{0, []int64{5, all}, []int64{0, 0}},
	} {
		if got := fairShares(c.total, c.demands); !slices.Equal(got, c.want) {
			t.Errorf("%d among %v: %v, want %v", c.total, c.demands, got, c.want)
		}
	}
}
