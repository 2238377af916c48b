package tokenizer

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/moeserve/moeserve/untrusted"
)

// decoder converts tokens to text. pieces holds the output of each id, indexed by id.
type decoder struct {
	kind   decoderKind
	pieces []string

	// For decodeText.
	first      []string // by id: the output of the first token; nil: as of all others
	isByte     []bool   // by id: with ByteFallback, pieces[id] is one byte of a character
	strip      rune     // character stripped from the start of the text
	stripCount int      // maximum number of characters stripped
}

type decoderKind int

const (
	// decodeJoined separates tokens by a space: the reference without a decoder.
	decodeJoined decoderKind = iota
	// decodeBytes treats pieces as bytes of UTF-8 text.
	decodeBytes
	// decodeText treats pieces as text, except those that are single bytes: a run of bytes becomes text if the whole run
	// is valid UTF-8, else one U+FFFD per byte.
	decodeText
)

// streamState is a decoder's state between two tokens.
type streamState struct {
	pending []byte // bytes that are not text yet
	started bool   // a token came before
	strip   int    // number of characters that may still be stripped from the start
}

func (d *decoder) start() streamState { return streamState{strip: d.stripCount} }

// Stream decodes ids one at a time. It returns whole characters, and the concatenation of its results equals Decode of
// all ids. NewStream makes a Stream, which belongs to one goroutine.
//
// A Stream withholds text that later ids can still change: the bytes of an incomplete character and, for models with
// byte fallback, a run of byte tokens until another token ends it, because one invalid byte changes the whole run.
type Stream struct {
	t           *Pipeline
	state       streamState
	skipSpecial bool
	keep        []int32
}

// NewStream implements Tokenizer.
func (t *Pipeline) NewStream(skipSpecial bool) *Stream {
	return &Stream{t: t, state: t.decoder.start(), skipSpecial: skipSpecial}
}

// Keep has a stream that skips special tokens not skip those with these ids. The stream keeps the slice.
func (s *Stream) Keep(ids []int32) { s.keep = ids }

// Continue has the text go on from that of other tokens: nothing is stripped from its start.
func (s *Stream) Continue() { s.state.started, s.state.strip = true, 0 }

// Push adds an id and returns the text that is now final, which is often empty.
func (s *Stream) Push(id int32) string {
	if !s.t.has(id) || s.skipSpecial && s.t.special[id] && !slices.Contains(s.keep, id) {
		return ""
	}
	d, st := &s.t.decoder, &s.state
	piece := d.pieces[id]
	if d.first != nil && !st.started {
		piece = d.first[id]
	}
	begins := !st.started
	st.started = true
	switch d.kind {
	case decodeBytes:
		return st.pushBytes(piece)
	case decodeText:
		if d.isByte[id] {
			st.pending = append(st.pending, piece...)
			return ""
		}
		if len(st.pending) == 0 {
			return st.stripped(piece, d.strip)
		}
		return st.stripped(st.takeRun()+piece, d.strip)
	case decodeJoined:
		if !begins {
			return " " + piece
		}
	}
	return piece
}

// Flush returns the withheld text, with U+FFFD for incomplete characters, and resets the stream for another sequence of
// ids.
func (s *Stream) Flush() string {
	d, st := &s.t.decoder, &s.state
	var out string
	switch d.kind {
	case decodeBytes:
		out = string(appendLossy(nil, st.pending))
	case decodeText:
		out = st.stripped(st.takeRun(), d.strip)
	}
	*st = streamState{pending: st.pending[:0], strip: d.stripCount}
	return out
}

// pushBytes adds bytes and returns those that are final: all except a tail that may still become a character.
func (st *streamState) pushBytes(piece string) string {
	if len(st.pending) == 0 && utf8.ValidString(piece) {
		return piece
	}
	st.pending = append(st.pending, piece...)
	n := len(st.pending) - incomplete(st.pending)
	if n == 0 {
		return ""
	}
	out := string(appendLossy(nil, st.pending[:n]))
	st.pending = append(st.pending[:0], st.pending[n:]...)
	return out
}

