package output

import (
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"unicode/utf8"
)

// pythonCalls reads calls of OLMo 3, which are Python's with arguments by name:
//
//	<function_calls>
//	f(a="text", b=[1, True])
//	</function_calls>
//
// It makes JSON of the arguments of a call when that is complete.
type pythonCalls struct {
	c       *calls
	name    []byte
	args    []byte
	scan    pythonScanner
	inArgs  bool
	read    int
	closing closing
}

func pythonBlock(c *calls) block { return &pythonCalls{c: c, closing: closing{marker: pythonClose}} }

func (p *pythonCalls) feed(b byte) verdict {
	switch {
	case p.inArgs:
		if !p.scan.feed(b) {
			p.args = append(p.args, b)
			return more
		}
		object, err := pythonArguments(string(p.args))
		if err != nil || !p.c.begin(string(p.name)) {
			return refused
		}
		p.c.out.writeString(Arguments, object)
		p.name, p.args, p.inArgs = p.name[:0], p.args[:0], false
		p.read++
		p.c.out.complete++
		return sure
	case len(p.name) == 0 && (isSpace(b) && p.closing.matched == 0 || b == ',' && p.read > 0):
		return more
	case len(p.name) == 0 && p.read > 0 && (b == '<' || p.closing.matched > 0):
		return p.closing.feed(b)
	case b == '(' && len(p.name) > 0:
		if _, ok := p.c.tools[string(p.name)]; !ok {
			return refused
		}
		p.inArgs, p.scan = true, pythonScanner{depth: 1}
		return more
	case !isNameByte(b) || len(p.name) == maxHead:
		return refused
	}
	p.name = append(p.name, b)
	return more
}

func (p *pythonCalls) end() bool { return p.read > 0 && len(p.name) == 0 }

func isNameByte(b byte) bool {
	return b == '_' || b == '-' || b == '.' || b >= '0' && b <= '9' || b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= utf8.RuneSelf
}

// pythonName reports whether a name can stand before its arguments.
func pythonName(name string) bool {
	for i := range len(name) {
		if !isNameByte(name[i]) {
			return false
		}
	}
	return len(name) <= maxHead
}

// pythonScanner finds the bracket that closes a call.
type pythonScanner struct {
	depth   int
	quote   byte // 0: in no string
	escaped bool
}

// feed reads a byte; true: it is the last.
func (s *pythonScanner) feed(b byte) bool {
	switch {
	case s.escaped:
		s.escaped = false
	case s.quote != 0:
		if s.escaped = b == '\\'; b == s.quote {
			s.quote = 0
		}
	case b == '"' || b == '\'':
		s.quote = b
	case b == '(' || b == '[' || b == '{':
		s.depth++
	case b == ')' || b == ']' || b == '}':
		s.depth--
		return s.depth == 0
	}
	return false
}

// maxPythonDepth is the maximum nesting of values.
const maxPythonDepth = 64

var errPython = errors.New("not a list of arguments")

// pythonArguments makes a JSON object of arguments by name.
func pythonArguments(text string) (string, error) {
	p := &pythonParser{text: text}
	p.out.WriteByte('{')
	for p.space(); p.text != ""; p.space() {
		if p.out.Len() > 1 && (!p.take(',') || p.space() == "") {
			break
		}
		n := 0
		for n < len(p.text) && isNameByte(p.text[n]) {
			n++
		}
		name := p.text[:n]
		p.text = p.text[n:]
		if p.space(); n == 0 || !p.take('=') {
			return "", errPython
		}
		if p.out.Len() > 1 {
			p.out.WriteString(", ")
		}
		p.out.WriteString(`"` + inString(name) + `": `)
		if !p.value(0) {
			return "", errPython
		}
	}
	if p.text != "" {
		return "", errPython
	}
	p.out.WriteByte('}')
	return p.out.String(), nil
}

// pythonParser reads Python's literals and writes JSON.
type pythonParser struct {
	text string // what is left
	out  strings.Builder
}

// space skips white space, and returns what is left.
func (p *pythonParser) space() string {
	p.text = strings.TrimLeft(p.text, " \n\t\r")
	return p.text
}

func (p *pythonParser) take(b byte) bool {
	if p.text == "" || p.text[0] != b {
		return false
	}
	p.text = p.text[1:]
	return true
}

func (p *pythonParser) value(depth int) bool {
	if p.space() == "" || depth == maxPythonDepth {
		return false
	}
	switch p.text[0] {
	case '"', '\'':
		text, ok := p.string()
		p.out.WriteString(`"` + inString(text) + `"`)
		return ok
	case '[':
		return p.items('[', ']', depth, false)
	case '(':
		return p.items('(', ')', depth, false)
	case '{':
		return p.items('{', '}', depth, true)
	}
	n := strings.IndexAny(p.text, ",]})( \n\t\r")
	if n < 0 {
		n = len(p.text)
	}
	word := p.text[:n]
	p.text = p.text[n:]
	if c, ok := constants[word]; ok {
		word = c
	}
	p.out.WriteString(word)
	return json.Valid([]byte(word))
}

// items reads a list, a tuple or a dictionary.
func (p *pythonParser) items(open, end byte, depth int, pairs bool) bool {
	p.take(open)
	first, last := byte('['), byte(']')
	if pairs {
		first, last = '{', '}'
	}
	p.out.WriteByte(first)
	for n := 0; ; n++ {
		p.space()
		if n > 0 && !p.take(',') {
			break
		}
		if p.space() == "" || p.text[0] == end {
			break
		}
		if n > 0 {
			p.out.WriteString(", ")
		}
		if pairs {
			if p.text[0] != '"' && p.text[0] != '\'' {
				return false
			}
			key, ok := p.string()
			p.out.WriteString(`"` + inString(key) + `": `)
			if p.space(); !ok || !p.take(':') {
				return false
			}
		}
		if !p.value(depth + 1) {
			return false
		}
	}
	p.out.WriteByte(last)
	return p.take(end)
}

// string reads a string literal.
func (p *pythonParser) string() (string, bool) {
	quote := p.text[0]
	var b strings.Builder
	for rest := p.text[1:]; rest != ""; {
		if rest[0] == quote {
			p.text = rest[1:]
			return b.String(), true
		}
		switch {
		case rest[0] != '\\' || len(rest) == 1:
			b.WriteByte(rest[0])
			rest = rest[1:]
		case rest[1] == '\'' || rest[1] == '"':
			b.WriteByte(rest[1])
			rest = rest[2:]
		case rest[1] == '\n':
			rest = rest[2:]
		default:
			r, _, tail, err := strconv.UnquoteChar(rest, quote)
			if err != nil { // Python keeps the backslash of what is no escape
				b.WriteByte('\\')
				rest = rest[1:]
				continue
			}
			b.WriteRune(r) // \xe9 is U+00E9, as in Python
			rest = tail
		}
	}
	return "", false
}
