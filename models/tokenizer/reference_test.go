package tokenizer

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/moeserve/moeserve/tools/racedetector"
)

// families are the published tokenizers that MOESERVE_TESTDATA holds with vectors from the reference.
var families = []string{"mixtral", "phi3", "qwen2"}

// testdataPath returns a path below MOESERVE_TESTDATA: data of other people, which is not part of the project.
func testdataPath(t testing.TB, elem ...string) string {
	t.Helper()
	root := os.Getenv("MOESERVE_TESTDATA")
	if root == "" {
		t.Skip("MOESERVE_TESTDATA is not set: it names the folder with published tokenizers and reference vectors")
	}
	return filepath.Join(append([]string{root}, elem...)...)
}

func loadFamily(t testing.TB, family string) *Pipeline {
	t.Helper()
	text, err := os.ReadFile(testdataPath(t, "tokenizers", family, "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	tok, err := Parse(text, nil)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// must is the result of an Encode that cannot fail.
func must(ids []int32, err error) []int32 {
	if err != nil {
		panic(err)
	}
	return ids
}

func tokensOf(tok *Pipeline, ids []int32) []string {
	var out []string
	for _, id := range ids {
		if s, ok := tok.Token(id); ok {
			out = append(out, s)
		}
	}
	return out
}

func readJSON(t testing.TB, path string, v any) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, v); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

// vector is one string with what the reference makes of it.
type vector struct {
	Text        string  `json:"s"`
	IDs         []int32 `json:"ids"`
	WithSpecial []int32 `json:"sp"`
	Decoded     string  `json:"dec"`
	DecodedSkip string  `json:"decs"`
}

func loadVectors(t testing.TB, family string) []vector {
	t.Helper()
	var vs []vector
	readJSON(t, testdataPath(t, "tokenizers", family, "vectors.json"), &vs)
	if len(vs) != 2944 {
		t.Fatalf("%s has %d vectors, want 2944", family, len(vs))
	}
	return vs
}

func TestReferenceVectors(t *testing.T) {
	racedetector.SkipSequential(t)
	for _, family := range families {
		t.Run(family, func(t *testing.T) {
			tok := loadFamily(t, family)
			for _, v := range loadVectors(t, family) {
				if got := must(tok.Encode(v.Text, false)); !slices.Equal(got, v.IDs) {
					t.Errorf("Encode(%q) = %v, want %v", v.Text, got, v.IDs)
				}
				if got := must(tok.Encode(v.Text, true)); !slices.Equal(got, v.WithSpecial) {
					t.Errorf("Encode(%q) with special tokens = %v, want %v", v.Text, got, v.WithSpecial)
				}
				if got := tok.Decode(v.IDs, false); got != v.Decoded {
					t.Errorf("Decode(%v) = %q, want %q", v.IDs, got, v.Decoded)
				}
				if got := tok.Decode(v.IDs, true); got != v.DecodedSkip {
					t.Errorf("Decode(%v) without special tokens = %q, want %q", v.IDs, got, v.DecodedSkip)
				}
				for _, skip := range []bool{false, true} {
					checkStream(t, tok, v.IDs, skip)
				}
			}
		})
	}
}

// checkStream holds a Stream to its promise for one sequence of ids.
func checkStream(t *testing.T, tok *Pipeline, ids []int32, skip bool) {
	t.Helper()
	s := tok.NewStream(skip)
	want := tok.Decode(ids, skip)
	for range 2 { // Flush makes a stream ready for the next sequence
		var got string
		for i, id := range ids {
			piece := s.Push(id)
			if !utf8.ValidString(piece) {
				t.Fatalf("Push(%d) of %v at %d = %q, which is not whole characters", id, ids, i, piece)
			}
			got += piece
		}
		if got += s.Flush(); got != want {
			t.Fatalf("stream of %v (skip %v) = %q, Decode = %q", ids, skip, got, want)
		}
	}
}

// longTexts returns the texts of testdata/make_reference.py.
func longTexts(t testing.TB) map[string][]string {
	t.Helper()
	var prompts []string
	lines := func(path string, each func(line []byte)) []byte {
		b, err := os.ReadFile(testdataPath(t, "mtbench", path))
		if err != nil {
			t.Fatal(err)
		}
		for line := range bytes.Lines(b) {
			each(line)
		}
		return b
	}
	lines("question.jsonl", func(line []byte) {
		var q struct{ Turns []string }
		if err := json.Unmarshal(line, &q); err != nil {
			t.Fatal(err)
		}
		prompts = append(prompts, q.Turns...)
	})
	dialogues := lines("mtbench101.jsonl", func(line []byte) {
		var d struct{ History []struct{ User string } }
		if err := json.Unmarshal(line, &d); err != nil {
			t.Fatal(err)
		}
		for _, turn := range d.History {
			prompts = append(prompts, turn.User)
		}
	})
	part := dialogues[:700<<10]
	var mixed strings.Builder
	mixed.Write(part[:bytes.LastIndexByte(part, '\n')+1])
	vectors := loadVectors(t, "qwen2")
	for mixed.Len() < 1<<20 {
		for _, v := range vectors {
			mixed.WriteString(v.Text)
			mixed.WriteByte('\n')
		}
	}
	return map[string][]string{"mixed": {mixed.String()}, "mtbench": prompts}
}

// TestReferenceLongTexts compares digests of ids over the MT-Bench prompts and a megabyte of mixed text.
func TestReferenceLongTexts(t *testing.T) {
	racedetector.SkipSequential(t)
	type digest struct {
		Tokens  int
		Strings int
		Bytes   int
		SHA256  string
	}
	var want map[string]map[string]digest
	readJSON(t, filepath.Join("testdata", "reference.json"), &want)
	texts := longTexts(t)
	for name, parts := range texts {
		h, n := sha256.New(), 0
		for _, s := range parts {
			n += len(s)
			h.Write([]byte(s))
		}
		got := digest{Strings: len(parts), Bytes: n, SHA256: hex.EncodeToString(h.Sum(nil))}
		if got != want["texts"][name] {
			t.Fatalf("text %s is %+v, and the digests are of %+v: run testdata/make_reference.py", name, got, want["texts"][name])
		}
	}
	for _, family := range families {
		t.Run(family, func(t *testing.T) {
			tok := loadFamily(t, family)
			for _, name := range []string{"mixed", "mixed", "mtbench"} { // the second time from the cache
				h, n := sha256.New(), 0
				var raw []byte
				for _, s := range texts[name] {
					ids := must(tok.Encode(s, true))
					n += len(ids)
					raw = raw[:0]
					for _, id := range ids {
						raw = binary.LittleEndian.AppendUint32(raw, uint32(id))
					}
					h.Write(raw)
				}
				got := digest{Tokens: n, SHA256: hex.EncodeToString(h.Sum(nil))}
				if got != want[family][name] {
					t.Errorf("%s: %+v, want %+v", name, got, want[family][name])
				}
			}
		})
	}
}
