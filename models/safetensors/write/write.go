// Package write writes Hugging Face checkpoints in the safetensors format, one tensor at a
// time: Save a whole one, Create a single file. Package safetensors reads them.
package write

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moeserve/moeserve/models/safetensors"
)

// Spec declares one tensor to be written.
type Spec struct {
	Name  string
	DType safetensors.DType
	Shape []int // slowest dimension first; empty for a scalar
}

// Bytes returns the size of the tensor's data, or an error if the size is invalid or too
// large for a file.
func (s Spec) Bytes() (int64, error) {
	n, err := s.DType.Bytes(s.Shape)
	if err != nil {
		return 0, fmt.Errorf("safetensors: tensor %q: %w", s.Name, err)
	}
	return n, nil
}

// Writer writes one safetensors file. All tensors are declared at Create, since
// the header comes first and holds their offsets; their data follows in any
// order, each tensor once.
//
// The same declarations and data give the same bytes: tensors lie by falling
// element size and type, then by name, so that each is aligned; the header is padded with
// spaces to a multiple of 8 bytes. The file appears under its name only when
// Close has succeeded.
type Writer struct {
	path   string
	file   *os.File // temporary, beside path
	header []byte
	slots  map[string]slot
	specs  []Spec
	left   int // tensors not yet written
}

type slot struct {
	begin, end int64 // bytes from the file's start
	written    bool
}

// Create starts the file at path with the given tensors and __metadata__, which may be
// nil. Tools of the reference implementation expect the metadata {"format": "pt"}. The
// caller must end with Close or Abort.
func Create(path string, specs []Spec, metadata map[string]string) (*Writer, error) {
	w := &Writer{path: path, specs: slices.Clone(specs), slots: make(map[string]slot, len(specs)), left: len(specs)}
	slices.SortFunc(w.specs, func(a, b Spec) int {
		return cmp.Or(-cmp.Compare(a.DType, b.DType), strings.Compare(a.Name, b.Name))
	})
	if err := w.layOut(metadata); err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".partial-*")
	if err != nil {
		return nil, safetensors.NewFileError(path, err)
	}
	w.file = f
	if _, err := f.WriteAt(w.header, 0); err != nil {
		return nil, errors.Join(safetensors.NewFileError(path, err), w.Abort())
	}
	return w, nil
}

// layOut makes the header and gives each tensor its place.
func (w *Writer) layOut(metadata map[string]string) error {
	var b bytes.Buffer
	b.WriteByte('{')
	if metadata != nil {
		// encoding/json sorts a map's keys.
		if err := field(&b, safetensors.MetadataKey, metadata); err != nil {
			return err
		}
	}
	var at int64
	for _, s := range w.specs {
		n, err := s.Bytes()
		if err != nil {
			return err
		}
		if _, dup := w.slots[s.Name]; dup || s.Name == safetensors.MetadataKey {
			return fmt.Errorf("safetensors: write %s: tensor %q is declared twice or has a reserved name", w.path, s.Name)
		}
		if at+n < at {
			return fmt.Errorf("safetensors: write %s: the tensors are too large together", w.path)
		}
		shape := s.Shape
		if shape == nil {
			shape = []int{}
		}
		err = field(&b, s.Name, struct {
			DType   string   `json:"dtype"`
			Shape   []int    `json:"shape"`
			Offsets [2]int64 `json:"data_offsets"`
		}{s.DType.String(), shape, [2]int64{at, at + n}})
		if err != nil {
			return err
		}
		w.slots[s.Name] = slot{begin: at, end: at + n}
		at += n
	}
	b.WriteByte('}')
	for b.Len()%8 != 0 {
		b.WriteByte(' ')
	}
	if b.Len() > safetensors.MaxHeaderBytes {
		return fmt.Errorf("safetensors: write %s: header of %d bytes is over the limit of %d", w.path, b.Len(), int64(safetensors.MaxHeaderBytes))
	}
	w.header = binary.LittleEndian.AppendUint64(nil, uint64(b.Len()))
	w.header = append(w.header, b.Bytes()...)
	for name, s := range w.slots {
		s.begin += int64(len(w.header))
		s.end += int64(len(w.header))
		w.slots[name] = s
	}
	return nil
}

