package grammar

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxRepeats is the maximum of {m,n}.
const maxRepeats = 10000

// ParseGBNF is the texts of the rule root of a grammar in GBNF, llama.cpp's form of EBNF, which XGrammar takes, too:
//
//	root  ::= "a" item+ | [0-9a-f]{2,4}   # a comment
//	item  ::= ("x" | "\n")? .
func ParseGBNF(text string) (Expr, error) {
	if len(text) > maxGrammar {
		return nil, fmt.Errorf("it has %d bytes, and the maximum is %d", len(text), maxGrammar)
	}
	if !utf8.ValidString(text) {
		return nil, errors.New("it is not valid UTF-8")
	}
	p := &gbnf{text: text, all: text, rules: map[string]*Rule{}}
	for p.space(true); p.text != ""; p.space(true) {
		if err := p.rule(); err != nil {
			return nil, fmt.Errorf("line %d: %w", 1+strings.Count(p.all[:len(p.all)-len(p.text)], "\n"), err)
		}
	}
	for name, r := range p.rules {
		if r.Body == nil {
			return nil, fmt.Errorf("rule %s is not defined", name)
		}
	}
	root := p.rules["root"]
	if root == nil {
		return nil, errors.New(`there is no rule named root: a grammar has the form of GBNF, root ::= "a" | "b"`)
	}
	return root, nil
}

type gbnf struct {
	text, all string
	rules     map[string]*Rule
	depth     int
}

// space skips white space and comments, those with newlines only between rules and in brackets.
func (p *gbnf) space(newlines bool) {
	for p.text != "" {
		switch c := p.text[0]; {
		case c == ' ' || c == '\t' || newlines && (c == '\n' || c == '\r'):
			p.text = p.text[1:]
		case c == '#':
			n := strings.IndexByte(p.text, '\n')
			if n < 0 {
				n = len(p.text)
			}
			p.text = p.text[n:]
		default:
			return
		}
	}
}

func (p *gbnf) take(s string) bool {
	rest, ok := strings.CutPrefix(p.text, s)
	if ok {
		p.text = rest
	}
	return ok
}

func (p *gbnf) name() string {
	n := 0
	for n < len(p.text) {
		if c := p.text[n]; !(c == '-' || c == '_' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z') {
			break
		}
		n++
	}
	name := p.text[:n]
	p.text = p.text[n:]
	return name
}

func (p *gbnf) named(name string) *Rule {
	r := p.rules[name]
	if r == nil {
		r = &Rule{Name: name}
		p.rules[name] = r
	}
	return r
}

func (p *gbnf) rule() error {
	name := p.name()
	if name == "" {
		return fmt.Errorf("expected the name of a rule, and found %q", p.next())
	}
	p.space(false)
	if !p.take("::=") {
		return fmt.Errorf("expected ::= behind %s, and found %q", name, p.next())
	}
	r := p.named(name)
	if r.Body != nil {
		return fmt.Errorf("rule %s is there twice", name)
	}
	p.space(true)
	body, err := p.alternatives(false)
	if err != nil {
		return err
	}
	r.Body = body
	if p.text != "" && p.text[0] != '\n' && p.text[0] != '\r' {
		return fmt.Errorf("unexpected %q", p.next())
	}
	return nil
}

// next is the character that comes next, for errors.
func (p *gbnf) next() string {
	_, n := utf8.DecodeRuneInString(p.text)
	return p.text[:n]
}

// alternatives reads up to the end of a rule or of brackets.
func (p *gbnf) alternatives(nested bool) (Expr, error) {
	if p.depth++; p.depth > maxNesting/4 {
		return nil, errors.New("brackets are nested too deep")
	}
	defer func() { p.depth-- }()
	var parts []Expr
	for {
		part, err := p.sequence(nested)
		if err != nil {
			return nil, err
		}
		parts = append(parts, part)
		// A rule goes on in the next line where that begins with a bar.
		before := p.text
		p.space(true)
		if !p.take("|") {
			if !nested {
				p.text = before
			}
			break
		}
		p.space(true)
	}
	if len(parts) == 1 {
		return parts[0], nil
	}
	return Any(parts...), nil
}

func (p *gbnf) sequence(nested bool) (Expr, error) {
	var parts []Expr
	for {
		p.space(nested)
		if p.text == "" || strings.IndexByte("|)\n\r", p.text[0]) >= 0 {
			return Seq(parts...), nil
		}
		part, err := p.element()
		if err != nil {
			return nil, err
		}
	repeated:
		for p.text != "" {
			least, most := 0, -1
			switch p.text[0] {
			case '*':
			case '+':
				least = 1
			case '?':
				most = 1
			case '{':
				end := strings.IndexByte(p.text, '}')
				if end < 0 {
					return nil, errors.New("{ without }")
				}
				if least, most, err = repeats(p.text[1:end]); err != nil {
					return nil, err
				}
				p.text = p.text[end:]
			default:
				break repeated
			}
			p.text = p.text[1:]
			part = Repeat(part, least, most)
		}
		parts = append(parts, part)
	}
}

