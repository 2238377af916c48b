package offload

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/moeserve/moeserve/kvcache"
)

// BenchmarkReadFiles reads 64 blocks of 2 MiB from files in TMPDIR, from the page cache and from the
// disk (where the system drops pages that it is asked to drop), by several threads. verified is what
// a tier in files does, raw the same without the hash. MB/s are of the page cache's or the disk's
// bytes.
func BenchmarkReadFiles(b *testing.B) {
	const files, blockBytes = 64, 2 << 20
	f, err := newFolder(b.TempDir(), slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	defer f.remove() //nolint:errcheck // b.TempDir's end says so
	memory := make([]byte, files*blockBytes)
	block := func(i int) []byte { return memory[i*blockBytes:][:blockBytes] }
	var key kvcache.Key
	for i := range files {
		block(i)[0] = byte(i)
		if err := f.write(fmt.Sprint(i), key, block(i)); err != nil {
			b.Fatal(err)
		}
	}
	raw := func(name string, _ kvcache.Key, content []byte) error {
		file, err := os.Open(filepath.Join(f.path, name))
		if err != nil {
			return err
		}
		defer file.Close() //nolint:errcheck // it was only read
		header := make([]byte, headerBytes)
		if _, err := io.ReadFull(file, header); err != nil {
			return err
		}
		_, err = io.ReadFull(file, content)
		return err
	}
	// drop asks the system to drop a file's pages.
	drop := func(i int) error {
		file, err := os.Open(filepath.Join(f.path, fmt.Sprint(i)))
		if err != nil {
			return err
		}
		defer file.Close() //nolint:errcheck // it was only read
		if err := file.Sync(); err != nil {
			return err
		}
		return unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED)
	}
	for _, from := range []string{"cache", "disk"} {
		for _, threads := range []int{1, 2, 4, 8, FileReaders} {
			for _, way := range []struct {
				name string
				read func(string, kvcache.Key, []byte) error
			}{{"raw", raw}, {"verified", f.read}} {
				b.Run(fmt.Sprintf("from=%s/threads=%d/%s", from, threads, way.name), func(b *testing.B) {
					b.SetBytes(files * blockBytes)
					errs := make([]error, threads)
					for b.Loop() {
						if from == "disk" {
							b.StopTimer()
							for i := range files {
								if err := drop(i); err != nil {
									b.Fatal(err)
								}
							}
							b.StartTimer()
						}
						var next atomic.Int64
						var all sync.WaitGroup
						for t := range threads {
							all.Go(func() {
								for i := int(next.Add(1)) - 1; i < files && errs[t] == nil; i = int(next.Add(1)) - 1 {
									errs[t] = way.read(fmt.Sprint(i), key, block(i))
								}
							})
						}
						all.Wait()
					}
					for _, err := range errs {
						if err != nil {
							b.Fatal(err)
						}
					}
				})
			}
		}
	}
}
