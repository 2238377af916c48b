package tokenizer

import (
	"cmp"
	"slices"
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

	// EncodeWith is Encode with further options.
	EncodeWith(text string, o EncodeOptions) ([]int32, error)

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

	// Piece returns what id adds to a text, which need not be whole characters, and what it adds as the first of all ids,
	// where a space may be left out; and whether it is a special token, whose pieces are its spelling. ok: id exists.
	Piece(id int32) (piece, first string, special, ok bool)

	// ID returns the id of a token as the vocabulary spells it, and whether the token exists.
	ID(token string) (int32, bool)
}

// EncodeOptions are the options of EncodeWith.
type EncodeOptions struct {
	// AddSpecial adds the special tokens that the checkpoint puts around a prompt.
	AddSpecial bool

	// Plain lists byte ranges [start, end) of the text, ascending and disjoint, that are read as plain text: no added
	// token is matched in them, nor across their ends, but for those of white space, which mean nothing else. Where the
	// ranges have no added token, the ids are those without Plain.
	Plain [][2]int

	// Limit is the maximum number of ids that the caller can use; 0: any. Of a text with more ids, the result has
	// Limit + 1, of which the last ones may be wrong, and encoding costs little more than that many.
	Limit int
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
	dense   bool             // every text has at least its length divided by model.longest as many tokens
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
	return t.EncodeWith(text, EncodeOptions{AddSpecial: addSpecial})
}

// EncodeWith implements Tokenizer.
func (t *Pipeline) EncodeWith(text string, o EncodeOptions) ([]int32, error) {
	if !utf8.ValidString(text) {
		text, o.Plain = lossy(text, o.Plain)
	}
	var out []int32
	n := len(text) / 3
	if o.Limit > 0 {
		n = min(n, o.Limit)
	}
	if n += len(t.prefix) + len(t.suffix); n > 0 {
		out = make([]int32, 0, n+1)
	}
	if o.AddSpecial {
		out = append(out, t.prefix...)
	}
	m := t.scratch.Get().(*merger)
	m.limit = o.Limit
	out, err := t.encode(out, m, text, o.Plain)
	if cap(m.spans) > maxScratch {
		m.spans = nil
	}
	t.scratch.Put(m)
	if err != nil {
		return nil, err
	}
	if o.AddSpecial {
		out = append(out, t.suffix...)
	}
	if o.Limit > 0 && len(out) > o.Limit {
		out = out[:o.Limit+1]
	}
	if len(out) == 0 {
		return nil, nil
	}
	return out, nil
}

func (t *Pipeline) encode(out []int32, m *merger, text string, plain [][2]int) (_ []int32, err error) {
	t.raw.split(text, plain, func(id int32, start, end int) bool {
		if id >= 0 {
			out = append(out, id)
			return !m.full(out)
		}
		first := start == 0
		var norm string
		var plain2 [][2]int
		if norm, plain2, err = t.normalize(text[start:end], within(plain, start, end)); err != nil {
			return false
		}
		t.normalized.split(norm, plain2, func(id int32, start, end int) bool {
			switch {
			case id >= 0:
				out = append(out, id)
			case m.limit > 0 && t.dense && (end-start)/m.m.longest > m.limit:
				out = slices.Grow(out, m.limit+1)[:m.limit+1] // whatever they are
			default:
				out, err = t.splitter.encode(out, m, norm[start:end], first && start == 0)
			}
			return err == nil && !m.full(out)
		})
		return err == nil && !m.full(out)
	})
	return out, err
}

// normalize returns the normalized text, and the plain ranges of that in which an added token could be matched.
func (t *Pipeline) normalize(text string, plain [][2]int) (string, [][2]int, error) {
	whole, err := t.normalizer.apply(text)
	if err != nil || len(plain) == 0 || !t.normalized.markup {
		return whole, nil, err
	}
	found := false
	t.normalized.split(whole, nil, func(id int32, _, _ int) bool {
		found = id >= 0
		return !found
	})
	if !found {
		return whole, nil, nil
	}
	// Where normalization crosses the end of a range, as where an accent follows it, the text of the parts is not that of
	// the whole. It is then the one that is used: its ranges are certain.
	var b strings.Builder
	var ranges [][2]int
	done := 0
	add := func(end int) int {
		if done < end && err == nil {
			var part string
			part, err = t.normalizer.part(text[done:end], done == 0)
			b.WriteString(part)
		}
		done = end
		return b.Len()
	}
	for _, r := range plain {
		ranges = append(ranges, [2]int{add(r[0]), add(r[1])})
	}
	add(len(text))
	return b.String(), ranges, err
}

// within returns the parts of ranges that lie in [start, end), as offsets from start.
func within(ranges [][2]int, start, end int) [][2]int {
	var out [][2]int
	i, _ := slices.BinarySearchFunc(ranges, start, func(r [2]int, start int) int { return cmp.Compare(r[1], start+1) })
	for _, r := range ranges[i:] {
		if r[0] >= end {
			break
		}
		out = append(out, [2]int{max(r[0], start) - start, min(r[1], end) - start})
	}
	return out
}

// lossy reads invalid UTF-8 as U+FFFD, in a text and its ranges.
func lossy(text string, ranges [][2]int) (string, [][2]int) {
	out := make([]byte, 0, len(text)+16)
	moved := make([][2]int, len(ranges))
	done := 0
	add := func(end int) int {
		out = appendLossy(out, []byte(text[done:end]))
		done = end
		return len(out)
	}
	for i, r := range ranges {
		moved[i] = [2]int{add(r[0]), add(r[1])}
	}
	add(len(text))
	return string(out), moved
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

// Piece implements Tokenizer.
func (t *Pipeline) Piece(id int32) (piece, first string, special, ok bool) {
	if !t.has(id) {
		return "", "", false, false
	}
	d := &t.decoder
	piece = d.pieces[id]
	first = piece
	if d.first != nil {
		first = d.first[id]
	}
	switch d.kind {
	case decodeText:
		st := d.start()
		first = st.stripped(first, d.strip)
	case decodeJoined:
		piece = " " + piece
	}
	return piece, first, t.special[id], true
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