func buildDecoder(t *Pipeline, c *fileConfig, _ *sideConfig) error {
	d := &t.decoder
	d.pieces = t.tokens
	steps := flatten(c.Decoder, "decoders")
	if len(steps) > maxSteps {
		return unsupported("decoder with %d steps: up to %d are", len(steps), maxSteps)
	}
	if len(steps) == 0 {
		d.kind = decodeJoined
		return nil
	}
	if steps[0].kind() == "ByteLevel" && len(steps) == 1 {
		d.kind = decodeBytes
		d.pieces = make([]string, len(t.tokens))
		var raw []byte
		for id, token := range t.tokens {
			raw = unspell(raw[:0], token)
			if string(raw) == token {
				d.pieces[id] = token
			} else {
				d.pieces[id] = string(raw)
			}
		}
		return nil
	}
	d.kind = decodeText
	d.isByte = make([]bool, len(t.tokens))
	var each []pieceStep // steps that take each token on its own
	fused, fallback := false, false
	order := 0 // of the step before: each token 1, ByteFallback 2, Fuse 3, Strip of the whole 4
	for _, s := range steps {
		at := 0
		switch kind := s.kind(); {
		case kind == "ByteFallback":
			at, fallback = 2, true
		case kind == "Fuse":
			at, fused = 3, true
		case kind == "Strip" && fused:
			at = 4
			strip, err := newPieceStrip(s)
			if err != nil {
				return err
			}
			if strip.stop != 0 {
				return unsupported("decoder Strip of %d at the end of the whole text: only at its start is", strip.stop)
			}
			d.strip, d.stripCount = strip.char, strip.start
		case kind == "Replace" || kind == "Metaspace" || kind == "Strip":
			at = 1
			step, err := newPieceStep(s)
			if err != nil {
				return err
			}
			each = append(each, step)
		}
		if at == 0 || at < order || at == order && at > 1 {
			return unsupported("decoder %s: ByteLevel alone is, and Replace, Metaspace and Strip before ByteFallback, Fuse and Strip",
				names(steps))
		}
		order = at
	}
	var err error
	if d.pieces, err = piecesOf(t.tokens, each, false); err != nil {
		return err
	}
	for _, step := range each {
		if m, ok := step.(pieceMetaspace); ok && m.first {
			if d.first, err = piecesOf(t.tokens, each, true); err != nil {
				return err
			}
			break
		}
	}
	if fallback {
		for id, piece := range d.pieces {
			b, ok := fallbackByte(piece)
			if d.first != nil { // no step that differs for the first token makes a byte token
				first, isByte := fallbackByte(d.first[id])
				if ok != isByte || b != first {
					return unsupported("decoder %s: token %s is a byte in one place only", names(steps), untrusted.Quote(t.tokens[id]))
				}
			}
			if ok && t.present[id] {
				d.isByte[id], d.pieces[id] = true, string([]byte{b})
				if d.first != nil {
					d.first[id] = d.pieces[id]
				}
			}
		}
	}
	return nil
}

// maxPieces bounds the text of all tokens together, in bytes.
const maxPieces = untrusted.MaxData

// piecesOf applies steps to each token.
func piecesOf(tokens []string, steps []pieceStep, first bool) ([]string, error) {
	out := slices.Clone(tokens)
	total := 0
	for id := range out {
		for _, step := range steps {
			var err error
			if out[id], err = step.apply(out[id], first); err != nil {
				return nil, fmt.Errorf("decoder: %w", err)
			}
			if total+len(out[id]) > maxPieces {
				return nil, fmt.Errorf("decoder: the text of all tokens together is over %d MiB", maxPieces>>20)
			}
		}
		total += len(out[id])
	}
	return out, nil
}

// pieceStep is a step of a decoder that takes each token on its own; first says whether it is the first token.
type pieceStep interface {
	apply(token string, first bool) (string, error)
}

func newPieceStep(s component) (pieceStep, error) {
	switch s.kind() {
	case "Replace":
		old, err := searchOf("decoder", s)
		return pieceReplace{replace{old, s.str("content")}}, err
	case "Metaspace":
		m := pieceMetaspace{replacement: s.str("replacement")}
		if utf8.RuneCountInString(m.replacement) != 1 {
			return m, fmt.Errorf("decoder Metaspace has replacement %s: want one character", untrusted.Quote(m.replacement))
		}
		scheme, err := prependSchemeOf("decoder", s)
		m.first = scheme != prependNever
		return m, err
	}
	return newPieceStrip(s)
}

