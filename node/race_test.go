//go:build race

package node_test

// raceDetector makes long loads in virtual time too slow to test with.
const raceDetector = true
