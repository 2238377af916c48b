//go:build !linux

package node

// availableMemory is known on Linux only.
func availableMemory() (int64, bool) { return 0, false }
