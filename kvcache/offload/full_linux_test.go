package offload_test

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/moeserve/moeserve/kvcache/offload"
)

// TestFullDisk: stores fail once the file system is full, what was stored before is there,
// and there is room again when blocks are evicted.
func TestFullDisk(t *testing.T) {
	folder := t.TempDir()
	if err := unix.Mount("tmpfs", folder, "tmpfs", 0, "size=64k"); errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		t.Skip("no right to mount a small file system")
	} else if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(folder, 0); err != nil {
			t.Error(err)
		}
	}()
	r := newRig(t, rigOptions{config: offload.Config{FileBlocks: 40, Directory: folder}, limit: 64})
	defer r.close()
	s := r.sequence(1, "a", 24)
	r.fill(s, 0, 24)
	r.store(s, 0, 24)
	got := r.stats(offload.File)
	if got.FailedStores == 0 || got.Stored == 0 || got.Stored+got.FailedStores != 24 || got.Evictable != int(got.Stored) {
		t.Errorf("%+v", got)
	}
	n, l := r.load(s, 0)
	if n == 0 || l.Blocks != n || l.Err != nil || !r.right(s, 0, n) {
		t.Errorf("found %d, loaded %+v", n, l)
	}
	r.tiers.Reset()
	r.settle()
	x := r.sequence(2, "x", 4)
	r.fill(x, 0, 4)
	for range 3 { // the old files are removed meanwhile
		r.store(x, 0, 4)
	}
	if n, l := r.load(x, 0); n != 4 || l.Blocks != 4 || !r.right(x, 0, 4) {
		t.Errorf("found %d, loaded %+v", n, l)
	}
}
