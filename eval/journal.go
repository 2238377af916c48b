package eval

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/untrusted"
)

// Journal is a file to which a sweep appends a JSON line per finished cell, so that an
// interrupted sweep can go on. Its first line is the configuration of the sweep.
type Journal struct {
	file *os.File
	// Results that the file had already.
	Results []Result
}

// journalHead is the first line.
type journalHead struct {
	Sweep map[string]string `json:"sweep"`
}

// OpenJournal opens the file at path, or creates it. config has what a sweep's results
// depend on, by name; a file of another configuration is an error that wraps ErrInput
// and names the difference. An incomplete last line is dropped.
func OpenJournal(path string, config map[string]string) (_ *Journal, err error) {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() { // opening a device may do something
		return nil, Inputf("%s is not a regular file; name another", path)
	}
	_, err = os.Stat(path)
	created := errors.Is(err, fs.ErrNotExist)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return nil, &inputError{err}
	}
	defer func() {
		if err == nil {
			return
		}
		if err = errors.Join(err, f.Close()); created {
			err = errors.Join(err, os.Remove(path))
		}
	}()
	if info, err := f.Stat(); err == nil && !info.Mode().IsRegular() {
		return nil, Inputf("%s is not a regular file; name another", path)
	}
	data, err := io.ReadAll(io.LimitReader(f, untrusted.MaxData+1))
	if err != nil {
		return nil, fmt.Errorf("eval: read the finished cells: %w", err)
	}
	if len(data) > untrusted.MaxData {
		return nil, Inputf("%s is larger than %d MiB; name another file", path, untrusted.MaxData>>20)
	}
	j := &Journal{file: f}
	whole := bytes.LastIndexByte(data, '\n') + 1
	if !beginsJournal(data) {
		return nil, Inputf("%s is not a file of --resume: its first line is not a sweep's configuration; name another file", path)
	}
	n := 0
	for line := range bytes.Lines(data[:whole]) {
		n++
		if err := j.read(path, n, line, config); err != nil {
			return nil, err
		}
	}
	if err := f.Truncate(int64(whole)); err != nil {
		return nil, fmt.Errorf("eval: %w", err)
	}
	if _, err := f.Seek(int64(whole), io.SeekStart); err != nil {
		return nil, fmt.Errorf("eval: %w", err)
	}
	if n == 0 {
		if err := j.append(journalHead{config}); err != nil {
			return nil, fmt.Errorf("eval: begin the file: %w", err)
		}
	}
	return j, nil
}

// beginsJournal reports whether a file is a journal by its first bytes: of one whose first line is incomplete there may
// be few.
func beginsJournal(data []byte) bool {
	const head = `{"sweep":`
	n := min(len(head), len(data))
	return bytes.IndexByte(data, '\n') >= 0 || string(data[:n]) == head[:n]
}

// read parses line n.
func (j *Journal) read(path string, n int, line []byte, config map[string]string) error {
	if n > 1 {
		var r Result
		if err := json.Unmarshal(line, &r); err != nil || r.Tier == configs.AnyTier {
			return Inputf("%s: line %d is not the result of a cell; repair it, or name another file", path, n)
		}
		j.Results = append(j.Results, r)
		return nil
	}
	var head journalHead
	if err := json.Unmarshal(line, &head); err != nil || head.Sweep == nil {
		return Inputf("%s is not a file of --resume: its first line is not a sweep's configuration; name another file", path)
	}
	names := slices.Sorted(maps.Keys(config))
	for name := range head.Sweep {
		if _, ok := config[name]; !ok {
			names = append(names, name)
		}
	}
	for _, name := range names {
		if was, is := head.Sweep[name], config[name]; was != is {
			return Inputf("%s is of another configuration: it has %s %q, this sweep %q; name another file, or use the same settings", path, name, was, is)
		}
	}
	return nil
}

// Append writes a finished cell and syncs it to disk.
func (j *Journal) Append(r Result) error {
	if err := j.append(r); err != nil {
		return fmt.Errorf("eval: write a finished cell: %w", err)
	}
	return nil
}

func (j *Journal) append(v any) error {
	line, err := json.Marshal(v)
	if err == nil {
		_, err = j.file.Write(append(line, '\n'))
	}
	if err == nil {
		err = j.file.Sync()
	}
	return err
}

// Close closes the file.
func (j *Journal) Close() error { return j.file.Close() }
