package harvest

import (
	"math"
	"slices"
	"testing"
)

func TestFairShares(t *testing.T) {
	const all = math.MaxInt64
	for _, c := range []struct {
		total int64
		among []sharer
		want  []int64
	}{
		{100, []sharer{{all, 1}}, []int64{100}},
		{100, []sharer{{all, 1}, {all, 1}}, []int64{50, 50}},
		{100, []sharer{{10, 1}, {all, 1}, {all, 1}}, []int64{10, 45, 45}},
		{100, []sharer{{90, 1}, {all, 1}}, []int64{50, 50}},
		{100, []sharer{{all, 1}, {0, 1}, {30, 1}, {20, 1}}, []int64{50, 0, 30, 20}},
		{10, []sharer{{20, 1}, {20, 1}, {5, 1}}, []int64{3, 4, 3}},
		{0, []sharer{{5, 1}, {all, 1}}, []int64{0, 0}},
		{100, []sharer{{all, 3}, {all, 1}}, []int64{75, 25}},
		{100, []sharer{{60, 3}, {all, 1}}, []int64{60, 40}},
		{100, []sharer{{90, 2}, {5, 1}, {all, 2}}, []int64{47, 5, 48}},
	} {
		if got := fairShares(c.total, c.among); !slices.Equal(got, c.want) {
			t.Errorf("%d among %v: %v, want %v", c.total, c.among, got, c.want)
		}
	}
}
