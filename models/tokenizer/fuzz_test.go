package tokenizer

import (
	"encoding/binary"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/moeserve/moeserve/models/tokenizer/internal/pattern"
)

// FuzzLoad feeds foreign tokenizer.json and tokenizer_config.json bytes. What loads can encode and decode.
func FuzzLoad(f *testing.F) {
	// Small, as the fuzzer needs thousands of runs to get anywhere.
	const head = `{"version": "1.0", "model": {"type": "BPE", "unk_token": "<s>", "fuse_unk": true, "vocab": {"<s>": 0, "t": 1, "h": 2, "th": 3, "<0xE4>": 4, "Ġ": 5}, "merges": ["t h"]}, `
	f.Add([]byte(head+`"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}, {"type": "Replace", "pattern": {"Regex": " +"}, "content": "_"}]}}`),
		[]byte(`{"add_bos_token": true, "bos_token": {"content": "<s>"}}`))
	f.Add([]byte(head+`"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": false}, {"type": "Split", "pattern": {"Regex": "(?i:th)|\\s+(?!\\S)"}, "behavior": "MergedWithNext", "invert": true}, {"type": "ByteLevel"}]},
		"post_processor": {"type": "RobertaProcessing", "sep": ["h", 2], "cls": ["<s>", 0]}, "decoder": {"type": "ByteLevel"}}`), []byte(nil))
	f.Add([]byte(`{"model": {"type": "Unigram", "unk_id": 0, "byte_fallback": true, "vocab": [["<unk>", 0], ["t", -1.5], ["the", -2], ["▁", -3], ["<0xC3>", -9]]},
		"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"},
		"decoder": {"type": "Sequence", "decoders": [{"type": "Metaspace", "replacement": "▁"}, {"type": "Strip", "content": "t", "start": 1, "stop": 1}, {"type": "ByteFallback"}, {"type": "Fuse"}]}}`), []byte(`{}`))
	f.Add([]byte(`{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
		"added_tokens": [{"id": 3, "content": " ", "rstrip": true, "normalized": true}],
		"pre_tokenizer": {"type": "Metaspace", "replacement": "a", "split": true},
		"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": "a", "start": 2, "stop": 0}]}}`),
		[]byte(`{"added_tokens_decoder": {"7": {"content": "ab"}}}`))
	f.Fuzz(func(t *testing.T, tokenizerJSON, configJSON []byte) {
		tok, err := Parse(tokenizerJSON, configJSON)
		if err != nil {
			return
		}
		if n := tok.VocabSize(); n > maxID+1 {
			t.Fatalf("%d ids", n)
		}
		ids, err := tok.Encode("the  ab <s> é中\U0001F600\n", true)
		if err != nil && !errors.Is(err, pattern.ErrSteps) {
			t.Fatal(err)
		}
		if text := tok.Decode(ids, false); !utf8.ValidString(text) {
			t.Fatalf("text %q", text)
		}
		checkStream(t, tok, ids, true)
	})
}

// FuzzStream feeds any ids to a stream: its pieces are whole characters, and together the full text.
func FuzzStream(f *testing.F) {
	var toks []*Pipeline
	for base := range baseFiles {
		toks = append(toks, loadBase(f, base))
	}
	f.Add([]byte{4, 0, 0, 1, 1, 2, 200, 0})
	f.Add([]byte{0xe7, 0, 0xc0, 0, 0xa3, 0, 0xff, 0xff, 1, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		ids := make([]int32, 0, len(b)/2)
		for ; len(b) >= 2; b = b[2:] {
			ids = append(ids, int32(int16(binary.LittleEndian.Uint16(b))))
		}
		for _, tok := range toks {
			checkStream(t, tok, ids, false)
			checkStream(t, tok, ids, true)
		}
	})
}

// FuzzEncodeDecode feeds any text: ids are tokens, and give the text back. A byte-level tokenizer without normalizer
// loses nothing; one with byte fallback takes its replacement character for a space.
func FuzzEncodeDecode(f *testing.F) {
	tiny, fallback := loadBase(f, "tiny"), loadBase(f, "bytefallback")
	f.Add("the expert moves  from host\n\tto peer's 12345")
	f.Add("é中😀\u0301 <|im_start|> <s>")
	f.Add("\xff\xe4\xbd")
	f.Fuzz(func(t *testing.T, text string) {
		want := text
		if !utf8.ValidString(text) {
			want = string(appendLossy(nil, []byte(text)))
		}
		for _, tok := range []*Pipeline{tiny, fallback} {
			ids := must(tok.Encode(text, false))
			for _, id := range ids {
				if _, ok := tok.Token(id); !ok {
					t.Fatalf("Encode(%q) has id %d, which is no token", text, id)
				}
			}
			got := tok.Decode(ids, false)
			if tok == fallback {
				if strings.Contains(text, "<") { // perhaps a special token, after which a space is added
					continue
				}
				want = strings.ReplaceAll(want, "▁", " ")
			}
			if got != want {
				t.Fatalf("Decode(Encode(%q)) = %q", text, got)
			}
		}
	})
}
