package offload_test

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/moeserve/moeserve/kvcache/offload"
)

// TestReadOnlyDirectory: a tier whose directory may not be written is not opened: the error says where,
// why, and what to do, and nothing is left.
func TestReadOnlyDirectory(t *testing.T) {
	folder := t.TempDir()
	if err := os.Chmod(folder, 0o500); err != nil {
		t.Fatal(err)
	}
	var r *rig
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		dropOverride(t)
		r, err = openRig(t, rigOptions{config: offload.Config{FileBlocks: 4, Directory: folder}})
	}()
	<-done
	if t.Failed() {
		return
	}
	wantError(t, err, folder, "permission denied", "name a folder that exists, can be written")
	r.close()
	if left, err := os.ReadDir(folder); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

// dropOverride takes from the goroutine, and from the thread that ends with it, root's right to write
// where the permissions say no.
func dropOverride(t *testing.T) {
	runtime.LockOSThread() // and never unlocked: the thread is not used again
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var all [2]unix.CapUserData
	if err := unix.Capget(&header, &all[0]); err != nil {
		t.Error(err)
		return
	}
	all[0].Effective &^= 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_DAC_READ_SEARCH
	if err := unix.Capset(&header, &all[0]); err != nil {
		t.Error(err)
	}
}
