//go:build unix

package reclaim

import (
	"os"
	"syscall"
)

// ours reports whether a file belongs to this user.
func ours(i os.FileInfo) bool {
	s, ok := i.Sys().(*syscall.Stat_t)
	return ok && int(s.Uid) == os.Getuid()
}
