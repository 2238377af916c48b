package tokenizer

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// decoder converts tokens to text. pieces holds the output of each id, indexed by id.
type decoder struct {
	kind   decoderKind
	pieces []string

	// For decodeText.
	isByte     []bool // by id: with ByteFallback, pieces[id] is one byte of a character
	strip      rune   // character stripped from the start of the text
	stripCount int    // maximum number of characters stripped
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
	t           *BPE
	state       streamState
	skipSpecial bool
}

// NewStream implements Tokenizer.
func (t *BPE) NewStream(skipSpecial bool) *Stream {
	return &Stream{t: t, state: t.decoder.start(), skipSpecial: skipSpecial}
}

// Push adds an id and returns the text that is now final, which is often empty.
func (s *Stream) Push(id int32) string {
	if !s.t.has(id) || s.skipSpecial && s.t.special[id] {
		return ""
	}
	d, st := &s.t.decoder, &s.state
	piece := d.pieces[id]
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
		if st.started {
			return " " + piece
		}
		st.started = true
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
