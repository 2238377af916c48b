package tokenizer

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func loadTiny(t testing.TB, patch map[string]json.RawMessage) *Pipeline {
	t.Helper()
	tok, err := Parse(patched(t, "tiny_tokenizer.json", patch), nil)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// TestKeep: a stream that skips special tokens does not skip those that it keeps.
func TestKeep(t *testing.T) {
	tok := loadTiny(t, nil)
	start, _ := tok.ID("<|im_start|>")
	ids := append(must(tok.Encode("a<|im_start|>b<|im_end|>c", false)), start)
	for _, c := range []struct {
		skip bool
		keep []int32
		want string
	}{
		{true, nil, "abc"}, {true, []int32{start}, "a<|im_start|>bc<|im_start|>"}, {false, []int32{start}, "a<|im_start|>b<|im_end|>c<|im_start|>"},
	} {
		s := tok.NewStream(c.skip)
		s.Keep(c.keep)
		got := ""
		for _, id := range ids {
			got += s.Push(id)
		}
		if got += s.Flush(); got != c.want {
			t.Errorf("skip %v, keep %v: %q, want %q", c.skip, c.keep, got, c.want)
		}
	}
}

// TestTinyText compares with the prompts and texts of the tiny checkpoint that the tokenizer belongs to.
func TestTinyText(t *testing.T) {
	var cases []struct {
		Prompt     string  `json:"prompt"`
		PromptIDs  []int32 `json:"prompt_ids"`
		GreedyIDs  []int32 `json:"greedy_ids"` // some beyond the tokenizer
		GreedyText string  `json:"greedy_text"`
	}
	readJSON(t, filepath.Join("testdata", "tiny_expected_text.json"), &cases)
	if len(cases) == 0 {
		t.Fatal("no cases")
	}
	tok := loadTiny(t, nil)
	for _, c := range cases {
		if got := must(tok.Encode(c.Prompt, true)); !slices.Equal(got, c.PromptIDs) {
			t.Errorf("Encode(%q) = %v, want %v", c.Prompt, got, c.PromptIDs)
		}
		if got := tok.Decode(c.GreedyIDs, true); got != c.GreedyText {
			t.Errorf("Decode(%v) = %q, want %q", c.GreedyIDs, got, c.GreedyText)
		}
		checkStream(t, tok, c.GreedyIDs, true)
	}
}

func TestTokens(t *testing.T) {
	config, err := os.ReadFile(filepath.Join("testdata", "tiny_tokenizer_config.json"))
	if err != nil {
		t.Fatal(err)
	}
	tok, err := Parse(patched(t, "tiny_tokenizer.json", nil), config)
	if err != nil {
		t.Fatal(err)
	}
	if got := tok.VocabSize(); got != 350 {
		t.Errorf("VocabSize() = %d, want 350", got)
	}
	for id := range int32(350) {
		token, ok := tok.Token(id)
		if back, found := tok.ID(token); !ok || !found || back != id {
			t.Errorf("id %d is token %q (%v), which is id %d (%v)", id, token, ok, back, found)
		}
	}
	for _, id := range []int32{-1, 350, 1 << 30} {
		if token, ok := tok.Token(id); ok {
			t.Errorf("id %d is token %q", id, token)
		}
		if got := tok.Decode([]int32{id}, false); got != "" {
			t.Errorf("Decode(%d) = %q, want nothing", id, got)
		}
	}
	if _, ok := tok.ID("no such token"); ok {
		t.Error("an unknown token has an id")
	}
	if !tok.IsSpecial(2) || tok.IsSpecial(3) || tok.IsSpecial(-1) {
		t.Error("special tokens are not <|endoftext|>, <|im_start|> and <|im_end|>")
	}
	if eos, ok := tok.EOS(); !ok || eos != 0 {
		t.Errorf("EOS() = %d, %v, want 0", eos, ok)
	}
	if bos, ok := tok.BOS(); ok {
		t.Errorf("BOS() = %d, want none", bos)
	}
	if got := must(tok.Encode("", true)); got != nil {
		t.Errorf("Encode of nothing = %v, want nil", got)
	}
	if got, want := must(tok.Encode("a\xff\xe4\xbdb", false)), must(tok.Encode("a\uFFFD\uFFFDb", false)); !slices.Equal(got, want) {
		t.Errorf("Encode of invalid UTF-8 = %v, want %v", got, want)
	}
}

// TestTokenizerConfig holds what tokenizer_config.json adds.
func TestTokenizerConfig(t *testing.T) {
	base := patched(t, "tiny_bytefallback.json", nil) // <s> before each prompt, by its post-processor
	for name, tc := range map[string]struct {
		config string
		text   string
		want   []string
	}{
		"none":            {"", "peer", []string{"<s>", "▁peer"}},
		"silent":          {`{"bos_token": "<s>"}`, "peer", []string{"<s>", "▁peer"}},
		"neither":         {`{"add_bos_token": false}`, "peer", []string{"▁peer"}},
		"both":            {`{"add_bos_token": true, "add_eos_token": true, "bos_token": "<s>", "eos_token": {"content": "</s>"}}`, "peer", []string{"<s>", "▁peer", "</s>"}},
		"no such token":   {`{"add_bos_token": true, "bos_token": null}`, "peer", []string{"▁peer"}},
		"new special":     {`{"pad_token": "<pad>"}`, "<pad>", []string{"<s>", "<pad>"}},
		"further special": {`{"additional_special_tokens": ["<x>", {"content": "<y>"}]}`, "<y><x>", []string{"<s>", "<y>", "<x>"}},
		"id in entry":     {`{"added_tokens_decoder": {"900": {"content": "<new>", "id": "of another type"}}}`, "<new>", []string{"<s>", "<new>"}},
		"restated":        {`{"added_tokens_decoder": {"2": {"content": "</s>", "rstrip": true, "special": true}}}`, "</s>  ", []string{"<s>", "</s>"}},
		"added by config": {`{"added_tokens_decoder": {"900": {"content": "<new>", "special": false}}}`, "<new>", []string{"<s>", "<new>"}},
	} {
		t.Run(name, func(t *testing.T) {
			tok, err := Parse(base, []byte(tc.config))
			if err != nil {
				t.Fatal(err)
			}
			if got := tokensOf(tok, must(tok.Encode(tc.text, true))); !slices.Equal(got, tc.want) {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

// TestUnsupported holds features that are missing to an error that names them.
func TestUnsupported(t *testing.T) {
	for name, tc := range map[string]struct{ patch, want string }{
		"wordpiece":    {`{"model": {"type": "WordPiece"}}`, `model type "WordPiece"`},
		"dropout":      {`{"model": {"dropout": 0.1}}`, "dropout 0.1"},
		"prefix":       {`{"model": {"continuing_subword_prefix": "##"}}`, `continuing_subword_prefix "##"`},
		"suffix":       {`{"model": {"end_of_word_suffix": "</w>"}}`, `end_of_word_suffix "</w>"`},
		"version":      {`{"version": "2.0"}`, `version "2.0"`},
		"member":       {`{"post_tokenizer": null}`, `the member "post_tokenizer"`},
		"normalizer":   {`{"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "BertNormalizer"}]}}`, `normalizer "BertNormalizer"`},
		"replace":      {`{"normalizer": {"type": "Replace", "pattern": {"Regex": "(x)\\1"}, "content": ""}}`, `Replace" with the pattern "(x)\\1": regular expression not supported: \1`},
		"nothing":      {`{"normalizer": {"type": "Replace", "pattern": {"Regex": "x*"}, "content": ""}}`, "can match nothing"},
		"empty":        {`{"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}}`, "empty pattern"},
		"growth":       {`{"normalizer": {"type": "Sequence", "normalizers": [` + strings.Repeat(`{"type": "Replace", "pattern": {"String": "h"}, "content": "hh"},`, 39) + `{"type": "NFC"}]}}`, `normalizer, step 6, "Replace": a text could become over 64 times as long`},
		"prepended":    {`{"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "` + strings.Repeat("x", 1025) + `"}]}}`, `normalizer, step 1, "Prepend": over 1024 bytes are put before a text`},
		"steps":        {`{"normalizer": {"type": "Sequence", "normalizers": [` + strings.Repeat(`{"type": "NFC"},`, 64) + `{"type": "NFC"}]}}`, "normalizer with 65 steps: up to 64 are"},
		"pretokenizer": {`{"pre_tokenizer": {"type": "Whitespace"}}`, `pre_tokenizer "Whitespace"`},
		"pattern":      {`{"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(?<a>x)"}, "behavior": "Isolated", "invert": false}}`, `Split" with the pattern "(?<a>x)"`},
		"behavior": {`{"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": "Split", "invert": false, "pattern":
			{"Regex": "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"}}, {"type": "ByteLevel"}]}}`, `behavior "Split"`},
		"metaspace":       {`{"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "last"}}`, `prepend_scheme "last"`},
		"two metaspaces":  {`{"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Metaspace", "replacement": "_"}, {"type": "Metaspace", "replacement": "_"}]}}`, `"Metaspace" before "Metaspace"`},
		"processor":       {`{"post_processor": {"type": "PairProcessing"}}`, `post_processor "PairProcessing"`},
		"two sequences":   {`{"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}, {"Sequence": {"id": "A"}}]}}`, "not one sequence A"},
		"decoder":         {`{"decoder": {"type": "WordPiece"}}`, "decoder WordPiece"},
		"decoder order":   {`{"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}}`, "decoder Fuse, ByteFallback"},
		"decoder strip":   {`{"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]}}`, "Strip of 1 at the end"},
		"decoder pattern": {`{"decoder": {"type": "Replace", "pattern": {"Regex": "\\K"}, "content": ""}}`, `decoder "Replace"`},
	} {
		t.Run(name, func(t *testing.T) {
			var patch map[string]json.RawMessage
			if err := json.Unmarshal([]byte(tc.patch), &patch); err != nil {
				t.Fatal(err)
			}
			_, err := Parse(patched(t, "tiny_tokenizer.json", patch), nil)
			if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %v, want one line that wraps ErrUnsupported with %q", err, tc.want)
			}
		})
	}
}

// TestDamaged holds files that contradict themselves to an error.
func TestDamaged(t *testing.T) {
	for name, tc := range map[string]struct{ patch, want string }{
		"no JSON model":    {`{"model": []}`, "model is array, which is not what belongs there"},
		"unigram vocab":    {`{"model": {"type": "Unigram", "unk_id": 0, "vocab": {}}}`, "model.vocab is object"},
		"unigram entry":    {`{"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a"]]}}`, `not ["token", score]`},
		"unigram empty":    {`{"model": {"type": "Unigram", "unk_id": 0, "vocab": []}}`, "model.vocab is empty"},
		"unigram unk":      {`{"model": {"type": "Unigram", "unk_id": 1, "vocab": [["a", 0]]}}`, "model.unk_id is 1, and there are 1 tokens"},
		"added id":         {`{"added_tokens": [{"id": -1, "content": "x"}]}`, `added_tokens[0], "x", has id -1: ids run from 0`},
		"added large id":   {`{"added_tokens": [{"id": 2147483648, "content": "x"}]}`, `has id 2147483648: ids run from 0`},
		"added content":    {`{"added_tokens": [{"id": 1, "content": 2}]}`, "tokenizer.json: added_tokens.content is number, which"},
		"added no id":      {`{"added_tokens": [{"content": "x"}]}`, `has no id: ids run from 0`},
		"metaspace":        {`{"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "add_prefix_space": false}}`, "contradicts its prepend_scheme"},
		"digits":           {`{"pre_tokenizer": {"type": "Digits"}}`, "lacks individual_digits"},
		"long name":        {`{"model": {"merges": [], "vocab": {"` + strings.Repeat("x", 1<<16) + `": -1}}}`, "has id -1"},
		"merge of unknown": {`{"model": {"merges": ["zq qz"]}}`, "not both in the vocabulary"},
		"merge to unknown": {`{"model": {"merges": ["z q"]}}`, `makes "zq"`},
		"merge of three":   {`{"model": {"merges": ["a b c"]}}`, "one space"},
		"merge of one":     {`{"model": {"merges": [["a"]]}}`, "has 1 tokens"},
		"merges no list":   {`{"model": {"merges": 3}}`, "merges are neither"},
		"unknown unk":      {`{"model": {"unk_token": "nope"}}`, `unk_token "nope"`},
		"negative id":      {`{"model": {"vocab": {"a": -1}}}`, "ids run from 0"},
		"huge id":          {`{"model": {"merges": [], "vocab": {"a": 2147483647}}}`, "ids run from 0"},
		"same id":          {`{"model": {"merges": [], "vocab": {"a": 1, "b": 1}}}`, "have the same id 1"},
		"template token":   {`{"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<q>"}}, {"Sequence": {"id": "A"}}]}}`, `uses "<q>"`},
		"replacement":      {`{"pre_tokenizer": {"type": "Metaspace", "replacement": "__"}}`, "one character"},
	} {
		t.Run(name, func(t *testing.T) {
			var patch map[string]json.RawMessage
			if err := json.Unmarshal([]byte(tc.patch), &patch); err != nil {
				t.Fatal(err)
			}
			// Not through a model that is patched key by key where the patch is no object.
			base := patched(t, "tiny_tokenizer.json", nil)
			if name == "no JSON model" {
				base = []byte(tc.patch)
			} else {
				base = patchJSON(t, base, patch)
			}
			if _, err := Parse(base, nil); err == nil || !strings.Contains(err.Error(), tc.want) || len(err.Error()) > 1000 {
				t.Errorf("error %v, want %q", err, tc.want)
			}
		})
	}
	if _, err := Parse([]byte("no JSON"), nil); err == nil {
		t.Error("what is no JSON is accepted")
	}
	for config, want := range map[string]string{
		"no JSON": configFile,
		`{"added_tokens_decoder": {"1": {"content": 2}}}`: configFile + ": added_tokens_decoder.content is number, which",
	} {
		if _, err := Parse(patched(t, "tiny_tokenizer.json", nil), []byte(config)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the configuration %s: error %v, want %q", config, err, want)
		}
	}
}
