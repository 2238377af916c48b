package eval

import (
	"cmp"
	"slices"
)

// Percentile is the smallest of the values that at least p per cent of them do not exceed (the nearest rank): one of
// them, with nothing interpolated; zero of none. p is 1 to 100. (A server's latencies are vLLM's percentiles instead,
// which are: see package serving.)
func Percentile[T cmp.Ordered](values []T, p int) T { return PercentileFunc(values, p, cmp.Compare[T]) }

// PercentileFunc is Percentile of values of any type, in an order.
func PercentileFunc[T any](values []T, p int, compare func(a, b T) int) (v T) {
	if len(values) == 0 {
		return v
	}
	sorted := slices.SortedStableFunc(slices.Values(values), compare)
	return sorted[(len(sorted)*p+99)/100-1]
}

// Median is the 50th percentile: of an even number of values the lower of the two in the middle.
func Median[T cmp.Ordered](values []T) T { return Percentile(values, 50) }
