package offload_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/moeserve/moeserve/kvcache/offload"
)

// TestDirectoryIsFull: a tier that cannot write a single block is not opened, and leaves nothing.
func TestDirectoryIsFull(t *testing.T) {
	for name, free := range map[string]int{"nothing": 0, "less than a block": 1} {
		folder := t.TempDir()
		mountSmall(t, folder)
		fill, err := os.Create(filepath.Join(folder, "fill"))
		if err != nil {
			t.Fatal(err)
		}
		for err == nil {
			_, err = fill.Write(make([]byte, 4096))
		}
		info, err := fill.Stat()
		if err = errors.Join(err, fill.Truncate(info.Size()-int64(free)*8192), fill.Close()); err != nil {
			t.Fatal(err)
		}
		r, err := openRig(t, rigOptions{headBytes: 1024, config: offload.Config{FileBlocks: 4, Directory: folder}})
		wantError(t, err, "directory", "no space left on device")
		r.close()
		if left, err := os.ReadDir(folder); err != nil || len(left) != 1 {
			t.Errorf("%s free: left %v, %v", name, left, err)
		}
	}
}

// mountSmall mounts a file system of 64 KiB until the end of the test.
func mountSmall(t *testing.T, folder string) {
	t.Helper()
	if err := unix.Mount("tmpfs", folder, "tmpfs", 0, "size=64k"); errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		t.Skip("no right to mount a small file system")
	} else if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(folder, 0); err != nil {
			t.Error(err)
		}
	})
}

// TestFullDisk: stores fail once the file system is full, what was stored before is there,
// and there is room again when blocks are evicted.
func TestFullDisk(t *testing.T) {
	folder := t.TempDir()
	mountSmall(t, folder)
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
