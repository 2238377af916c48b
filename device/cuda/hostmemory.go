//go:build cuda

package cuda

import (
	"bufio"
	"bytes"
	"io/fs"
	"math"
	"path"
	"strconv"
	"strings"
)

// hostMemory returns, in bytes, the total memory that this process may use and the part of
// it that is available: the system's values, or those of the process's control groups
// where these are lower. root is the root of the file system.
func hostMemory(root fs.FS) (total, available int64) {
	info := fields(root, "proc/meminfo")
	total, available = info["MemTotal:"]<<10, info["MemAvailable:"]<<10
	for _, dir := range controlGroups(root) {
		limit, ok := number(root, path.Join(dir, "memory.max"))
		used, _ := number(root, path.Join(dir, "memory.current"))
		cache := "inactive_file"
		if !ok {
			// Version 1 of control groups.
			limit, ok = number(root, path.Join(dir, "memory.limit_in_bytes"))
			used, _ = number(root, path.Join(dir, "memory.usage_in_bytes"))
			cache = "total_inactive_file"
		}
		if !ok || limit >= total {
			continue
		}
		used -= fields(root, path.Join(dir, "memory.stat"))[cache]
		total = limit
		available = min(available, max(0, limit-used))
	}
	return total, available
}

// controlGroups lists the control group folders that may limit this process, innermost
// last.
func controlGroups(root fs.FS) []string {
	text, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return nil
	}
	var dirs []string
	for line := range strings.Lines(string(text)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		base := ""
		switch {
		case parts[0] == "0" && parts[1] == "":
			base = "sys/fs/cgroup"
		case strings.Contains(","+parts[1]+",", ",memory,"):
			base = "sys/fs/cgroup/memory"
		default:
			continue
		}
		// In a container the path may be that of the host, of which only the root is visible.
		dirs = append(dirs, base)
		for part := range strings.SplitSeq(strings.Trim(path.Clean(parts[2]), "/"), "/") {
			if part != "" && part != ".." {
				base = path.Join(base, part)
				dirs = append(dirs, base)
			}
		}
	}
	return dirs
}

// number reads a file that holds one number; "max" is the maximum int64.
// ---
func number(root fs.FS, name string) (int64, bool) {
	text, err := fs.ReadFile(root, name)
	if err != nil {
		return 0, false
	}
	s := strings.TrimSpace(string(text))
	if s == "max" {
		return math.MaxInt64, true
	}
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil
}

// fields reads a file of lines that begin with a name and a number.
func fields(root fs.FS, name string) map[string]int64 {
	text, err := fs.ReadFile(root, name)
	if err != nil {
		return nil
	}
	all := map[string]int64{}
	for s := bufio.NewScanner(bytes.NewReader(text)); s.Scan(); {
		if f := strings.Fields(s.Text()); len(f) >= 2 {
			if n, err := strconv.ParseInt(f[1], 10, 64); err == nil {
				all[f[0]] = n
			}
		}
	}
	return all
}
