package safetensors

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/moeserve/moeserve/untrusted"
)

// MaxHeaderBytes is the maximum length of a header, in bytes. The reference implementation
// has the same limit.
const MaxHeaderBytes = 100_000_000

// Limits of what a header or an index may list, above those of any published checkpoint: the
// largest has 10^5 tensors. Within them a checkpoint of any content is checked in seconds.
const (
	maxTensors    = 1 << 18 // of all files together
	maxDimensions = 64      // as PyTorch has it
	maxMetadata   = 1 << 12
)

// prefixBytes is the length of the field that holds the header's length, a
// little-endian uint64.
const prefixBytes = 8

// MetadataKey is a header key that names metadata instead of a tensor.
const MetadataKey = "__metadata__"

// entry is one tensor of a header. Offsets are in bytes from the start of the file.
type entry struct {
	name       string
	dtype      DType
	shape      []int
	begin, end int64
}

// readHeader reads and checks the header of a file of size bytes. It returns entries in
// the order of their data; empty entries at the same offset are ordered by name.
func readHeader(file string, r io.ReaderAt, size int64) ([]entry, map[string]string, error) {
	if size < prefixBytes {
		return nil, nil, damaged(file, "", "%d bytes are too few for a safetensors file", size)
	}
	var prefix [prefixBytes]byte
	if _, err := r.ReadAt(prefix[:], 0); err != nil {
		return nil, nil, NewFileError(file, err)
	}
	if string(prefix[:]) == "version " {
		return nil, nil, &FileError{
			File: file, Err: ErrDamaged,
			Reason: "this is a Git LFS pointer, not the weights",
			Advice: "fetch the file itself with \"git lfs pull\", or download it again",
		}
	}
	n := binary.LittleEndian.Uint64(prefix[:])
	switch {
	case n > MaxHeaderBytes:
		return nil, nil, damaged(file, "", "header of %d bytes is over the limit of %d bytes", n, int64(MaxHeaderBytes))
	case int64(n) > size-prefixBytes:
		return nil, nil, damaged(file, "", "header of %d bytes is longer than the file of %d bytes", n, size)
	case n < 2:
		return nil, nil, damaged(file, "", "header of %d bytes is too short for a JSON object", n)
	}
	text := make([]byte, n)
	if _, err := r.ReadAt(text, prefixBytes); err != nil {
		return nil, nil, NewFileError(file, err)
	}
	p := headerParser{file: file}
	if err := p.parse(text); err != nil {
		return nil, nil, err
	}
	if err := p.place(prefixBytes+int64(n), size); err != nil {
		return nil, nil, err
	}
	return p.entries, p.metadata, nil
}

// headerParser turns a header's JSON into entries. It walks tokens instead of
// decoding into maps, since maps hide repeated keys.
type headerParser struct {
	file     string
	dec      *json.Decoder
	entries  []entry
	metadata map[string]string
}

func (p *headerParser) parse(text []byte) error {
	if !utf8.Valid(text) {
		return damaged(p.file, "", "header is not valid UTF-8")
	}
	if text[0] != '{' {
		return damaged(p.file, "", "header does not begin with '{'")
	}
	p.dec = newDecoder(text)
	seen := map[string]bool{}
	err := object(p.dec, func(name string) error {
		if seen[name] {
			return damaged(p.file, name, "occurs twice in the header")
		}
		seen[name] = true
		if name == MetadataKey {
			return p.parseMetadata()
		}
		if len(p.entries) == maxTensors {
			return damaged(p.file, "", "header lists more than %d tensors, the maximum of a checkpoint", maxTensors)
		}
		return p.parseTensor(name)
	})
	if err != nil {
		return p.wrap("", err)
	}
	if rest := bytes.TrimLeft(text[p.dec.InputOffset():], " \t\r\n"); len(rest) > 0 {
		return damaged(p.file, "", "header has %d bytes after its JSON object", len(rest))
	}
	return nil
}

func (p *headerParser) parseMetadata() error {
	p.metadata = map[string]string{}
	return object(p.dec, func(key string) error {
		tok, err := p.dec.Token()
		if err != nil {
			return p.wrap(MetadataKey, err)
		}
		value, ok := tok.(string)
		if !ok {
			return damaged(p.file, "", "%s: %s is not a string", MetadataKey, untrusted.Quote(key))
		}
		if len(p.metadata) == maxMetadata {
			return damaged(p.file, "", "%s has more than %d entries", MetadataKey, maxMetadata)
		}
		if _, dup := p.metadata[key]; dup {
			return damaged(p.file, "", "%s: %s occurs twice", MetadataKey, untrusted.Quote(key))
		}
		p.metadata[key] = value
		return nil
	})
}

