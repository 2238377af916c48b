package grammar_test

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/moeserve/moeserve/models/grammar"
	"github.com/moeserve/moeserve/models/grammar/schema"
	"github.com/moeserve/moeserve/models/tokenizer"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// realVocabulary is that of Qwen2, of 151,936 ids, of the folder that MOESERVE_TESTDATA names.
func realVocabulary(tb testing.TB) (*grammar.Vocabulary, tokenizer.Tokenizer) {
	root := os.Getenv("MOESERVE_TESTDATA")
	if root == "" {
		tb.Skip("MOESERVE_TESTDATA is not set: it names the folder with published tokenizers")
	}
	data, err := os.ReadFile(filepath.Join(root, "tokenizers", "qwen2", "tokenizer.json"))
	if err != nil {
		tb.Fatal(err)
	}
	tok, err := tokenizer.Parse(data, nil)
	if err != nil {
		tb.Fatal(err)
	}
	var tokens []grammar.Token
	for id := range int32(tok.VocabSize()) {
		if text, first, special, ok := tok.Piece(id); ok && !special {
			tokens = append(tokens, grammar.Token{ID: id, Text: text, First: first})
		}
	}
	return grammar.NewVocabulary(151936, tokens), tok
}

// order is like what instructor and pydantic-ai send.
const order = `{"$defs": {"item": {"type": "object", "properties": {"sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, "quantity": {"type": "integer", "minimum": 1, "maximum": 999}, "price": {"type": "number", "minimum": 0}, "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}}, "required": ["sku", "quantity", "price", "note"], "additionalProperties": false}},
	"type": "object", "properties": {"customer": {"type": "string", "maxLength": 100}, "email": {"type": "string", "format": "email"}, "placed": {"type": "string", "format": "date-time"}, "status": {"enum": ["open", "paid", "shipped"]}, "items": {"type": "array", "items": {"$ref": "#/$defs/item"}}, "tags": {"type": "array", "items": {"type": "string"}}},
	"required": ["customer", "email", "placed", "status", "items", "tags"], "additionalProperties": false}`

const orderText = `{"customer": "Zoë Müller-Lüdenscheidt of Smørrebrød & Sons", "email": "zoe@example.com", "placed": "2025-02-28T13:45:10Z", "status": "paid", "items": [{"sku": "ABC-1234", "quantity": 12, "price": 129.5, "note": "gift wrapping, please: \"with a bow\""}, {"sku": "XYZ-0001", "quantity": 1, "price": 3, "note": null}], "tags": ["priority", "repeat customer", "北京"]}`

// BenchmarkMask is the time of one mask of a real vocabulary, which the engine needs for each token of each sequence. First:
// no mask is kept yet, as in the first request with a schema; else all but those of new states are.
func BenchmarkMask(b *testing.B) {
	v, tok := realVocabulary(b)
	schemaOf := func(text string) grammar.Expr {
		e, err := schema.Compile([]byte(text), schema.Options{})
		if err != nil {
			b.Fatal(err)
		}
		return e
	}
	for name, e := range map[string]grammar.Expr{"schema=order": schemaOf(order), "schema=any-object": schema.AnyObject(schema.Options{})} {
		ids, err := tok.Encode(orderText, false)
		if err != nil {
			b.Fatal(err)
		}
		for _, warm := range []string{"first", "warm"} {
			b.Run(name+"/"+warm, func(b *testing.B) {
				var g *grammar.Grammar
				var times []time.Duration
				for b.Loop() {
					b.StopTimer()
					if g == nil || warm == "first" {
						if g, err = grammar.New(e, v); err != nil {
							b.Fatal(err)
						}
					}
					b.StartTimer()
					m := g.Matcher()
					for _, id := range ids {
						start := time.Now()
						m.Mask()
						times = append(times, time.Since(start))
						if !m.Accept(id) {
							b.Fatalf("token %d is refused", id)
						}
					}
				}
				slices.Sort(times)
				b.ReportMetric(float64(times[len(times)/2].Nanoseconds())/1e3, "us/mask-p50")
				b.ReportMetric(float64(times[len(times)*99/100].Nanoseconds())/1e3, "us/mask-p99")
				b.ReportMetric(float64(times[len(times)-1].Nanoseconds())/1e3, "us/mask-max")
				b.ReportMetric(float64(len(ids)), "tokens")
			})
		}
	}
	b.Run("compile", func(b *testing.B) {
		for b.Loop() {
			if _, err := grammar.New(schemaOf(order), v); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("compile-and-warm", func(b *testing.B) {
		for b.Loop() {
			g, err := grammar.New(schemaOf(order), v)
			if err != nil {
				b.Fatal(err)
			}
			g.Warm()
		}
	})
}

// TestRealVocabulary: masks of a real vocabulary are exactly the tokens that can follow, on texts that these write.
func TestRealVocabulary(t *testing.T) {
	racedetector.SkipSequential(t)
	v, tok := realVocabulary(t)
	e, err := schema.Compile([]byte(order), schema.Options{})
	if err != nil {
		t.Fatal(err)
	}
	g, err := grammar.New(e, v)
	if err != nil {
		t.Fatal(err)
	}
	ids, err := tok.Encode(orderText, false)
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, 2))
	m, text := g.Matcher(), ""
	for n, id := range ids {
		bits := m.Mask()
		for range 2000 {
			other := int32(r.IntN(151936))
			piece, _, special, ok := tok.Piece(other)
			if got, want := bits[other/32]>>(other%32)&1 != 0, ok && !special && g.Begins(text+piece); got != want {
				t.Fatalf("behind %q token %q: %v, want %v", text, piece, got, want)
			}
		}
		if !m.Accept(id) {
			t.Fatalf("token %d is refused", n)
		}
		piece, _, _, _ := tok.Piece(id)
		text += piece
	}
	if !m.Ended() || text != orderText {
		t.Errorf("%q has not ended", text)
	}
}
