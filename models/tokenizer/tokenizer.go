package tokenizer

import (
	"strings"
	"sync"
	"unicode/utf8"
)

// Tokenizer is the tokenizer interface of the rest of moeserve. All methods are safe for concurrent use.
type Tokenizer interface {
	// Encode returns the token ids of text. With addSpecial, it adds the special tokens that the checkpoint puts around
	// a prompt (such as <s>). Special tokens written in text become their ids either way. Invalid UTF-8 bytes are read
	// as U+FFFD. The caller owns the result, which is nil if there are no tokens. An error means that a regular
	// expression of the tokenizer takes too long on this text; no published tokenizer has one that does.
	Encode(text string, addSpecial bool) ([]int32, error)

	// Decode returns the text of ids. With skipSpecial, it omits special tokens. It always omits ids that the tokenizer
	// does not have. The result is valid UTF-8: bytes that form no character become U+FFFD.
	Decode(ids []int32, skipSpecial bool) string

	// NewStream returns a decoder for ids that arrive one by one.
	NewStream(skipSpecial bool) *Stream

	// VocabSize returns the maximum id plus 1. Some ids below it may have no token, and a model may have more embedding
	// rows.
	VocabSize() int

	// Token returns the token of id as the vocabulary spells it, and whether id exists.
	Token(id int32) (string, bool)

	// ID returns the id of a token as the vocabulary spells it, and whether the token exists.
	ID(token string) (int32, bool)
}

// Pipeline is a tokenizer loaded from a tokenizer.json.
//
// Encode cuts a text in stages. It first extracts the added tokens that are matched on raw text. It normalizes the text
// between them, extracts the added tokens that are matched on normalized text, and splits the rest into words (see
// splitter). No merge crosses the ends of a word. The ids of a word are computed once by merging (see merger) and kept
// in a lock-free cache of fixed size that all goroutines share (see wordCache).
type Pipeline struct {
	added   map[string]int32 // ids of added tokens, whether or not model.vocab has them
	tokens  []string         // by id
	present []bool           // by id: tokens[id] exists
	special []bool           // by id: left out when special tokens are skipped
	bos     int32            // -1: none
	eos     int32            // -1: none
	prefix  []int32          // special tokens before a prompt
	suffix  []int32          // special tokens after a prompt

	raw        *addedTrie // added tokens matched before normalization
	normalized *addedTrie // added tokens matched after normalization
	normalizer normalizer
	splitter   splitter
	model      *model
	decoder    decoder

	scratch sync.Pool // of *merger
}

var _ Tokenizer = (*Pipeline)(nil)

// Encode implements Tokenizer.
func (t *Pipeline) Encode(text string, addSpecial bool) ([]int32, error) {
	if !utf8.ValidString(text) {
		text = string(appendLossy(make([]byte, 0, len(text)+16), []byte(text)))
	}
	var out []int32
	if n := len(text)/3 + len(t.prefix) + len(t.suffix); n > 0 {
		out = make([]int32, 0, n+1)
	}
	if addSpecial {
		out = append(out, t.prefix...)
	}
	m := t.scratch.Get().(*merger)
	out, err := t.encode(out, m, text)
	t.scratch.Put(m)
	if err != nil {
		return nil, err
	}
	if addSpecial {
		out = append(out, t.suffix...)
	}
	if len(out) == 0 {
		return nil, nil
	}
	return out, nil
}

func (t *Pipeline) encode(out []int32, m *merger, text string) ([]int32, error) {
	var failed error
	t.raw.split(text, func(id int32, start, end int) {
		if id >= 0 || failed != nil {
			out = append(out, id)
			return
		}
		first := start == 0
		norm, err := t.normalizer.apply(text[start:end])
		if err != nil {
			failed = err
			return
		}
		t.normalized.split(norm, func(id int32, start, end int) {
			if id >= 0 || failed != nil {
				out = append(out, id)
				return
			}
			out, failed = t.splitter.encode(out, m, norm[start:end], first && start == 0)
		})
	})
	return out, failed
}

// Decode implements Tokenizer.
func (t *Pipeline) Decode(ids []int32, skipSpecial bool) string {
	s := Stream{t: t, state: t.decoder.start(), skipSpecial: skipSpecial}
	var b strings.Builder
	b.Grow(4 * len(ids))
	for _, id := range ids {
		b.WriteString(s.Push(id))
	}
	b.WriteString(s.Flush())
	return b.String()
}

// VocabSize implements Tokenizer.
func (t *Pipeline) VocabSize() int { return len(t.tokens) }

// Token implements Tokenizer.
func (t *Pipeline) Token(id int32) (string, bool) {
	if !t.has(id) {
		return "", false
	}
	return t.tokens[id], true
}

// ID implements Tokenizer.
func (t *Pipeline) ID(token string) (int32, bool) {
	if id, ok := t.added[token]; ok {
		return id, true
	}
	id, ok := t.model.vocab[token]
	return id, ok
}

// IsSpecial reports whether id is a special token, one that Decode leaves out with skipSpecial.
func (t *Pipeline) IsSpecial(id int32) bool { return t.has(id) && t.special[id] }

// BOS returns the id of the token that tokenizer_config.json names as bos_token, and whether there is one.
func (t *Pipeline) BOS() (int32, bool) { return t.bos, t.bos >= 0 }

// EOS returns the id of the token that tokenizer_config.json names as eos_token, and whether there is one. Generation
// stops at the ids of generation_config.json, which may differ.
func (t *Pipeline) EOS() (int32, bool) { return t.eos, t.eos >= 0 }

func (t *Pipeline) has(id int32) bool {
	return id >= 0 && int(id) < len(t.tokens) && t.present[id]
}
