//go:build !linux

package devices

// AvailableMemory returns false: only Linux reports it.
func AvailableMemory() (int64, bool) { return 0, false }
