package kv

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kvcache/offload"
)

// rawReader reads files without the engine, by as many threads as a tier in files has readers, each
// into its part of pinned memory.
type rawReader struct {
	machine device.Machine
	memory  device.Memory
	// blockBytes and headerBytes are the parts of a file, slots the blocks that each thread's part of
	// memory has room for.
	blockBytes, headerBytes int64
	slots                   int
}

// readFile reads a file: its header, and the block behind it.
type readFile func(fd int, header, block []byte) error

// rawWays are the ways in which files are read. On the second, the system reads the file ahead when it
// is read from its beginning: on ext4 of Linux 6.18 that is twice as fast from the disk, and from the
// page cache it is one call more.
var rawWays = [...]readFile{
	func(fd int, header, block []byte) error {
		return whole(len(header)+len(block), func() (int, error) { return unix.Preadv(fd, [][]byte{header, block}, 0) })
	},
	func(fd int, header, block []byte) error {
		if err := whole(len(header), func() (int, error) { return unix.Pread(fd, header, 0) }); err != nil {
			return err
		}
		return whole(len(block), func() (int, error) { return unix.Pread(fd, block, int64(len(header))) })
	},
}

// whole calls read, which must return so many bytes.
func whole(bytes int, read func() (int, error)) error {
	n, err := read()
	for errors.Is(err, unix.EINTR) {
		n, err = read()
	}
	if err == nil && n != bytes {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// openRaw allocates memory as large as the tier's staging buffers.
func (f *files) openRaw(blockBytes, staging int64) (r rawReader, err error) {
	r = rawReader{machine: f.machine, blockBytes: blockBytes, slots: int(staging / blockBytes / offload.FileReaders)}
	var header unix.Stat_t
	if err := unix.Stat(f.paths[0], &header); err != nil {
		return r, inDirectory(&fs.PathError{Op: "stat", Path: f.paths[0], Err: err}, f.o.Directory)
	}
	r.headerBytes = header.Size - blockBytes
	if r.memory, err = f.machine.Alloc(device.Host, staging, "KV blocks measured, read without the engine"); err != nil {
		return r, err
	}
	f.closers = append(f.closers, r.memory.Free)
	clear(r.memory.Write(0, staging)) // its pages are there
	return r, nil
}

// read reads files, and returns how long it took.
func (r *rawReader) read(ctx context.Context, paths []string, read readFile) (time.Duration, error) {
	var next atomic.Int64
	var all sync.WaitGroup
	errs := make([]error, offload.FileReaders)
	began := r.machine.Now()
	for thread := range errs {
		all.Go(func() {
			header := make([]byte, r.headerBytes)
			for n := 0; errs[thread] == nil && ctx.Err() == nil; n++ {
				i := int(next.Add(1)) - 1
				if i >= len(paths) {
					return
				}
				slot := thread*r.slots + n%r.slots
				errs[thread] = readWith(paths[i], header, r.memory.Write(int64(slot)*r.blockBytes, r.blockBytes), read)
			}
		})
	}
	all.Wait()
	return r.machine.Now() - began, errors.Join(append(errs, ctx.Err())...)
}

// readWith opens a file, reads it, and closes it.
func readWith(path string, header, block []byte, read readFile) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd) //nolint:errcheck // it was only read
	if err := read(fd, header, block); err != nil {
		return &fs.PathError{Op: "read", Path: path, Err: err}
	}
	return nil
}
