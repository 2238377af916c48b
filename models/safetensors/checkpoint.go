package safetensors

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/moeserve/moeserve/untrusted"
)

// Checkpoint is an open checkpoint: the mappings of its shards and their tensors. It is
// safe for concurrent use, except that Close must come after all other use of the
// checkpoint and its tensors.
type Checkpoint struct {
	dir    string
	shards []*shard
	names  []string          // file order: shard, then offset
	byName map[string]Tensor // views into the shards' mappings
	bytes  int64
}

// shard is a mapped file, or data in the caller's memory (with nil file and mapping). It
// owns its mapping and file until close.
type shard struct {
	path     string
	file     *os.File
	mapping  []byte
	size     int64
	modified time.Time
	entries  []entry
	metadata map[string]string
}

// Open maps the checkpoint in directory dir and checks everything that does not require
// reading the weights. As in the reference implementation, a model.safetensors takes
// precedence over an index.
//
// Errors are of type *[FileError] and wrap [ErrNotFound], [ErrDamaged], or the
// operating system's error.
func Open(dir string) (*Checkpoint, error) {
	single := filepath.Join(dir, SingleFile)
	switch _, err := os.Stat(single); {
	case err == nil:
		c := &Checkpoint{dir: dir}
		return c.open(single)
	case !errors.Is(err, fs.ErrNotExist):
		return nil, NewFileError(single, err)
	}

	indexPath := filepath.Join(dir, IndexFile)
	text, err := readCapped(indexPath)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, notFound(dir)
	}
	if err != nil {
		return nil, err
	}
	weights, err := parseIndex(indexPath, text)
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, name := range slices.Compact(slices.Sorted(maps.Values(weights))) {
		paths = append(paths, filepath.Join(dir, name))
	}
	for _, path := range paths {
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return nil, &FileError{
				File: path, Reason: "the index " + IndexFile + " names this shard, but it is not there",
				Advice: "the download is incomplete; download the missing file", Err: ErrDamaged,
			}
		}
	}
	c := &Checkpoint{dir: dir}
	if _, err := c.open(paths...); err != nil {
		return nil, err
	}
	if err := c.checkIndex(weights); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// OpenFile maps one safetensors file, whatever its name, as a checkpoint of its
// own. Errors are those of Open.
func OpenFile(path string) (*Checkpoint, error) {
	c := &Checkpoint{dir: filepath.Dir(path)}
	return c.open(path)
}

// open maps the files in the order given. On an error it unmaps all of them.
func (c *Checkpoint) open(paths ...string) (*Checkpoint, error) {
	c.byName = map[string]Tensor{}
	for _, path := range paths {
		s, err := openShard(path)
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		if err := c.add(s, s.mapping); err != nil {
			return nil, errors.Join(err, c.Close())
		}
	}
	return c, nil
}

// add takes ownership of s, whose bytes are data.
func (c *Checkpoint) add(s *shard, data []byte) error {
	c.shards = append(c.shards, s)
	if n := len(c.names) + len(s.entries); n > maxTensors {
		return damaged(s.path, "", "with this file the checkpoint has more than %d tensors, the maximum", maxTensors)
	}
	for _, e := range s.entries {
		if other, dup := c.byName[e.name]; dup {
			return damaged(s.path, e.name, "is also in %s", untrusted.Name(filepath.Base(other.File)))
		}
		c.names = append(c.names, e.name)
		c.byName[e.name] = Tensor{
			Name: e.name, DType: e.dtype, Shape: e.shape, File: s.path,
			Data: data[e.begin:e.end:e.end], shard: s,
		}
		c.bytes += e.end - e.begin
	}
	return nil
}

// Parse checks a safetensors file in memory and returns it as a checkpoint. name
// identifies the file in errors. Parse does not copy data, which must not change. Errors
// are those of [Open].
func Parse(name string, data []byte) (*Checkpoint, error) {
	s := &shard{path: name, size: int64(len(data))}
	var err error
	if s.entries, s.metadata, err = readHeader(name, bytes.NewReader(data), s.size); err != nil {
		return nil, err
	}
	c := &Checkpoint{byName: map[string]Tensor{}}
	return c, c.add(s, data)
}

func (c *Checkpoint) checkIndex(weights map[string]string) error {
	for _, name := range slices.Sorted(maps.Keys(weights)) {
		t, ok := c.byName[name]
		path := filepath.Join(c.dir, weights[name])
		if !ok {
			return damaged(path, name, "the index says that it is in this file, but it is not")
		}
		if t.File != path {
			return damaged(path, name, "the index says that it is in this file, but it is in %s",
				untrusted.Name(filepath.Base(t.File)))
		}
	}
	for _, name := range c.names {
		if _, ok := weights[name]; !ok {
			return damaged(c.byName[name].File, name, "the index does not name it")
		}
	}
	return nil
}

