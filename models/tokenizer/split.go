package tokenizer

import (
	"strings"
	"unicode/utf8"
)

// The two supported split patterns, as tokenizer.json files spell them.
const (
	gpt2Pattern  = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
	qwen2Pattern = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
)

// splitter cuts normalized text into words and appends their ids.
type splitter interface {
	// encode appends the ids of text. first reports whether text starts at the start of Encode's input.
	encode(out []int32, g *merger, text string, first bool) []int32
}

// wholeText passes the text to a character-level model without splitting.
type wholeText struct{}

func (wholeText) encode(out []int32, g *merger, text string, _ bool) []int32 {
	return g.charText(out, text)
}

// metaspace replaces spaces by a replacement character and puts one before the text.
type metaspace struct {
	replacement string
	scheme      prependScheme
	split       bool // one word per replacement character, which starts it
}

type prependScheme int

const (
	prependAlways prependScheme = iota
	prependFirst                // only where the text starts the input
	prependNever
)

func (p metaspace) encode(out []int32, g *merger, text string, first bool) []int32 {
	text = strings.ReplaceAll(text, " ", p.replacement)
	if (p.scheme == prependAlways || p.scheme == prependFirst && first) && !strings.HasPrefix(text, p.replacement) {
		text = p.replacement + text
	}
	if !p.split {
		return g.charText(out, text)
	}
	for start := 0; start < len(text); {
		end := len(text)
		from := start
		if strings.HasPrefix(text[start:], p.replacement) {
			from += len(p.replacement)
		}
		if i := strings.Index(text[from:], p.replacement); i >= 0 {
			end = from + i
		}
		out = g.charText(out, text[start:end])
		start = end
	}
	return out
}

// byteWords splits text with a pattern and passes the bytes of each word to a byte-level model.
type byteWords struct {
	next           func(string) int // length of the first word of a non-empty text; nil: the text is one word
	addPrefixSpace bool
}

func (p byteWords) encode(out []int32, g *merger, text string, _ bool) []int32 {
	if p.addPrefixSpace && !strings.HasPrefix(text, " ") {
		text = " " + text
	}
	if p.next == nil {
		return g.byteWord(out, text)
	}
	for len(text) > 0 {
		n := p.next(text)
		out = g.byteWord(out, text[:n])
		text = text[n:]
	}
	return out
}

// nextGPT2 returns the length of the first match of gpt2Pattern in s, which is not empty.
func nextGPT2(s string) int {
	if s[0] == '\'' && len(s) > 1 {
		switch s[1] {
		case 's', 't', 'm', 'd':
			return 2
		case 'r', 'v', 'l':
			if len(s) > 2 && (s[1:3] == "re" || s[1:3] == "ve" || s[1:3] == "ll") {
				return 3
			}
		}
	}
	i := 0
	if s[0] == ' ' {
		i = 1
	}
	if i < len(s) {
		switch c, n := classAt(s, i); c {
		case letter, number, other:
			return skipClass(s, i+n, c)
		}
	}
	return nextSpaces(s)
}

// nextQwen2 returns the length of the first match of qwen2Pattern in s, which is not empty.
func nextQwen2(s string) int {
	if s[0] == '\'' {
		if n := contraction(s); n > 0 {
			return n
		}
	}
	c, n := classAt(s, 0)
	switch c {
	case letter:
		return skipClass(s, n, letter)
	case number:
		return n
	}
	newline := s[0] == '\r' || s[0] == '\n'
	if !newline && n < len(s) {
		if d, k := classAt(s, n); d == letter {
			return skipClass(s, n+k, letter)
		}
	}
	i := 0
	if s[0] == ' ' {
		i = 1
	}
	if i < len(s) {
		if d, k := classAt(s, i); d == other {
			i = skipClass(s, i+k, other)
			for i < len(s) && (s[i] == '\r' || s[i] == '\n') {
				i++
			}
			return i
		}
	}
	// A run of space: up to its last line break, if it has one.
	end := skipClass(s, n, space)
	if last := strings.LastIndexAny(s[:end], "\r\n"); last >= 0 {
		return last + 1
	}
	return nextSpaces(s)
}

// contraction returns the length of the English contraction that s starts with, in any case, or 0. U+017F folds to s.
func contraction(s string) int {
	if strings.HasPrefix(s[1:], "\u017f") {
		return 3
	}
	if len(s) > 1 {
		switch s[1] | 0x20 {
		case 's', 't', 'm', 'd':
			return 2
		}
	}
	if len(s) > 2 {
		switch string([]byte{s[1] | 0x20, s[2] | 0x20}) {
		case "re", "ve", "ll":
			return 3
		}
	}
	return 0
}

// nextSpaces matches \s+(?!\S)|\s+ at the start of s: a run of white space. If a non-space character follows and the run
// has more than one character, the match excludes the run's last character.
func nextSpaces(s string) int {
	_, n := classAt(s, 0)
	end, last := n, 0
	for end < len(s) {
		c, k := classAt(s, end)
		if c != space {
			if last > 0 {
				return last
			}
			return end
		}
		last = end
		end += k
	}
	return end
}

// skipClass returns the end of the run of class c that continues at i.
func skipClass(s string, i int, c class) int {
	for i < len(s) {
		d, n := classAt(s, i)
		if d != c {
			break
		}
		i += n
	}
	return i
}

// byteChars maps each byte to its character in byte-level vocabularies: the byte itself if it is printable, else the
// next free code point from U+0100.
var byteChars = func() (t [256]string) {
	next := rune(256)
	for b := range t {
		r := rune(b)
		if r < '!' || r > '~' && r < 0xA1 || r == 0xAD {
			r = next
			next++
		}
		t[b] = string(r)
	}
	return t
}()

// charBytes is the inverse of byteChars: it maps code points to bytes; -1 if no byte has that character.
var charBytes = func() (t [0x144]int16) {
	for i := range t {
		t[i] = -1
	}
	for b, c := range byteChars {
		r, _ := utf8.DecodeRuneInString(c)
		t[r] = int16(b)
	}
	return t
}()

// unspell appends the bytes that a byte-level token represents, or the token unchanged if one of its characters
// represents no byte.
func unspell(dst []byte, token string) []byte {
	n := len(dst)
	for _, r := range token {
		if int(r) >= len(charBytes) || charBytes[r] < 0 {
			return append(dst[:n], token...)
		}
		dst = append(dst, byte(charBytes[r]))
	}
	return dst
}

// spell converts bytes to their characters in a byte-level vocabulary.
func spell(raw string) string {
	var b strings.Builder
	for i := range len(raw) {
		b.WriteString(byteChars[raw[i]])
	}
	return b.String()
}
