//go:build race

package main

// raceDetector makes large models too slow to test with.
const raceDetector = true