// parseTensor reads {"dtype": ..., "shape": [...], "data_offsets": [b, e]}. The
// offsets stay relative to the data section until place.
func (p *headerParser) parseTensor(name string) error {
	e := entry{name: name}
	var have struct{ dtype, shape, offsets bool }
	err := object(p.dec, func(key string) error {
		var field *bool
		switch key {
		case "dtype":
			field = &have.dtype
		case "shape":
			field = &have.shape
		case "data_offsets":
			field = &have.offsets
		default:
			return damaged(p.file, name, "unknown field %s", untrusted.Quote(key))
		}
		if *field {
			return damaged(p.file, name, "field %q occurs twice", key)
		}
		*field = true
		switch key {
		case "dtype":
			tok, err := p.dec.Token()
			if err != nil {
				return err
			}
			s, ok := tok.(string)
			if !ok {
				return damaged(p.file, name, "dtype is not a string")
			}
			if e.dtype, ok = ParseDType(s); !ok {
				return damaged(p.file, name, "unknown dtype %s", untrusted.Quote(s))
			}
		case "shape":
			dims, err := p.numbers(name, key)
			if err != nil {
				return err
			}
			e.shape = make([]int, len(dims))
			for i, d := range dims {
				e.shape[i] = int(d)
			}
		case "data_offsets":
			off, err := p.numbers(name, key)
			if err != nil {
				return err
			}
			if len(off) != 2 {
				return damaged(p.file, name, "data_offsets has %d numbers instead of 2", len(off))
			}
			e.begin, e.end = off[0], off[1]
		}
		return nil
	})
	if err != nil {
		return p.wrap(name, err)
	}
	for _, f := range []struct {
		name string
		have bool
	}{{"dtype", have.dtype}, {"shape", have.shape}, {"data_offsets", have.offsets}} {
		if !f.have {
			return damaged(p.file, name, "field %q is missing", f.name)
		}
	}
	p.entries = append(p.entries, e)
	return nil
}

// numbers reads an array of non-negative integers that fit an int.
func (p *headerParser) numbers(tensor, field string) ([]int64, error) {
	tok, err := p.dec.Token()
	if err != nil {
		return nil, err
	}
	if tok != json.Delim('[') {
		return nil, damaged(p.file, tensor, "%s is not an array", field)
	}
	var out []int64
	for p.dec.More() {
		tok, err := p.dec.Token()
		if err != nil {
			return nil, err
		}
		num, ok := tok.(json.Number)
		if !ok {
			return nil, damaged(p.file, tensor, "%s holds something that is not a number", field)
		}
		v, err := strconv.ParseUint(num.String(), 10, 64)
		if err != nil || v > math.MaxInt {
			return nil, damaged(p.file, tensor, "%s: %s is not a size", field, untrusted.Name(num.String()))
		}
		if len(out) == maxDimensions {
			return nil, damaged(p.file, tensor, "%s has more than %d numbers", field, maxDimensions)
		}
		out = append(out, int64(v))
	}
	_, err = p.dec.Token()
	return out, err
}

// wrap gives a JSON error its file and tensor; an error that has them stays.
func (p *headerParser) wrap(tensor string, err error) error {
	var fe *FileError
	if errors.As(err, &fe) {
		return err
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return damaged(p.file, tensor, "header is not valid JSON: %s", err)
}

// place checks the entries against the file, sorts them by their data, and
// makes their offsets absolute. dataStart is where the data section begins.
func (p *headerParser) place(dataStart, size int64) error {
	slices.SortFunc(p.entries, func(a, b entry) int {
		return cmp.Or(
			cmp.Compare(a.begin, b.begin),
			cmp.Compare(a.end, b.end),
			strings.Compare(a.name, b.name),
		)
	})
	data := size - dataStart
	var at int64
	for i := range p.entries {
		e := &p.entries[i]
		if e.begin > e.end {
			return damaged(p.file, e.name, "data_offsets [%d, %d] run backwards", e.begin, e.end)
		}
		if e.end > data {
			return damaged(p.file, e.name, "data_offsets [%d, %d] reach past the file's %d bytes of data",
				e.begin, e.end, data)
		}
		want, err := e.dtype.Bytes(e.shape)
		if err != nil {
			return damaged(p.file, e.name, "%s", err)
		}
		if have := e.end - e.begin; have != want {
			return damaged(p.file, e.name, "data_offsets [%d, %d] hold %d bytes, but %s %s needs %d",
				e.begin, e.end, have, e.dtype, printShape(e.shape), want)
		}
		switch {
		case e.begin < at:
			return damaged(p.file, e.name, "data_offsets [%d, %d] overlap tensor %s",
				e.begin, e.end, untrusted.Quote(p.entries[i-1].name))
		case e.begin > at:
			return damaged(p.file, e.name, "%d bytes before its data belong to no tensor", e.begin-at)
		}
		at = e.end
	}
	if at != data {
		return damaged(p.file, "", "%d bytes at the end belong to no tensor", data-at)
	}
	for i := range p.entries {
		p.entries[i].begin += dataStart
		p.entries[i].end += dataStart
	}
	return nil
}

func newDecoder(text []byte) *json.Decoder {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	return dec
}

// object reads one JSON object and calls value for each key, which must consume
// the key's value.
func object(dec *json.Decoder, value func(key string) error) error {
	tok, err := dec.Token()
	if err != nil {
		return err
	}
	if tok != json.Delim('{') {
		return errors.New("an object is expected")
	}
	for dec.More() {
		tok, err := dec.Token()
		if err != nil {
			return err
		}
		key, ok := tok.(string)
		if !ok {
			return errors.New("an object's key is not a string")
		}
		if err := value(key); err != nil {
			return err
		}
	}
	_, err = dec.Token()
	return err
}

// skipValue reads one JSON value of any kind.
func skipValue(dec *json.Decoder) error {
	for depth := 0; ; {
		tok, err := dec.Token()
		if err != nil {
			return err
		}
		switch tok {
		case json.Delim('{'), json.Delim('['):
			depth++
		case json.Delim('}'), json.Delim(']'):
			depth--
		}
		if depth == 0 {
			return nil
		}
	}
}
