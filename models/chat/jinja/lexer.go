package jinja

import (
	"fmt"
	"math/big"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// token is a lexical element. Kinds are data, block_begin, block_end, variable_begin, variable_end, name, string,
// number, eof, and the operators themselves.
type token struct {
	kind  string
	text  string // of a name or data; the value of a string
	value Value  // of a number
	line  int
}

// lexer cuts a template into tokens, with the rules of jinja2's lexer under trim_blocks and lstrip_blocks.
type lexer struct {
	src    string
	pos    int
	line   int
	tokens []token
	// lineStarting is true if what was read last ended a line, so that white space before a tag may be its indentation.
	lineStarting bool
}

// lex raises for text that is no template.
func lex(src string) []token {
	src = normalizeNewlines(src)
	l := &lexer{src: strings.TrimSuffix(src, "\n"), line: 1, lineStarting: true}
	for l.pos < len(l.src) {
		l.data()
	}
	l.emit("eof", "")
	return l.tokens
}

func normalizeNewlines(s string) string {
	if strings.IndexByte(s, '\r') < 0 {
		return s
	}
	return strings.ReplaceAll(strings.ReplaceAll(s, "\r\n", "\n"), "\r", "\n")
}

func (l *lexer) emit(kind, text string) {
	l.tokens = append(l.tokens, token{kind: kind, text: text, line: l.line})
}

func (l *lexer) fail(format string, args ...any) {
	raiseAt(l.line, format, args...)
}

// advance moves to end.
func (l *lexer) advance(end int) {
	read := l.src[l.pos:end]
	l.line += strings.Count(read, "\n")
	l.lineStarting = strings.HasSuffix(read, "\n")
	l.pos = end
}

// data reads text up to the next tag, and the tag.
func (l *lexer) data() {
	rest := l.src[l.pos:]
	i := 0
	for {
		j := strings.IndexByte(rest[i:], '{')
		if j < 0 || i+j+1 >= len(rest) {
			l.emit("data", rest)
			l.advance(len(l.src))
			return
		}
		i += j
		if c := rest[i+1]; c == '%' || c == '{' || c == '#' {
			break
		}
		i++
	}
	text, kind, start := rest[:i], rest[i+1], l.pos+i
	body := start + 2
	sign := byte(0)
	if body < len(l.src) && (l.src[body] == '-' || l.src[body] == '+') {
		sign = l.src[body]
		body++
	}
	lineStart := strings.LastIndexByte(text, '\n') + 1
	kept := text
	switch {
	case sign == '-':
		kept = strings.TrimRightFunc(text, isSpace)
	case sign == 0 && kind != '{' && (lineStart > 0 || l.lineStarting) && strings.TrimLeftFunc(text[lineStart:], isSpace) == "":
		kept = text[:lineStart]
	}
	if kept != "" {
		l.emit("data", kept)
	}
	l.advance(start)
	switch {
	case kind == '#':
		l.advance(body)
		l.comment()
	case kind == '{':
		l.emit("variable_begin", "")
		l.advance(body)
		l.expression("variable_end", "}}")
	case !l.raw(body):
		l.emit("block_begin", "")
		l.advance(body)
		l.expression("block_end", "%}")
	}
}

func (l *lexer) comment() {
	i := strings.Index(l.src[l.pos:], "#}")
	if i < 0 {
		l.fail("Missing end of comment tag")
	}
	l.endTag(l.pos+i, l.pos, 2)
}

// endTag moves behind the end of a tag at i and the white space that it takes with it. A sign may stand before it,
// not before from.
func (l *lexer) endTag(i, from, size int) {
	end := i + size
	switch {
	case i > from && l.src[i-1] == '-':
		end = l.skipSpace(end)
	case i > from && l.src[i-1] == '+':
	case strings.HasPrefix(l.src[end:], "\n"):
		end++
	}
	l.advance(end)
}

func (l *lexer) skipSpace(at int) int {
	return len(l.src) - len(strings.TrimLeftFunc(l.src[at:], isSpace))
}

// raw reads a raw block, if the tag begins one.
func (l *lexer) raw(body int) bool {
	word := l.skipSpace(body)
	if !strings.HasPrefix(l.src[word:], "raw") {
		return false
	}
	end := l.skipSpace(word + 3)
	switch {
	case strings.HasPrefix(l.src[end:], "-%}"):
		end = l.skipSpace(end + 3)
	case strings.HasPrefix(l.src[end:], "%}"):
		end += 2
	default:
		return false
	}
	l.advance(end)
	for at := l.pos; ; at++ {
		i := strings.Index(l.src[at:], "{%")
		if i < 0 {
			l.fail("Missing end of raw directive")
		}
		at += i
		body, sign := at+2, byte(0)
		if body < len(l.src) && (l.src[body] == '-' || l.src[body] == '+') {
			sign = l.src[body]
			body++
		}
		word := l.skipSpace(body)
		if !strings.HasPrefix(l.src[word:], "endraw") {
			continue
		}
		end := l.skipSpace(word + len("endraw"))
		signed := end
		if end < len(l.src) && (l.src[end] == '-' || l.src[end] == '+') {
			end++
		}
		if !strings.HasPrefix(l.src[end:], "%}") {
			continue
		}
		text := l.src[l.pos:at]
		lineStart := strings.LastIndexByte(text, '\n') + 1
		if sign == '-' {
			text = strings.TrimRightFunc(text, isSpace)
		} else if sign == 0 && (lineStart > 0 || l.lineStarting) && strings.TrimLeftFunc(text[lineStart:], isSpace) == "" {
			text = text[:lineStart]
		}
		if text != "" {
			l.emit("data", text)
		}
		l.endTag(end, signed, 2)
		return true
	}
}

// expression reads the tokens of a tag up to its end.
func (l *lexer) expression(kind, end string) {
	var open []byte
	for l.pos < len(l.src) {
		rest := l.src[l.pos:]
		if len(open) == 0 {
			at := -1
			switch {
			case strings.HasPrefix(rest, end):
				at = 0
			case rest[0] == '-' && strings.HasPrefix(rest[1:], end), rest[0] == '+' && kind == "block_end" && strings.HasPrefix(rest[1:], end):
				at = 1
			}
			if at >= 0 {
				l.emit(kind, "")
				switch {
				case kind == "block_end":
					l.endTag(l.pos+at, l.pos, len(end))
				case at == 1:
					l.advance(l.skipSpace(l.pos + 1 + len(end)))
				default:
					l.advance(l.pos + len(end))
				}
				return
			}
		}
		open = l.next(rest, open)
	}
}

// next reads one token.
func (l *lexer) next(rest string, open []byte) []byte {
	c, size := utf8.DecodeRuneInString(rest)
	switch {
	case isSpace(c):
		l.advance(l.skipSpace(l.pos))
	case c < utf8.RuneSelf && isDigit(byte(c)):
		l.number(rest)
	case isWord(c):
		n := strings.IndexFunc(rest, func(c rune) bool { return !isWord(c) && !unicode.Is(unicode.Mn, c) && !unicode.Is(unicode.Mc, c) })
		if n < 0 {
			n = len(rest)
		}
		l.emit("name", rest[:n])
		l.advance(l.pos + n)
	case c == '\'' || c == '"':
		n := 1
		for n < len(rest) && rest[n] != byte(c) {
			if rest[n] == '\\' {
				n++
			}
			n++
		}
		if n >= len(rest) {
			l.fail("unexpected char %s", quote(string(c)))
		}
		l.emit("string", l.unescape(rest[1:n]))
		l.advance(l.pos + n + 1)
	default:
		op := rest[:size]
		if len(rest) > 1 {
			switch rest[:2] {
			case "//", "**", "==", "!=", ">=", "<=":
				op = rest[:2]
			}
		}
		if len(op) == 1 && strings.IndexByte("+-/*%~[](){}><=.:|,;", op[0]) < 0 || size > 1 || op == "!" {
			l.fail("unexpected char %s", quote(string(c)))
		}
		switch op {
		case "(":
			open = append(open, ')')
		case "[":
			open = append(open, ']')
		case "{":
			open = append(open, '}')
		case ")", "]", "}":
			if len(open) == 0 {
				l.fail("unexpected '%s'", op)
			}
			if want := open[len(open)-1]; want != op[0] {
				l.fail("unexpected '%s', expected '%c'", op, want)
			}
			open = open[:len(open)-1]
		}
		l.emit(op, "")
		l.advance(l.pos + len(op))
	}
	return open
}

// digits returns the length of digits of a base at the start of s, with single underscores between them.
func digits(s, set string) int {
	n := 0
	for n < len(s) && (strings.IndexByte(set, s[n]) >= 0 || s[n] == '_' && n > 0 && n+1 < len(s) && strings.IndexByte(set, s[n+1]) >= 0) {
		n++
	}
	return n
}

const tenDigits = "0123456789"

func (l *lexer) number(rest string) {
	n := digits(rest, tenDigits)
	end := n
	if l.pos == 0 || l.src[l.pos-1] != '.' {
		if end < len(rest) && rest[end] == '.' {
			if f := digits(rest[end+1:], tenDigits); f > 0 {
				end += 1 + f
			}
		}
		if end < len(rest) && rest[end]|0x20 == 'e' {
			exp := end + 1
			if exp < len(rest) && (rest[exp] == '+' || rest[exp] == '-') {
				exp++
			}
			if e := digits(rest[exp:], tenDigits); e > 0 {
				end = exp + e
			}
		}
	}
	if end > n {
		f, err := strconv.ParseFloat(strings.ReplaceAll(rest[:end], "_", ""), 64)
		if err != nil && f == 0 {
			l.fail("invalid number")
		}
		l.emitNumber(f, end)
		return
	}
	base := 10
	if rest[0] == '0' {
		n = digits(rest, "0")
		if len(rest) > 1 {
			set := map[byte]string{'x': "0123456789abcdefABCDEF", 'o': "01234567", 'b': "01"}[rest[1]|0x20]
			if skip := 2; set != "" {
				if len(rest) > 2 && rest[2] == '_' {
					skip = 3
				}
				if d := digits(rest[skip:], set); d > 0 {
					n, base = skip+d, 0
				}
			}
		}
	}
	b, ok := new(big.Int).SetString(strings.ReplaceAll(rest[:n], "_", ""), base)
	if !ok || b.BitLen() > maxBits {
		l.fail("invalid number")
	}
	l.emitNumber(small(b), n)
}

func (l *lexer) emitNumber(v Value, n int) {
	l.tokens = append(l.tokens, token{kind: "number", value: v, line: l.line})
	l.advance(l.pos + n)
}

// unescape decodes a string literal as Python's unicode-escape codec, behind ascii with backslashreplace, does.
func (l *lexer) unescape(s string) string {
	if strings.IndexByte(s, '\\') < 0 {
		return s
	}
	// A backslash before a character outside ASCII escapes the backslash of that character's own escape.
	if !ascii(s) {
		s = escapeNonASCII(s)
	}
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] != '\\' || i+1 == len(s) {
			b = append(b, s[i])
			continue
		}
		i++
		width := 0
		switch c := s[i]; c {
		case '\n':
		case '\\', '\'', '"':
			b = append(b, c)
		case 'a', 'b', 'f', 'n', 'r', 't', 'v':
			b = append(b, "\a\b\f\n\r\t\v"[strings.IndexByte("abfnrtv", c)])
		case 'x':
			width = 2
		case 'u':
			width = 4
		case 'U':
			width = 8
		case '0', '1', '2', '3', '4', '5', '6', '7':
			end := i
			for end < len(s) && end < i+3 && '0' <= s[end] && s[end] <= '7' {
				end++
			}
			n, _ := strconv.ParseUint(s[i:end], 8, 32)
			b = utf8.AppendRune(b, rune(n))
			i = end - 1
		case 'N':
			l.fail("characters by name (\\N{...}) are not supported")
		default:
			b = append(b, '\\', c)
		}
		if width > 0 {
			if i+width >= len(s) {
				l.fail("truncated \\%c escape", s[i])
			}
			n, err := strconv.ParseUint(s[i+1:i+1+width], 16, 32)
			if err != nil || n > unicode.MaxRune {
				l.fail("truncated \\%c escape", s[i])
			}
			b = utf8.AppendRune(b, rune(n))
			i += width
		}
	}
	return string(b)
}

func (t token) String() string {
	switch t.kind {
	case "name":
		return t.text
	case "data":
		return "template data / text"
	case "eof":
		return "end of template"
	case "block_begin":
		return "begin of statement block"
	case "block_end":
		return "end of statement block"
	case "variable_begin":
		return "begin of print statement"
	case "variable_end":
		return "end of print statement"
	case "number":
		return fmt.Sprint(t.value)
	}
	return t.kind
}
