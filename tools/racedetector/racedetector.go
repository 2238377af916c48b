package racedetector

import "testing"

// Fewer is n, or under the race detector few.
func Fewer(n, few int) int {
	if Enabled {
		return few
	}
	return n
}

// SkipSequential skips a test under the race detector, of code that starts no goroutine.
func SkipSequential(t testing.TB) {
	t.Helper()
	if Enabled {
		t.Skip("one goroutine: no race to find, and slow under the race detector")
	}
}
