// Package racedetector says whether tests run under the race detector, which makes them about ten
// times as slow. Tests that do the same many times do it less often then, and those whose code is
// of one goroutine are left out: there is no race to find. All run without it, in full.
//
// It is for tests only. Invariant: what is left out under the race detector is done without it.
//
//	for range racedetector.Fewer(1000, 50) {
package racedetector
