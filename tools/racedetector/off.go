//go:build !race

package racedetector

// Enabled: the race detector is on.
const Enabled = false
