package eval_test

import (
	"cmp"
	"slices"
	"testing"

	"github.com/moeserve/moeserve/eval"
)

// TestPercentile: percentiles are of the nearest rank, of values in any order, which stay in theirs.
func TestPercentile(t *testing.T) {
	for _, c := range []struct {
		values []int
		p      int
		want   int
	}{
		{nil, 50, 0},
		{[]int{7}, 1, 7},
		{[]int{7}, 100, 7},
		{[]int{3, 1}, 50, 1},
		{[]int{3, 1}, 51, 3},
		{[]int{5, 1, 3}, 50, 3},
		{[]int{5, 1, 3}, 33, 1},
		{[]int{5, 1, 3}, 34, 3},
		{[]int{4, 2, 1, 3}, 50, 2},
		{[]int{10, 9, 8, 7, 6, 5, 4, 3, 2, 1}, 90, 9},
		{[]int{10, 9, 8, 7, 6, 5, 4, 3, 2, 1}, 99, 10},
		{[]int{10, 9, 8, 7, 6, 5, 4, 3, 2, 1}, 1, 1},
	} {
		before := slices.Clone(c.values)
		if got := eval.Percentile(c.values, c.p); got != c.want {
			t.Errorf("percentile %d of %v is %d, want %d", c.p, c.values, got, c.want)
		}
		if !slices.Equal(c.values, before) {
			t.Errorf("%v is %v afterwards", before, c.values)
		}
		if got := eval.PercentileFunc(c.values, c.p, cmp.Compare[int]); got != c.want {
			t.Errorf("percentile %d of %v in an order is %d, want %d", c.p, c.values, got, c.want)
		}
	}
	if got := eval.Median([]float64{2.5, 9, 1}); got != 2.5 {
		t.Errorf("the median is %v", got)
	}
	if got := eval.Median[float64](nil); got != 0 {
		t.Errorf("the median of none is %v", got)
	}
}
