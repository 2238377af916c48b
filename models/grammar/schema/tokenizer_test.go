package schema_test

import (
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/moeserve/moeserve/models/grammar"
	"github.com/moeserve/moeserve/models/grammar/schema"
	"github.com/moeserve/moeserve/models/tiny"
	"github.com/moeserve/moeserve/models/tokenizer"
)

// TestTokenizers: the text that a tokenizer makes of random tokens from masks is a value of the schema, also where it leaves
// out a space at the start (SentencePiece) or writes characters byte by byte. Families besides the built-in model's are
// those of the folder that MOESERVE_TESTDATA names.
func TestTokenizers(t *testing.T) {
	for _, family := range []string{"built-in", "mixtral", "phi3", "qwen2"} {
		t.Run(family, func(t *testing.T) {
			data, err := fs.ReadFile(tiny.FS(), "tokenizer.json")
			if family != "built-in" {
				root := os.Getenv("MOESERVE_TESTDATA")
				if root == "" {
					t.Skip("MOESERVE_TESTDATA is not set: it names the folder with published tokenizers")
				}
				data, err = os.ReadFile(filepath.Join(root, "tokenizers", family, "tokenizer.json"))
			}
			if err != nil {
				t.Fatal(err)
			}
			tok, err := tokenizer.Parse(data, nil)
			if err != nil {
				t.Fatal(err)
			}
			var tokens []grammar.Token
			for id := range int32(tok.VocabSize()) {
				if text, first, special, ok := tok.Piece(id); ok && !special {
					tokens = append(tokens, grammar.Token{ID: id, Text: text, First: first})
				}
			}
			v := grammar.NewVocabulary(tok.VocabSize(), tokens)
			r := rand.New(rand.NewPCG(5, 6))
			for _, text := range []string{
				`{"type": "object", "properties": {"a": {"type": "string", "maxLength": 12}, "b": {"type": "array", "items": {"type": "number", "minimum": -1.5}, "maxItems": 3}}, "required": ["a", "b"]}`,
				`{"type": "string", "minLength": 1, "maxLength": 20}`,
				`{"enum": [" x", "日本", "é\n", 12]}`,
				`{"type": "array", "items": {"type": "string", "pattern": "^ ?[^a-z]{3}$"}, "minItems": 2, "maxItems": 2}`,
			} {
				e, err := schema.Compile([]byte(text), schema.Options{})
				if err != nil {
					t.Fatal(err)
				}
				g, err := grammar.New(e, v)
				if err != nil {
					t.Fatal(err)
				}
				document, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
				if err != nil {
					t.Fatal(err)
				}
				c := jsonschema.NewCompiler()
				if err := c.AddResource("schema.json", document); err != nil {
					t.Fatal(err)
				}
				validator, err := c.Compile("schema.json")
				if err != nil {
					t.Fatal(err)
				}
				for range 15 {
					m := g.Matcher()
					stream := tok.NewStream(true)
					var written strings.Builder
					for n := 0; !m.Ended() && n < 500; n++ {
						bits, ids := m.Mask(), []int32(nil)
						for id := range int32(tok.VocabSize()) {
							if bits[id/32]>>(id%32)&1 != 0 {
								ids = append(ids, id)
							}
						}
						if len(ids) == 0 {
							t.Fatalf("nothing may follow %q", written.String())
						}
						id := ids[r.IntN(len(ids))]
						m.Accept(id)
						written.WriteString(stream.Push(id))
					}
					written.WriteString(stream.Flush())
					if !m.Ended() {
						continue
					}
					value, err := jsonschema.UnmarshalJSON(strings.NewReader(written.String()))
					if err == nil {
						err = validator.Validate(value)
					}
					if err != nil || !g.Match(written.String()) {
						t.Fatalf("%s: %q: %v", text, written.String(), err)
					}
				}
			}
			// A choice that begins with a space has it, though the first token's may be left out.
			g, err := grammar.New(grammar.Literals(" yes", "no", "  maybe"), v)
			if err != nil {
				t.Fatal(err)
			}
			seen := map[string]bool{}
			for range 60 {
				var ids []int32
				for m := g.Matcher(); !m.Ended(); {
					bits, may := m.Mask(), []int32(nil)
					for id := range int32(tok.VocabSize()) {
						if bits[id/32]>>(id%32)&1 != 0 {
							may = append(may, id)
						}
					}
					ids = append(ids, may[r.IntN(len(may))])
					m.Accept(ids[len(ids)-1])
				}
				seen[tok.Decode(ids, true)] = true
			}
			if len(seen) != 3 || !seen[" yes"] || !seen["no"] || !seen["  maybe"] {
				t.Errorf("the choices are %v", seen)
			}
		})
	}
}