// notFound returns an error that describes what dir holds instead of a safetensors
// checkpoint.
func notFound(dir string) error {
	e := &FileError{File: dir, Err: ErrNotFound}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return NewFileError(dir, err)
	}
	for _, name := range []string{SingleFile, IndexFile} {
		path := filepath.Join(dir, name)
		if target, err := os.Readlink(path); err == nil {
			e.File, e.Reason = path, "is a link to "+untrusted.Name(target)+", which is not there"
			e.Advice = "the download is incomplete; download the model again, or repair the link"
			return e
		}
	}
	e.Reason = "the directory has neither " + SingleFile + " nor " + IndexFile
	e.Advice = "give the directory of a complete Hugging Face checkpoint"
	for _, f := range entries {
		switch ext := filepath.Ext(f.Name()); ext {
		case ".bin", ".pt", ".pth", ".gguf":
			e.Reason += ", only " + untrusted.Name(f.Name())
			e.Advice = fmt.Sprintf("%s files are not read; download the safetensors form of the model", ext)
			return e
		case ".safetensors":
			e.Reason += ", though it has " + untrusted.Name(f.Name())
			e.Advice = "download " + IndexFile + " as well"
			return e
		}
	}
	return e
}

// readCapped reads a JSON file of at most MaxHeaderBytes.
func readCapped(path string) ([]byte, error) {
	text, err := untrusted.ReadFile(path, MaxHeaderBytes)
	var size *untrusted.SizeError
	if errors.As(err, &size) {
		return nil, damaged(path, "", "index is over the limit of %d bytes", size.Limit)
	}
	if err != nil {
		return nil, NewFileError(path, err)
	}
	return text, nil
}

// openShard opens, checks and maps one file. It reads the header with pread, so that a
// concurrent truncation causes an error instead of a fault.
func openShard(path string) (_ *shard, err error) {
	f, err := untrusted.Open(path)
	var irregular *untrusted.IrregularError
	if errors.As(err, &irregular) {
		return nil, damaged(path, "", "%s", irregular)
	}
	if err != nil {
		return nil, NewFileError(path, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	st, err := f.Stat()
	if err != nil {
		return nil, NewFileError(path, err)
	}
	s := &shard{path: path, file: f, size: st.Size(), modified: st.ModTime()}
	if s.entries, s.metadata, err = readHeader(path, f, s.size); err != nil {
		return nil, err
	}
	s.mapping, err = unix.Mmap(int(f.Fd()), 0, int(s.size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, NewFileError(path, fmt.Errorf("mmap %d bytes: %w", s.size, err))
	}
	// This is only advice: if the kernel rejects it, reads still work.
	_ = unix.Madvise(s.mapping, unix.MADV_SEQUENTIAL)
	return s, nil
}

// Close unmaps all shards. Tensor data must not be accessed afterwards. A second Close
// does nothing.
func (c *Checkpoint) Close() error {
	var errs []error
	for _, s := range c.shards {
		if s.file == nil {
			continue
		}
		mapping := s.mapping
		s.mapping = nil
		if err := unix.Munmap(mapping); err != nil {
			errs = append(errs, NewFileError(s.path, err))
		}
		if err := s.file.Close(); err != nil {
			errs = append(errs, NewFileError(s.path, err))
		}
	}
	c.shards, c.names, c.byName = nil, nil, nil
	return errors.Join(errs...)
}

// Dir returns the directory that was opened; empty for Parse.
func (c *Checkpoint) Dir() string { return c.dir }

// Len returns the number of tensors.
func (c *Checkpoint) Len() int { return len(c.names) }

// Bytes returns the size of all tensors together, in bytes.
func (c *Checkpoint) Bytes() int64 { return c.bytes }

// Names returns all tensors in file order: by shard name, then by offset. The caller owns
// the slice.
func (c *Checkpoint) Names() []string { return slices.Clone(c.names) }

// Files returns the paths of the shards in the order of Names.
func (c *Checkpoint) Files() []string {
	files := make([]string, len(c.shards))
	for i, s := range c.shards {
		files[i] = s.path
	}
	return files
}

// Metadata returns the __metadata__ of file i of Files, or nil if the file has none. The
// map must not be changed.
func (c *Checkpoint) Metadata(i int) map[string]string { return c.shards[i].metadata }

// Tensor returns the tensor called name.
func (c *Checkpoint) Tensor(name string) (Tensor, bool) {
	t, ok := c.byName[name]
	return t, ok
}

// Diff compares the checkpoint with the tensor names that a model needs. missing is in
// want's order, unexpected in file order. A repeated name in want counts once.
func (c *Checkpoint) Diff(want iter.Seq[string]) (missing, unexpected []string) {
	wanted := map[string]bool{}
	for name := range want {
		if wanted[name] {
			continue
		}
		wanted[name] = true
		if _, ok := c.byName[name]; !ok {
			missing = append(missing, name)
		}
	}
	for _, name := range c.names {
		if !wanted[name] {
			unexpected = append(unexpected, name)
		}
	}
	return missing, unexpected
}

// Verify returns an error that wraps [ErrChanged] if the size or modification time of a
// file has changed since Open.
func (c *Checkpoint) Verify() error {
	for _, s := range c.shards {
		if err := s.verify(); err != nil {
			return err
		}
	}
	return nil
}

func (s *shard) verify() error {
	if s.file == nil {
		return nil
	}
	st, err := s.file.Stat()
	if err != nil {
		return NewFileError(s.path, err)
	}
	if st.Size() != s.size {
		return s.changed("", fmt.Sprintf("its size changed from %d to %d bytes after it was opened", s.size, st.Size()))
	}
	if !st.ModTime().Equal(s.modified) {
		return s.changed("", "it was written to after it was opened")
	}
	return nil
}

func (s *shard) changed(tensor, reason string) error {
	return &FileError{
		File: s.path, Tensor: tensor, Reason: reason, Err: ErrChanged,
		Advice: "load again when nothing writes to the file any more",
	}
}
