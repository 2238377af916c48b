package tokenizer

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// decoder turns tokens into text. pieces holds what each id contributes, by id.
type decoder struct {
	kind   decoderKind
	pieces []string

	// For decodeText.
	isByte     []bool // by id: with ByteFallback, pieces[id] is one byte of a character
	strip      rune   // character taken off the start of the text
	stripCount int    // at most so many times
}

type decoderKind int

const (
	// decodeJoined separates tokens by a space: the reference without a decoder.
	decodeJoined decoderKind = iota
	// decodeBytes takes pieces as bytes of UTF-8 text.
	decodeBytes
	// decodeText takes pieces as text, save those that are single bytes: a run of these is text if all of it is valid
	// UTF-8, and else one U+FFFD for each byte.
	decodeText
)

// streamState is what a decoder remembers between two tokens.
type streamState struct {
	pending []byte // bytes that are not text yet
	started bool   // a token came before
	strip   int    // characters that may still be taken off the start
}

func (d *decoder) start() streamState { return streamState{strip: d.stripCount} }

// Stream decodes ids that arrive one by one. The pieces of text it returns are whole characters, and together they are
// what Decode returns for all ids. It is made by NewStream and belongs to one goroutine.
//
// Text that later ids can still change is held back: the bytes of a character that is not complete and, for models
// with byte fallback, a run of byte tokens until another token ends it, since one bad byte changes the whole run.
type Stream struct {
	t           *BPE
	state       streamState
	skipSpecial bool
}

// NewStream implements Tokenizer.
func (t *BPE) NewStream(skipSpecial bool) *Stream {
	return &Stream{t: t, state: t.decoder.start(), skipSpecial: skipSpecial}
}

// Push adds an id and returns the text that is certain with it, often none.
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

// Flush returns the text that was held back, with U+FFFD for what never became a character, and makes the stream
// ready for another sequence of ids.
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

// pushBytes adds bytes and returns those that are decided: all but a tail that may yet become one character.
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

// takeRun returns the text of the pending byte tokens and forgets them.
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

// stripped takes what is left to strip off the start of text.
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

// fallbackByte returns the byte that a token such as <0x0A> stands for. As in the reference, a sign before a single
// digit passes.
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

// incomplete returns the length of the longest tail of b that is the start of a character but not all of it: 0 to 3.
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

// illFormed returns the length of the maximal part at the start of b, which starts no character: the longest prefix of
// one, at least 1.
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
