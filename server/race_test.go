//go:build race

package server_test

// raceDetector makes large models too slow to test with.
const raceDetector = true
