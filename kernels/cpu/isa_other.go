//go:build !amd64

package cpu

// vectorInstructions returns what this machine has beside the generic set.
func vectorInstructions() []*instructions { return nil }