// field appends "key":value to an object that is being written.
func field(b *bytes.Buffer, key string, value any) error {
	if b.Len() > 1 {
		b.WriteByte(',')
	}
	enc := json.NewEncoder(b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(key); err != nil {
		return err
	}
	b.Truncate(b.Len() - 1) // Encode ends with a newline
	b.WriteByte(':')
	if err := enc.Encode(value); err != nil {
		return err
	}
	b.Truncate(b.Len() - 1)
	return nil
}

// Specs returns the tensors in file order. Writing them in this order writes the file
// sequentially.
func (w *Writer) Specs() []Spec { return slices.Clone(w.specs) }

// Write writes a tensor's data: its elements in row-major order, little-endian.
func (w *Writer) Write(name string, data []byte) error {
	return w.WriteFrom(name, bytes.NewReader(data))
}

// WriteFrom writes a tensor's data from r, which must return exactly the tensor's bytes
// and then EOF.
func (w *Writer) WriteFrom(name string, r io.Reader) error {
	s, ok := w.slots[name]
	switch {
	case !ok:
		return fmt.Errorf("safetensors: write %s: tensor %q was not declared", w.path, name)
	case s.written:
		return fmt.Errorf("safetensors: write %s: tensor %q was written before", w.path, name)
	}
	want := s.end - s.begin
	// Excess data must not reach the file, because it would overwrite the next tensor.
	n, err := io.Copy(io.NewOffsetWriter(w.file, s.begin), io.LimitReader(r, want))
	if err != nil {
		return fmt.Errorf("safetensors: write %s: tensor %q: %w", w.path, name, err)
	}
	if n < want {
		return fmt.Errorf("safetensors: write %s: tensor %q: %d bytes given, %d needed", w.path, name, n, want)
	}
	switch _, err := io.ReadFull(r, make([]byte, 1)); {
	case err == nil:
		return fmt.Errorf("safetensors: write %s: tensor %q: more than the %d bytes it needs", w.path, name, want)
	case !errors.Is(err, io.EOF):
		return fmt.Errorf("safetensors: write %s: tensor %q: %w", w.path, name, err)
	}
	s.written = true
	w.slots[name] = s
	w.left--
	return nil
}

// Close finishes the file and renames it to its path. If tensors are missing or an
// operation fails, it removes the file. A second Close does nothing.
func (w *Writer) Close() error {
	if w.file == nil {
		return nil
	}
	if w.left > 0 {
		var missing []string
		for _, s := range w.specs {
			if !w.slots[s.Name].written {
				missing = append(missing, s.Name)
			}
		}
		err := fmt.Errorf("safetensors: write %s: not written: tensor %q of %d missing", w.path, missing[0], len(missing))
		return errors.Join(err, w.Abort())
	}
	f := w.file
	// CreateTemp makes the file private (0600), but checkpoints are expected to be
	// readable by all users.
	err := f.Chmod(0o644)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), w.path)
	}
	w.file = nil
	if err != nil {
		return errors.Join(safetensors.NewFileError(w.path, err), os.Remove(f.Name()))
	}
	return nil
}

// Abort removes the unfinished file. After Close it does nothing.
func (w *Writer) Abort() error {
	if w.file == nil {
		return nil
	}
	f := w.file
	w.file = nil
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// ShardName returns the conventional name of shard i of n, counted from 0:
// model-00001-of-00007.safetensors.
func ShardName(i, n int) string {
	return fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, n)
}

// Save writes a checkpoint into the directory dir, which must exist. The tensors
// go to shards in the order given; a shard is closed before it would exceed
// shardBytes of data, so that only a single tensor may be larger. One shard
// becomes model.safetensors; several get an index, which is written last.
// shardBytes 0 means one shard.
//
// data is called once per tensor, from the calling goroutine, and returns a
// reader of its bytes; Save reads it before the next call, so memory stays at
// what data needs for one tensor.
func Save(dir string, specs []Spec, shardBytes int64, data func(Spec) (io.Reader, error)) error {
	var shards [][]Spec
	var total, inShard int64
	for _, s := range specs {
		n, err := s.Bytes()
		if err != nil {
			return err
		}
		if len(shards) == 0 || shardBytes > 0 && inShard > 0 && inShard+n > shardBytes {
			shards = append(shards, nil)
			inShard = 0
		}
		last := len(shards) - 1
		shards[last] = append(shards[last], s)
		inShard += n
		total += n
	}
	if len(shards) <= 1 {
		return saveShard(filepath.Join(dir, safetensors.SingleFile), specs, data)
	}
	weights := make(map[string]string, len(specs))
	for i, shard := range shards {
		name := ShardName(i, len(shards))
		if err := saveShard(filepath.Join(dir, name), shard, data); err != nil {
			return err
		}
		for _, s := range shard {
			if _, dup := weights[s.Name]; dup {
				return fmt.Errorf("safetensors: save %s: tensor %q is given twice", dir, s.Name)
			}
			weights[s.Name] = name
		}
	}
	text, err := marshalIndex(weights, total)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, safetensors.IndexFile)
	if err := os.WriteFile(path, text, 0o644); err != nil {
		return safetensors.NewFileError(path, err)
	}
	return nil
}

func saveShard(path string, specs []Spec, data func(Spec) (io.Reader, error)) error {
	w, err := Create(path, specs, map[string]string{"format": "pt"})
	if err != nil {
		return err
	}
	for _, s := range w.Specs() {
		r, err := data(s)
		if err == nil {
			err = w.WriteFrom(s.Name, r)
		}
		if err != nil {
			return errors.Join(err, w.Abort())
		}
	}
	return w.Close()
}

// index is the file that names the shards; encoding/json sorts a map's keys.
type index struct {
	Metadata struct {
		TotalSize int64 `json:"total_size"` // bytes
	} `json:"metadata"`
	WeightMap map[string]string `json:"weight_map"`
}

func marshalIndex(weights map[string]string, totalBytes int64) ([]byte, error) {
	ix := index{WeightMap: weights}
	ix.Metadata.TotalSize = totalBytes
	text, err := json.MarshalIndent(ix, "", "  ")
	return append(text, '\n'), err
}
