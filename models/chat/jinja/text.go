package jinja

import (
	"strings"
	"unicode/utf8"
)

// Span is a range of bytes: its start, and its end.
type Span = [2]int

// Text is a string that knows which of its bytes came from the client.
type Text struct {
	s      string
	client []Span // ascending, not empty, neither overlapping nor adjacent; nil: all is the template's
	markup bool   // a Markup, which escapes what is added to it
}

// NewText returns a string of one origin.
func NewText(s string, origin Origin) Text {
	t := Text{s: s}
	if origin == FromClient && s != "" {
		t.client = []Span{{0, len(s)}}
	}
	return t
}

// String returns the string.
func (t Text) String() string { return t.s }

// Client returns the ranges that came from the client. The caller must not change them.
func (t Text) Client() []Span { return t.client }

// slice returns the bytes from start to end.
func (t Text) slice(start, end int) Text {
	out := Text{s: t.s[start:end], markup: t.markup}
	if t.client == nil {
		return out
	}
	if len(t.client) == 1 && t.client[0][0] <= start && end <= t.client[0][1] {
		if start < end {
			out.client = []Span{{0, end - start}}
		}
		return out
	}
	for _, c := range t.client {
		if from, to := max(c[0], start), min(c[1], end); from < to {
			out.client = append(out.client, Span{from - start, to - start})
		}
	}
	return out
}

// made is a string computed from t: all of it is the client's if a part of t is.
func (t Text) made(s string) Text {
	out := NewText(s, Origin(t.client != nil))
	out.markup = t.markup
	return out
}

// find returns the byte index of the first sub, or -1.
func (t Text) find(sub string) int { return strings.Index(t.s, sub) }

// plain returns the text as str.
func (t Text) plain() Text {
	t.markup = false
	return t
}

// trim cuts the characters of which cut is true off the ends that are named.
func (t Text) trim(cut func(rune) bool, left, right bool) Text {
	start, end := 0, len(t.s)
	if left {
		start = len(t.s) - len(strings.TrimLeftFunc(t.s, cut))
	}
	if right {
		end = start + len(strings.TrimRightFunc(t.s[start:], cut))
	}
	return t.slice(start, end)
}

// byteOffset returns the byte offset of a character by its index, or the length behind the last.
func byteOffset(s string, index int) int {
	for i := range s {
		if index == 0 {
			return i
		}
		index--
	}
	return len(s)
}

// character returns the character at an index, which counts from the end if it is negative.
func (t Text) character(index int) (Value, bool) {
	start, size := 0, 0
	if index < 0 {
		for start = len(t.s); index < 0; index++ {
			if start == 0 {
				return nil, false
			}
			_, size = utf8.DecodeLastRuneInString(t.s[:start])
			start -= size
		}
	} else if start = byteOffset(t.s, index); start == len(t.s) {
		return nil, false
	}
	_, size = utf8.DecodeRuneInString(t.s[start:])
	return t.slice(start, start+size), true
}

// runes returns the byte offset of every character, and of the end.
func (r *run) runes(t Text) []int {
	r.room(wordBytes, len(t.s))
	r.made(wordBytes * len(t.s))
	offsets := make([]int, 0, len(t.s)+1)
	for i := range t.s {
		offsets = append(offsets, i)
	}
	return append(offsets, len(t.s))
}

