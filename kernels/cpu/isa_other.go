//go:build !amd64

package cpu

// vectorInstructions returns this machine's sets besides the generic one.
func vectorInstructions() []*instructions { return nil }

// pause would tell the processor that a goroutine polls.
func pause(int) {}