// repeats reads m, m, and m,n.
func repeats(text string) (least, most int, err error) {
	low, high, comma := strings.Cut(text, ",")
	low, high = strings.TrimSpace(low), strings.TrimSpace(high)
	if low != "" || !comma {
		least, err = strconv.Atoi(low)
	}
	most = least
	if comma {
		if most = -1; high != "" && err == nil {
			most, err = strconv.Atoi(high)
		}
	}
	if err != nil || least < 0 || most >= 0 && most < least || comma && high != "" && most < 0 {
		return 0, 0, fmt.Errorf("{%s} is no number of repetitions", text)
	}
	if max(least, most) > maxRepeats {
		return 0, 0, fmt.Errorf("{%s} is more than %d repetitions", text, maxRepeats)
	}
	return least, most, nil
}

func (p *gbnf) element() (Expr, error) {
	switch {
	case p.take("("):
		p.space(true)
		e, err := p.alternatives(true)
		if err != nil {
			return nil, err
		}
		if !p.take(")") {
			return nil, errors.New("( without )")
		}
		return e, nil
	case p.take(`"`):
		var b strings.Builder
		for !p.take(`"`) {
			r, err := p.char()
			if err != nil {
				return nil, err
			}
			b.WriteRune(r)
		}
		return Literal(b.String()), nil
	case p.take("["):
		return p.class()
	case p.take("."):
		return Runes(0, utf8.MaxRune), nil
	}
	name := p.name()
	if name == "" {
		return nil, fmt.Errorf("unexpected %q", p.next())
	}
	return p.named(name), nil
}

func (p *gbnf) class() (Expr, error) {
	not := p.take("^")
	var ranges []rune
	for !p.take("]") {
		lo, err := p.char()
		if err != nil {
			return nil, err
		}
		hi := lo
		if strings.HasPrefix(p.text, "-") && !strings.HasPrefix(p.text, "-]") {
			p.text = p.text[1:]
			if hi, err = p.char(); err != nil {
				return nil, err
			}
		}
		if hi < lo {
			return nil, fmt.Errorf("[%c-%c] is no range", lo, hi)
		}
		ranges = append(ranges, lo, hi)
	}
	if not {
		ranges = complement(ranges)
	}
	return Runes(ranges...), nil
}

// complement is all characters that ranges do not have.
func complement(ranges []rune) []rune {
	out := []rune{0, utf8.MaxRune}
	for i := 0; i < len(ranges); i += 2 {
		var rest []rune
		for j := 0; j < len(out); j += 2 {
			if lo, hi := out[j], min(out[j+1], ranges[i]-1); lo <= hi {
				rest = append(rest, lo, hi)
			}
			if lo, hi := max(out[j], ranges[i+1]+1), out[j+1]; lo <= hi {
				rest = append(rest, lo, hi)
			}
		}
		out = rest
	}
	return out
}

// char reads a character of a literal or of a class.
func (p *gbnf) char() (rune, error) {
	if p.text == "" || p.text[0] == '\n' {
		return 0, errors.New("a text or class that does not end")
	}
	if !p.take(`\`) {
		r, n := utf8.DecodeRuneInString(p.text)
		p.text = p.text[n:]
		return r, nil
	}
	if p.text == "" {
		return 0, errors.New("a text or class that does not end")
	}
	c := p.text[0]
	p.text = p.text[1:]
	digits := 0
	switch c {
	case 'n':
		return '\n', nil
	case 'r':
		return '\r', nil
	case 't':
		return '\t', nil
	case '\\', '"', '\'', '[', ']', '-', '^', '.', '/', '|', '(', ')', '*', '+', '?', '{', '}':
		return rune(c), nil
	case 'x':
		digits = 2
	case 'u':
		digits = 4
	case 'U':
		digits = 8
	default:
		return 0, fmt.Errorf(`unknown escape \%c`, c)
	}
	if len(p.text) < digits {
		return 0, fmt.Errorf(`\%c needs %d digits`, c, digits)
	}
	n, err := strconv.ParseUint(p.text[:digits], 16, 32)
	if err != nil || !utf8.ValidRune(rune(n)) {
		return 0, fmt.Errorf(`\%c%s is no character`, c, p.text[:digits])
	}
	p.text = p.text[digits:]
	return rune(n), nil
}
