package devices

import (
	"bufio"
	"fmt"
	"os"
	"strings"
)

// AvailableMemory returns the memory available on this machine, in bytes, or false if the
// system does not report it.
func AvailableMemory() (int64, bool) {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0, false
	}
	defer f.Close() //nolint:errcheck // only read from
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if rest, ok := strings.CutPrefix(lines.Text(), "MemAvailable:"); ok {
			var kib int64
			if _, err := fmt.Sscanf(rest, "%d kB", &kib); err == nil {
				return kib << 10, true
			}
		}
	}
	return 0, false
}