// ascii reports whether every byte is a character.
func ascii(s string) bool {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// isSpace reports whether Python takes a character for white space.
func isSpace(c rune) bool {
	switch {
	case c <= ' ':
		return c == ' ' || '\t' <= c && c <= '\r' || 0x1c <= c && c <= 0x1f
	case c < 0x1680:
		return c == 0x85 || c == 0xa0
	}
	return c == 0x1680 || 0x2000 <= c && c <= 0x200a || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000
}

// lineEnd returns the length of the line break that s begins with, or 0.
func lineEnd(s string) int {
	if strings.HasPrefix(s, "\r\n") {
		return 2
	}
	c, size := utf8.DecodeRuneInString(s)
	switch c {
	case '\n', '\r', '\v', '\f', 0x1c, 0x1d, 0x1e, 0x85, 0x2028, 0x2029:
		return size
	}
	return 0
}

// splitLines is str.splitlines.
func (r *run) splitLines(t Text, keepEnds bool) []Text {
	var lines []Text
	start := 0
	for i := 0; i < len(t.s); {
		n := lineEnd(t.s[i:])
		if n == 0 {
			_, size := utf8.DecodeRuneInString(t.s[i:])
			i += size
			continue
		}
		end := i
		if keepEnds {
			end += n
		}
		r.made(textBytes)
		lines = append(lines, t.slice(start, end))
		i += n
		start = i
	}
	if start < len(t.s) {
		lines = append(lines, t.slice(start, len(t.s)))
	}
	return lines
}

// builder makes a Text out of pieces and charges them to the run.
type builder struct {
	r      *run
	b      []byte
	client []Span
}

func (b *builder) add(t Text) {
	b.r.made(len(t.s))
	at := len(b.b)
	b.b = append(b.b, t.s...)
	for _, c := range t.client {
		b.mark(at+c[0], at+c[1])
	}
}

func (b *builder) addString(s string) {
	b.r.made(len(s))
	b.b = append(b.b, s...)
}

// mark makes the client's what was written from start to end, at or behind the last mark.
func (b *builder) mark(start, end int) {
	if n := len(b.client); n > 0 && b.client[n-1][1] == start {
		b.client[n-1][1] = end
		return
	}
	b.client = append(b.client, Span{start, end})
}

func (b *builder) text() Text { return Text{s: string(b.b), client: b.client} }

// concat is a + b of strings.
func (r *run) concat(a, b Text) Text {
	switch {
	case a.markup || b.markup:
		out := r.concat(r.escape(a).plain(), r.escape(b).plain())
		out.markup = true
		return out
	case a.s == "":
		return b
	case b.s == "":
		return a
	case a.client == nil && b.client == nil:
		r.made(len(a.s) + len(b.s))
		return Text{s: a.s + b.s}
	}
	out := builder{r: r, b: make([]byte, 0, len(a.s)+len(b.s))}
	out.add(a)
	out.add(b)
	return out.text()
}

// repeat is t * n.
func (r *run) repeat(t Text, n int) Text {
	if n <= 0 || t.s == "" {
		return Text{markup: t.markup}
	}
	r.room(len(t.s), n)
	out := builder{r: r, b: make([]byte, 0, len(t.s)*n)}
	for range n {
		out.add(t)
	}
	text := out.text()
	text.markup = t.markup
	return text
}

// join puts sep between texts.
func (r *run) join(sep Text, texts []Text) Text {
	out := builder{r: r}
	for i, t := range texts {
		if i > 0 {
			out.add(sep)
		}
		out.add(t)
	}
	return out.text()
}

// replace is t.replace(from, to, limit); a negative limit is none.
func (r *run) replace(t Text, from string, to Text, limit int) Text {
	n := strings.Count(t.s, from)
	if limit >= 0 {
		n = min(n, limit)
	}
	if n == 0 {
		return t
	}
	r.room(len(to.s), n)
	if from == "" {
		return r.spread(t, to, n)
	}
	out := builder{r: r}
	at := 0
	for range n {
		i := at + strings.Index(t.s[at:], from)
		out.add(t.slice(at, i))
		out.add(to)
		at = i + len(from)
	}
	out.add(t.slice(at, len(t.s)))
	text := out.text()
	text.markup = t.markup
	return text
}

// spread puts to before n characters of t; before the end counts too.
func (r *run) spread(t, to Text, n int) Text {
	out := builder{r: r}
	at := 0
	for range n {
		r.step(1)
		out.add(to)
		_, size := utf8.DecodeRuneInString(t.s[at:])
		out.add(t.slice(at, at+size))
		at += size
	}
	out.add(t.slice(at, len(t.s)))
	text := out.text()
	text.markup = t.markup
	return text
}

var escaper = strings.NewReplacer("&", "&amp;", ">", "&gt;", "<", "&lt;", "'", "&#39;", `"`, "&#34;")

// escape is markupsafe.escape.
func (r *run) escape(t Text) Text {
	if !t.markup {
		s := escaper.Replace(t.s)
		r.made(len(s))
		if s != t.s {
			t = t.made(s)
		}
		t.markup = true
	}
	return t
}
