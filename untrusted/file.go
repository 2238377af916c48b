package untrusted

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Limits of what is read whole, in bytes: several times the largest files in use.
const (
	// MaxSettings is for configurations, policies, hardware descriptions, traces and lists.
	MaxSettings = 16 << 20
	// MaxData is for tokenizers, prompts and results.
	MaxData = 256 << 20
)

// IrregularError means that a path is not a regular file.
type IrregularError struct{ Mode fs.FileMode }

func (e *IrregularError) Error() string {
	what := "a special file"
	switch {
	case e.Mode.IsDir():
		what = "a directory"
	case e.Mode&fs.ModeNamedPipe != 0:
		what = "a named pipe"
	case e.Mode&fs.ModeSocket != 0:
		what = "a socket"
	case e.Mode&fs.ModeDevice != 0:
		what = "a device"
	}
	return "is " + what + "; give a regular file"
}

// SizeError means that a file is larger than its limit, in bytes.
type SizeError struct{ Limit int64 }

func (e *SizeError) Error() string {
	limit := fmt.Sprintf("%d B", e.Limit)
	switch {
	case e.Limit >= 1<<20 && e.Limit%(1<<20) == 0:
		limit = fmt.Sprintf("%d MiB", e.Limit>>20)
	case e.Limit >= 1<<10 && e.Limit%(1<<10) == 0:
		limit = fmt.Sprintf("%d KiB", e.Limit>>10)
	}
	return "larger than " + limit + ", the maximum of such a file"
}

// Open opens a regular file for reading, without waiting. Its errors are *fs.PathError; that
// of a path that is no regular file wraps *IrregularError. The caller closes the file.
func Open(path string) (*os.File, error) {
	// Opening a device can have effects of its own, so the path is looked at first. What it leads
	// to may change before it is opened: hence O_NONBLOCK, and the second look.
	info, err := os.Stat(path)
	if err != nil {
		return nil, named("open", path, err)
	}
	if !info.Mode().IsRegular() {
		return nil, irregular(path, info.Mode())
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, named("open", path, err)
	}
	if info, err = f.Stat(); err == nil && !info.Mode().IsRegular() {
		err = irregular(path, info.Mode())
	}
	if err != nil {
		return nil, errors.Join(named("open", path, err), f.Close())
	}
	return f, nil
}

// ReadFile reads a regular file of at most limit bytes. Errors are as those of Open; that of a
// larger file wraps *SizeError.
func ReadFile(path string, limit int64) (data []byte, err error) {
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return read(f, path, limit)
}

// ReadFS reads a file of at most limit bytes from a Dir or from files in memory. Errors are as
// those of ReadFile.
func ReadFS(files fs.FS, name string, limit int64) (data []byte, err error) {
	f, err := files.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if dir, ok := files.(Dir); ok {
		name = filepath.Join(string(dir), name)
	}
	return read(f, name, limit)
}

func read(f fs.File, path string, limit int64) ([]byte, error) {
	tooLarge := &fs.PathError{Op: "read", Path: Name(path), Err: &SizeError{limit}}
	info, err := f.Stat()
	if err != nil {
		return nil, named("read", path, err)
	}
	if info.Size() > limit {
		return nil, tooLarge
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, named("read", path, err)
	}
	if int64(len(data)) > limit { // it has grown, or its size is not known, as below /proc
		return nil, tooLarge
	}
	return data, nil
}

// Dir is the tree of files below a directory, each opened by Open. Its directories can be
// opened too, to be listed.
type Dir string

// Open implements fs.FS.
func (d Dir) Open(name string) (fs.File, error) {
	if !fs.ValidPath(name) {
		return nil, &fs.PathError{Op: "open", Path: Name(name), Err: fs.ErrInvalid}
	}
	full := filepath.Join(string(d), filepath.FromSlash(name))
	f, err := Open(full)
	var irregular *IrregularError
	if errors.As(err, &irregular) && irregular.Mode.IsDir() {
		return d.directory(full)
	}
	if err != nil {
		return nil, err // not f: a nil file in an interface is not nil
	}
	return f, nil
}

func (Dir) directory(full string) (fs.File, error) {
	f, err := os.OpenFile(full, os.O_RDONLY|unix.O_NONBLOCK|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, named("open", full, err)
	}
	return f, nil
}

// Stat implements fs.StatFS: it does not open the file.
func (d Dir) Stat(name string) (fs.FileInfo, error) {
	if !fs.ValidPath(name) {
		return nil, &fs.PathError{Op: "stat", Path: Name(name), Err: fs.ErrInvalid}
	}
	full := path.Join(string(d), name)
	info, err := os.Stat(full)
	if err != nil {
		return nil, named("stat", full, err)
	}
	return info, nil
}

func irregular(path string, mode fs.FileMode) error {
	return &fs.PathError{Op: "open", Path: Name(path), Err: &IrregularError{mode}}
}

// named gives the error of an operation on path a path that can be printed.
func named(op, path string, err error) error {
	var of *fs.PathError
	if errors.As(err, &of) {
		err = of.Err
	}
	return &fs.PathError{Op: op, Path: Name(path), Err: err}
}
