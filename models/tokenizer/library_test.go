package tokenizer

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	sugarme "github.com/sugarme/tokenizer"
	"github.com/sugarme/tokenizer/pretrained"

	"github.com/moeserve/moeserve/tools/racedetector"
)

var update = flag.Bool("update", false, "write testdata/library_differences.json")

// difference is how often the results of github.com/sugarme/tokenizer differ from the reference. Its encoder and decoders
// can replace ours when all counts but Strings are zero and Load is "ok".
type difference struct {
	Load              string `json:"load"`    // "ok", or how loading fails
	Strings           int    `json:"strings"` // compared
	EncodeDiffers     int    `json:"encode_differs"`
	EncodePanics      int    `json:"encode_panics"`
	DecodeDiffers     int    `json:"decode_differs"` // the decoder chain, given the tokens of the reference's ids
	DecodePanics      int    `json:"decode_panics"`
	DecodeInvalidUTF8 string `json:"decode_invalid_utf8"` // decoded text of an ill-formed sequence of bytes
}

const differencesFile = "library_differences.json"

// TestLibraryDifferences measures the library against the reference and compares with the recorded list, so that the
// list stays true, also after an upgrade. With -update it writes the list.
func TestLibraryDifferences(t *testing.T) {
	racedetector.SkipSequential(t)
	path := filepath.Join("testdata", differencesFile)
	recorded := map[string]difference{}
	if b, err := os.ReadFile(path); err == nil {
		if err := json.Unmarshal(b, &recorded); err != nil {
			t.Fatal(err)
		}
	}
	compare := func(name string, got difference) {
		if *update {
			recorded[name] = got
		} else if got != recorded[name] {
			t.Errorf("%s: measured %+v, recorded %+v: run the test with -update", name, got, recorded[name])
		}
	}
	for _, base := range []string{"tiny", "bytefallback", "unigram"} {
		t.Run(base, func(t *testing.T) {
			compare(base, measureLibrary(t, patched(t, baseFiles[base], nil), plainCases(t, base)))
		})
	}
	for _, family := range families {
		t.Run(family, func(t *testing.T) {
			data, err := os.ReadFile(testdataPath(t, "tokenizers", family, "tokenizer.json"))
			if err != nil {
				t.Fatal(err)
			}
			compare(family, measureLibrary(t, data, loadVectors(t, family)))
		})
	}
	if *update {
		b, err := json.MarshalIndent(recorded, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, append(b, '\n'), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// plainCases returns the cases of the variant that is a base itself.
func plainCases(t *testing.T, base string) []vector {
	t.Helper()
	var variants []struct {
		Base, Name string
		Cases      []vector
	}
	readJSON(t, filepath.Join("testdata", "variants.json"), &variants)
	for _, v := range variants {
		if v.Name == "plain" && v.Base == base {
			return v.Cases
		}
	}
	t.Fatalf("no plain variant of %s", base)
	return nil
}

func measureLibrary(t *testing.T, data []byte, vectors []vector) difference {
	t.Helper()
	ours, err := Parse(data, nil)
	if err != nil {
		t.Fatal(err)
	}
	got := difference{Load: "ok", Strings: len(vectors)}
	var library *sugarme.Tokenizer
	if p := panics(func() { library, err = pretrained.FromReader(bytes.NewReader(data)) }); p != "" {
		got.Load = "panic: " + p
	} else if err != nil {
		got.Load = "error: " + err.Error()
	}
	var config sugarme.Config
	if err := json.Unmarshal(data, &config); err != nil {
		t.Fatal(err)
	}
	decoder, err := pretrained.CreateDecoder(config.Decoder)
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range vectors {
		if library != nil {
			var ids []int32
			if panics(func() { ids = libraryIDs(t, library, v.Text) }) != "" {
				got.EncodePanics++
			} else if !slices.Equal(ids, v.IDs) {
				got.EncodeDiffers++
			}
		}
		want := ours.Decode(v.IDs, false) // which TestReferenceVectors and TestVariants hold to the reference
		var text string
		if panics(func() { text = decoder.Decode(tokensOf(ours, v.IDs)) }) != "" {
			got.DecodePanics++
		} else if text != want {
			got.DecodeDiffers++
		}
	}
	// Two bytes of a character of three, then a letter.
	bad := []string{"<0xE4>", "<0xBD>", "a"}
	if ours.decoder.kind == decodeBytes {
		bad = []string{byteChars[0xE4], byteChars[0xBD], "a"}
	}
	if p := panics(func() { got.DecodeInvalidUTF8 = fmt.Sprintf("%+q", decoder.Decode(bad)) }); p != "" {
		got.DecodeInvalidUTF8 = "panic: " + p
	}
	return got
}

func libraryIDs(t *testing.T, library *sugarme.Tokenizer, text string) []int32 {
	t.Helper()
	e, err := library.EncodeSingle(text, false)
	if err != nil {
		t.Fatal(err)
	}
	var ids []int32
	for _, id := range e.Ids {
		ids = append(ids, int32(id))
	}
	return ids
}

// panics runs f and returns what it panicked with, shortened.
func panics(f func()) (what string) {
	defer func() {
		if r := recover(); r != nil {
			what = fmt.Sprint(r)
			what = what[:min(len(what), 100)]
		}
	}()
	f()
	return ""
}