type pieceReplace struct{ replace }

func (p pieceReplace) apply(token string, _ bool) (string, error) { return p.replace.apply(token) }

// pieceMetaspace writes spaces for a character, and in the first token nothing.
type pieceMetaspace struct {
	replacement string
	first       bool // the first token differs
}

func (p pieceMetaspace) apply(token string, first bool) (string, error) {
	space := " "
	if first && p.first {
		space = ""
	}
	return strings.ReplaceAll(token, p.replacement, space), nil
}

// pieceStrip removes up to start and stop times a character from the ends.
type pieceStrip struct {
	char        rune
	start, stop int
}

func newPieceStrip(s component) (pieceStrip, error) {
	r, n := utf8.DecodeRuneInString(s.str("content"))
	start, ok1 := s["start"].(float64)
	stop, ok2 := s["stop"].(float64)
	if n == 0 || n != len(s.str("content")) || !ok1 || !ok2 || start < 0 || stop < 0 || start > math.MaxInt16 || stop > math.MaxInt16 {
		return pieceStrip{}, unsupported("decoder Strip of %s: only one character, with start and stop from 0 to %d, is", untrusted.Quote(s.str("content")), math.MaxInt16)
	}
	return pieceStrip{r, int(start), int(stop)}, nil
}

func (p pieceStrip) apply(token string, _ bool) (string, error) {
	char := string(p.char)
	for i := 0; i < p.start && strings.HasPrefix(token, char); i++ {
		token = token[len(char):]
	}
	for i := 0; i < p.stop && strings.HasSuffix(token, char); i++ {
		token = token[:len(token)-len(char)]
	}
	return token, nil
}

// takeRun returns the text of the pending byte tokens and clears them.
func (st *streamState) takeRun() string {
	if len(st.pending) == 0 {
		return ""
	}
	out := string(st.pending)
	if !utf8.Valid(st.pending) {
		out = strings.Repeat(string(utf8.RuneError), len(st.pending))
	}
	st.pending = st.pending[:0]
	return out
}

// stripped removes the remaining characters to strip from the start of text.
func (st *streamState) stripped(text string, char rune) string {
	for st.strip > 0 && text != "" {
		r, n := utf8.DecodeRuneInString(text)
		if r != char {
			st.strip = 0
			break
		}
		text = text[n:]
		st.strip--
	}
	return text
}

// fallbackByte returns the byte that a token such as <0x0A> represents. Like the reference, it accepts a sign before a
// single digit.
func fallbackByte(token string) (byte, bool) {
	if len(token) != 6 || !strings.HasPrefix(token, "<0x") || token[5] != '>' {
		return 0, false
	}
	digits := token[3:5]
	if digits[0] == '+' {
		digits = digits[1:]
	}
	v, err := strconv.ParseUint(digits, 16, 8)
	return byte(v), err == nil
}

// incomplete returns the length of the longest proper prefix of a character at the end of b: 0 to 3.
func incomplete(b []byte) int {
	for n := 1; n <= min(3, len(b)); n++ {
		c := b[len(b)-n]
		if utf8.RuneStart(c) {
			if utf8.FullRune(b[len(b)-n:]) {
				return 0
			}
			return n
		}
	}
	return 0
}

// appendLossy appends b to dst with one U+FFFD for each maximal part of an ill-formed sequence (Unicode, section 3.9).
func appendLossy(dst, b []byte) []byte {
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		if r == utf8.RuneError && n == 1 {
			n = illFormed(b)
			dst = utf8.AppendRune(dst, utf8.RuneError)
		} else {
			dst = append(dst, b[:n]...)
		}
		b = b[n:]
	}
	return dst
}

// illFormed returns the length of the ill-formed sequence at the start of b: the longest prefix of a character, at least
// 1.
func illFormed(b []byte) int {
	n := 1
	for n < min(3, len(b)) && !utf8.FullRune(b[:n]) {
		n++
	}
	if n > 1 && utf8.FullRune(b[:n]) {
		return n - 1
	}
	return n
}
