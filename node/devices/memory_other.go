//go:build !linux

package devices

// AvailableMemory is known on Linux only.
func AvailableMemory() (int64, bool) { return 0, false }
