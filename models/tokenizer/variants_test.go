package tokenizer

import (
	"encoding/json"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// baseFiles are the tokenizers of testdata that variants start from.
var baseFiles = map[string]string{"tiny": "tiny_tokenizer.json", "bytefallback": "tiny_bytefallback.json", "unigram": "tiny_unigram.json"}

var variantsFile = flag.String("variants", filepath.Join("testdata", "variants.json"), "the cases of TestVariants")

// TestVariants compares small tokenizers that use every feature with the reference (testdata/make_variants.py).
func TestVariants(t *testing.T) {
	var variants []struct {
		Base  string                     `json:"base"`
		Name  string                     `json:"name"`
		Patch map[string]json.RawMessage `json:"patch"`
		Cases []struct {
			Text        string  `json:"s"`
			IDs         []int32 `json:"ids"`
			WithSpecial []int32 `json:"sp"`
			Decode      []int32 `json:"d"`
			Decoded     string  `json:"dec"`
			DecodedSkip string  `json:"decs"`
		} `json:"cases"`
	}
	readJSON(t, *variantsFile, &variants)
	if len(variants) == 0 {
		t.Fatal("no variants")
	}
	for _, v := range variants {
		t.Run(v.Base+"/"+v.Name, func(t *testing.T) {
			tok, err := Parse(patched(t, baseFiles[v.Base], v.Patch), nil)
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range v.Cases {
				for _, cache := range []string{"cold", "warm"} {
					if got := must(tok.Encode(c.Text, false)); !slices.Equal(got, c.IDs) {
						t.Errorf("%s: Encode(%q) = %v, want %v", cache, c.Text, got, c.IDs)
					}
				}
				if got := must(tok.Encode(c.Text, true)); !slices.Equal(got, c.WithSpecial) {
					t.Errorf("Encode(%q) with special tokens = %v, want %v", c.Text, got, c.WithSpecial)
				}
				if got := tok.Decode(c.Decode, false); got != c.Decoded {
					t.Errorf("Decode(%v) = %q, want %q", c.Decode, got, c.Decoded)
				}
				if got := tok.Decode(c.Decode, true); got != c.DecodedSkip {
					t.Errorf("Decode(%v) without special tokens = %q, want %q", c.Decode, got, c.DecodedSkip)
				}
				for _, ids := range [][]int32{c.IDs, c.WithSpecial, c.Decode} {
					checkStream(t, tok, ids, false)
					checkStream(t, tok, ids, true)
				}
			}
		})
	}
}

// patched returns a tokenizer.json of testdata with some keys replaced, those of model one by one.
func patched(t testing.TB, base string, patch map[string]json.RawMessage) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", base))
	if err != nil {
		t.Fatal(err)
	}
	return patchJSON(t, b, patch)
}

func patchJSON(t testing.TB, base []byte, patch map[string]json.RawMessage) []byte {
	t.Helper()
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(base, &fields); err != nil {
		t.Fatal(err)
	}
	for key, value := range patch {
		if key == "model" {
			var keys map[string]json.RawMessage
			if err := json.Unmarshal(value, &keys); err != nil {
				t.Fatal(err)
			}
			var model map[string]json.RawMessage
			if err := json.Unmarshal(fields["model"], &model); err != nil {
				t.Fatal(err)
			}
			maps.Copy(model, keys)
			value, _ = json.Marshal(model)
		}
		fields[key] = value
	}
	out, err := json.Marshal(fields)
	if err != nil {
		t.Fatal(err)
	}
	return out
}
