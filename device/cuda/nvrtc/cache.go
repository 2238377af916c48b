package nvrtc

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"maps"
	"os"
	"path/filepath"
	"slices"
)

// Source is the input of one compilation.
type Source struct {
	// Name appears in the compiler's messages.
	Name string
	// Text is CUDA C++.
	Text string
	// Headers that it may include, by name.
	Headers map[string]string
	// Options besides architecture and language, as nvrtc spells them:
	// "-DTILE=128", "--use_fast_math".
	Options []string
}

// Key names the result of a compilation.
type Key [sha256.Size]byte

func (k Key) String() string { return hex.EncodeToString(k[:16]) }

// KeyOf hashes everything that shapes the result: the source with its headers and
// options, the architecture, and the compiler's version.
func KeyOf(s Source, arch, compiler string) Key {
	h := sha256.New()
	add := func(parts ...string) {
		for _, p := range parts {
			write(h, p)
		}
	}
	add(compiler, arch, s.Name, s.Text, fmt.Sprint(len(s.Options)))
	add(s.Options...)
	for _, name := range slices.Sorted(maps.Keys(s.Headers)) {
		add(name, s.Headers[name])
	}
	return Key(h.Sum(nil))
}

// write adds a string with its length, so that no two lists of strings hash alike.
func write(h hash.Hash, s string) {
	var n [8]byte
	binary.LittleEndian.PutUint64(n[:], uint64(len(s)))
	h.Write(n[:])
	h.Write([]byte(s))
}

// Cache is a folder of results. The zero value keeps nothing.
type Cache struct {
	// Dir is made when it is first needed.
	Dir string
}

// magic begins each file: what it is, and the layout's version. The sum of the content
// follows, then the content.
const magic = "moeserve cubin 1\n"

func (c Cache) file(k Key) string { return filepath.Join(c.Dir, k.String()+".cubin") }

// Load returns the result stored for a key, and whether it exists and is intact.
func (c Cache) Load(k Key) ([]byte, bool) {
	if c.Dir == "" {
		return nil, false
	}
	all, err := os.ReadFile(c.file(k))
	if err != nil {
		return nil, false
	}
	rest, ok := bytes.CutPrefix(all, []byte(magic))
	if !ok || len(rest) < sha256.Size {
		return nil, false
	}
	sum := sha256.Sum256(rest[sha256.Size:])
	if !bytes.Equal(rest[:sha256.Size], sum[:]) {
		return nil, false
	}
	return rest[sha256.Size:], true
}

// Store keeps a result. It writes a temporary file and renames it, so that readers see a
// complete file or none, even if several processes store it. Callers may ignore the error:
// a result that is not stored is compiled again.
// ---
func (c Cache) Store(k Key, cubin []byte) error {
	if c.Dir == "" {
		return nil
	}
	if err := os.MkdirAll(c.Dir, 0o755); err != nil {
		return fmt.Errorf("nvrtc: cache: %w", err)
	}
	f, err := os.CreateTemp(c.Dir, ".new-*")
	if err != nil {
		return fmt.Errorf("nvrtc: cache: %w", err)
	}
	sum := sha256.Sum256(cubin)
	_, err = f.Write(slices.Concat([]byte(magic), sum[:], cubin))
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(f.Name(), c.file(k))
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("nvrtc: cache: %w", err)
	}
	return nil
}
