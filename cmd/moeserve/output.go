package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// stdoutName names standard output where a file is asked for.
const stdoutName = "-"

// result is where a command's JSON goes: nowhere, standard output, or a file that
// is there, complete, or not at all.
type result struct {
	path string
	// out is standard output, or the device or pipe at path; nil where a file is to be made.
	out io.Writer
	// device is to be closed; nil where out is none of ours.
	device io.Closer
}

// openResult checks that the result can be written before any work is done for it.
// The caller closes it.
func (s *streams) openResult(path string) (*result, error) {
	if err := s.claim("--json", path); err != nil {
		return nil, err
	}
	switch path {
	case "":
		return &result{}, nil
	case stdoutName:
		return &result{path: path, out: s.out}, nil
	}
	info, err := os.Stat(path)
	switch {
	case err == nil && info.IsDir():
		return nil, usagef("--json %s is a directory; give a file", path)
	case err == nil && !info.Mode().IsRegular():
		// A pipe or a device: nothing can take its place.
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return nil, unwritable("--json", path, err)
		}
		return &result{path: path, out: f, device: f}, nil
	}
	if err := writable("--json", path); err != nil {
		return nil, err
	}
	return &result{path: path}, nil
}

// claim refuses a file that another flag names, too: what is written last would replace the rest.
func (s *streams) claim(flag, path string) error {
	if path == "" {
		return nil
	}
	for _, o := range s.outputs {
		switch {
		case !sameFile(o.path, path):
		case path == stdoutName:
			return usagef("%s and %s are both -, standard output: name a file for one", o.flag, flag)
		case o.flag == flag:
			return usagef("%s names %s twice: each would replace the other; name two files", flag, path)
		default:
			return usagef("%s %s and %s %s are one file: each would replace the other; name two", o.flag, o.path, flag, path)
		}
	}
	s.outputs = append(s.outputs, namedFile{flag, path})
	return nil
}

// sameFile says whether two paths name one file, which need not be there. Pipes and devices take
// what each writes.
func sameFile(a, b string) bool {
	if a == stdoutName || b == stdoutName {
		return a == b
	}
	x, errA := os.Stat(a)
	y, errB := os.Stat(b)
	if errA == nil || errB == nil {
		return os.SameFile(x, y) && x.Mode().IsRegular()
	}
	x, errA = os.Stat(filepath.Dir(a))
	y, errB = os.Stat(filepath.Dir(b))
	return errA == nil && errB == nil && os.SameFile(x, y) && filepath.Base(a) == filepath.Base(b)
}

// output checks, before any work is done for it, that a flag's file can be made, and claims it.
func (s *streams) output(flag, path string) error {
	if path == "" {
		return nil
	}
	if err := s.claim(flag, path); path == stdoutName || err != nil {
		return err
	}
	return writable(flag, path)
}

// inPlace is output for a file that is written in place, while work goes on.
func (s *streams) inPlace(flag, path string) error {
	switch path {
	case "":
		return nil
	case stdoutName:
		return usagef("%s is -: it cannot go to standard output; name a file", flag)
	}
	return cmp.Or(s.claim(flag, path), findPlace(flag, path))
}

// findPlace checks that a file has a directory, and is none.
func findPlace(flag, path string) error {
	if info, err := os.Stat(filepath.Dir(path)); err != nil || !info.IsDir() {
		return usagef("%s %s: no directory %s", flag, path, filepath.Dir(path))
	}
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return usagef("%s %s: is a directory; name a file", flag, path)
	}
	return nil
}

// writable checks that a file can be made.
func writable(flag, path string) error {
	if err := findPlace(flag, path); err != nil {
		return err
	}
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return nil // a pipe or a device, which is opened when there is something to write
	}
	f, err := createPart(path)
	if err == nil {
		err = errors.Join(f.Close(), os.Remove(f.Name()))
	}
	if err != nil {
		return unwritable(flag, path, err)
	}
	return nil
}

// unwritable words the error of opening a file that may go by another name.
func unwritable(flag, path string, err error) error {
	return usagef("%s %s: %w", flag, path, cause(err))
}

// cause is the error without the name of the file.
func cause(err error) error {
	var of *fs.PathError
	if errors.As(err, &of) {
		return of.Err
	}
	return err
}

// onStdout says that standard output is the result's alone.
func (r *result) onStdout() bool { return r.path == stdoutName }

// write writes v, if there is anybody to write for.
func (r *result) write(v any) error {
	encode := func(out io.Writer) error {
		enc := json.NewEncoder(out)
		enc.SetEscapeHTML(false)
		enc.SetIndent("", "  ")
		return enc.Encode(v)
	}
	var err error
	switch {
	case r.out != nil:
		err = encode(r.out)
	case r.path != "":
		if err := writeFile(r.path, encode); err != nil {
			return fmt.Errorf("--json %w", err)
		}
	}
	if err != nil {
		return fmt.Errorf("--json: %w", err)
	}
	return nil
}

// close closes the device or pipe.
func (r *result) close() error {
	if r.device == nil {
		return nil
	}
	return r.device.Close()
}

// createPart creates the file that becomes path once it is complete.
func createPart(path string) (*os.File, error) {
	return os.OpenFile(fmt.Sprintf("%s.%d.partial", path, os.Getpid()), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o666)
}

// writeFile writes a temporary file and renames it, so that the file is complete or absent.
// Devices and pipes, which nothing can take the place of, are written to.
func writeFile(path string, write func(io.Writer) error) (err error) {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return fmt.Errorf("%s: %w", path, cause(err))
		}
		if err := errors.Join(write(f), f.Close()); err != nil {
			return fmt.Errorf("%s: %w", path, cause(err))
		}
		return nil
	}
	f, err := createPart(path)
	if err != nil {
		return fmt.Errorf("%s: %w", path, cause(err))
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	err = write(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("%s: %w", path, cause(err))
	}
	return os.Rename(f.Name(), path)
}
