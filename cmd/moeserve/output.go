package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// stdoutName names standard output where a file is asked for.
const stdoutName = "-"

// result is where a command's JSON goes: nowhere, standard output, or a file that
// is there, complete, or not at all.
type result struct {
	path string
	out  io.Writer
	file *os.File // that becomes path; nil where out is not a file of ours
}

// openResult checks that the result can be written before any work is done for it.
// The caller closes it.
func openResult(path string, stdout io.Writer) (*result, error) {
	switch path {
	case "":
		return &result{}, nil
	case stdoutName:
		return &result{path: path, out: stdout}, nil
	}
	info, err := os.Stat(path)
	switch {
	case err == nil && info.IsDir():
		return nil, usagef("--json %s is a directory; give a file", path)
	case err == nil && !info.Mode().IsRegular():
		// A pipe or a device: nothing can take its place.
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return nil, unwritable(path, err)
		}
		return &result{path: path, out: f}, nil
	}
	part := fmt.Sprintf("%s.%d.partial", path, os.Getpid())
	f, err := os.OpenFile(part, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return nil, unwritable(path, err)
	}
	return &result{path: path, out: f, file: f}, nil
}

// unwritable words the error of opening a file that may go by another name.
func unwritable(path string, err error) error {
	var of *fs.PathError
	if errors.As(err, &of) {
		err = of.Err
	}
	return usagef("--json %s: %w", path, err)
}

// wanted says whether there is anybody to write for.
func (r *result) wanted() bool { return r.out != nil }

// onStdout says that standard output is the result's alone.
func (r *result) onStdout() bool { return r.path == stdoutName }

// write writes v and puts the file in its place.
func (r *result) write(v any) error {
	if !r.wanted() {
		return nil
	}
	enc := json.NewEncoder(r.out)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("--json: %w", err)
	}
	if r.file == nil {
		return nil
	}
	if err := r.file.Close(); err != nil {
		return fmt.Errorf("--json: %w", err)
	}
	part := r.file.Name()
	r.file = nil
	if err := os.Rename(part, r.path); err != nil {
		return errors.Join(fmt.Errorf("--json: %w", err), os.Remove(part))
	}
	return nil
}

// close removes what was not written to its end.
func (r *result) close() error {
	if r.file == nil {
		return nil
	}
	part := r.file.Name()
	err := errors.Join(r.file.Close(), os.Remove(part))
	r.file = nil
	return err
}
