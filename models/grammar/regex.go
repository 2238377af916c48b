package grammar

import (
	"errors"
	"fmt"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

const (
	// maxPattern is the maximum length of a regular expression, maxGrammar that of a grammar, in bytes.
	maxPattern = 16 << 10
	maxGrammar = 256 << 10
)

// Regex is the texts that a regular expression matches as a whole. It has the syntax of Go (RE2), which is that of
// Python, of ECMAScript and of others without backreferences, lookbehind and word boundaries; \s and the dot match what they
// do in all of them. The anchor ^ may be at the beginning alone; $ and lookahead may be anywhere but in a repetition.
func Regex(pattern string) (Expr, error) {
	p, err := ParsePattern(pattern)
	if err != nil {
		return nil, err
	}
	return p.Whole(Runes), nil
}

// Pattern is a parsed regular expression.
type Pattern struct {
	re *syntax.Regexp
	// ahead are its lookaheads, by the names of the groups that stand for them in re.
	ahead map[string]lookahead
	// looks: it has lookaheads, or anchors ($) that are not at its end.
	looks bool
}

// ParsePattern parses a regular expression: what it matches in Go, Python and ECMAScript, as far as their white space and
// their dots differ. Errors name what is not supported.
func ParsePattern(pattern string) (*Pattern, error) { return parse(pattern, false) }

// ParseExcluded parses a regular expression that texts are not to match: what it matches in at least one of them.
func ParseExcluded(pattern string) (*Pattern, error) { return parse(pattern, true) }

func parse(pattern string, loose bool) (*Pattern, error) {
	if len(pattern) > maxPattern {
		return nil, fmt.Errorf("it has %d bytes, and the maximum is %d", len(pattern), maxPattern)
	}
	if !utf8.ValidString(pattern) {
		return nil, errors.New("it is not valid UTF-8")
	}
	return parsePattern(pattern, 0, loose)
}

// parsePattern parses a pattern within some lookaheads.
func parsePattern(pattern string, depth int, loose bool) (*Pattern, error) {
	text, ahead, err := takeLookaheads(pattern, depth, loose)
	if err != nil {
		return nil, err
	}
	for i := 0; i < len(text); i += width(text[i:]) {
		if escape := text[i:min(i+2, len(text))]; escape[0] == '\\' && escape[1:] >= "1" && escape[1:] <= "9" { // Go reads some as octal
			return nil, fmt.Errorf("backreferences (%s) are not supported", escape)
		}
	}
	re, err := syntax.Parse(dialects(text, loose), syntax.Perl)
	if err != nil {
		var bad *syntax.Error
		if errors.As(err, &bad) {
			return nil, fmt.Errorf("%s", unsupportedPattern(bad))
		}
		return nil, err
	}
	p := &Pattern{re, ahead, len(ahead) > 0}
	if err := p.checkAnchors(re, true, true, false); err != nil {
		return nil, err
	}
	if depth == 0 && p.looks && p.mixed(re) {
		return nil, errors.New("an anchor (^) in some alternatives only, beside lookahead ((?=, (?!) or anchors ($) that are not at the end, is not supported")
	}
	return p, nil
}

// unsupportedPattern says what is wrong with a pattern, in the words of those who write it.
func unsupportedPattern(e *syntax.Error) string {
	at := strings.TrimPrefix(e.Expr, "(?P")
	switch {
	case strings.HasPrefix(at, "(?<=") || strings.HasPrefix(at, "(?<!"):
		return "lookbehind ((?<=, (?<!) is not supported"
	}
	return fmt.Sprintf("%s: %s", e.Code, e.Expr)
}

// Parts of classes: what dialects of regular expressions take for white space, all of them and some, and what is none.
const (
	allSpaces  = `\t\n\f\r `
	someSpaces = `\t-\r \x{1c}-\x{1f}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}`
	notAll     = `\x{0}-\x{8}\x{b}\x{e}-\x{1f}\x{21}-\x{10ffff}`
	notSome    = `\x{0}-\x{8}\x{e}-\x{1b}\x{21}-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027}\x{202a}-\x{202e}\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{fefe}\x{ff00}-\x{10ffff}`
)

// dialects writes a pattern as Go does: \uXXXX, two of them that are a surrogate pair as their one character, and \s, \S and
// the dot as what they match in all dialects, those of Go, Python and ECMAScript, or, where loose, in at least one.
func dialects(pattern string, loose bool) string {
	var b strings.Builder
	dotAll := false
	for i := 0; i < len(pattern) && !dotAll; i += width(pattern[i:]) {
		dotAll = dotMatchesAll.MatchString(pattern[i:])
	}
	for i := 0; i < len(pattern); {
		end := i + width(pattern[i:])
		part := pattern[i:end]
		switch i = end; {
		case part[0] == '[':
			open := 1
			for open < len(part) && (part[open] == '^' || part[open] == ']') && open < 3 {
				open++
			}
			b.WriteString(part[:open])
			within := loose != strings.HasPrefix(part, "[^")
			for j := open; j < len(part); {
				n := 1
				if part[j] == '\\' {
					n = min(2, len(part)-j)
				}
				escape := part[j : j+n]
				if r, more := unicodeEscape(part[j:]); more > 0 {
					escape, n = r, more
				}
				j += n
				switch {
				case escape == `\s` && within:
					escape = someSpaces
				case escape == `\s`:
					escape = allSpaces
				case escape == `\S` && within:
					escape = notAll
				case escape == `\S`:
					escape = notSome
				}
				b.WriteString(escape)
			}
		case part == `\s` || part == `\S`:
			b.WriteString(dialects("["+part+"]", loose))
		case part == "." && loose && !dotAll:
			b.WriteString(`[^\n]`)
		case part == "." && !dotAll:
			b.WriteString(`[^\n\r\x{2028}\x{2029}]`)
		case part == `\u`:
			r, more := unicodeEscape(pattern[end-2:])
			if more == 0 {
				r, more = part, 2
			}
			b.WriteString(r)
			i = end - 2 + more
		default:
			b.WriteString(part)
		}
	}
	return b.String()
}

// dotMatchesAll is the flag of a dot that matches ends of lines.
var dotMatchesAll = regexp.MustCompile(`^\(\?[a-zA-Z]*s`)

// unicodeEscape is \uXXXX, or two of them that are a surrogate pair, as Go writes it, and its length; 0: the pattern does
// not begin with one.
func unicodeEscape(pattern string) (escape string, length int) {
	if len(pattern) < 6 || pattern[:2] != `\u` || !isHex(pattern[2:6]) {
		return "", 0
	}
	r, length := hexRune(pattern[2:6]), 6
	if next := pattern[6:]; utf16.IsSurrogate(r) && len(next) >= 6 && next[:2] == `\u` && isHex(next[2:6]) {
		if pair := utf16.DecodeRune(r, hexRune(next[2:6])); pair != utf8.RuneError {
			r, length = pair, 12
		}
	}
	return fmt.Sprintf(`\x{%x}`, r), length
}

func isHex(s string) bool {
	return strings.IndexFunc(s, func(r rune) bool {
		return !(r >= '0' && r <= '9' || r >= 'a' && r <= 'f' || r >= 'A' && r <= 'F')
	}) < 0
}

// hexRune is the character of four hexadecimal digits.
func hexRune(digits string) rune {
	n, err := strconv.ParseUint(digits, 16, 16)
	if err != nil {
		panic("grammar: " + digits + " are no hexadecimal digits")
	}
	return rune(n)
}

// checkAnchors refuses what looks at what is before it, but for anchors at the beginning of the whole, and what looks at
// what is behind it within repetitions.
func (p *Pattern) checkAnchors(re *syntax.Regexp, first, last, repeated bool) error {
	switch re.Op {
	case syntax.OpWordBoundary, syntax.OpNoWordBoundary:
		return errors.New(`word boundaries (\b, \B) are not supported`)
	case syntax.OpBeginLine, syntax.OpEndLine:
		return errors.New("anchors of lines ((?m)^ and $) are not supported")
	case syntax.OpBeginText:
		if !first {
			return errors.New(`an anchor (^) that is not at the beginning is not supported`)
		}
	case syntax.OpEndText:
		if repeated {
			return errors.New(`an anchor ($) within a repetition (*, +, {m,n}) is not supported`)
		}
		p.looks = p.looks || !last
	case syntax.OpConcat:
		for i, sub := range re.Sub {
			behind := slices.ContainsFunc(re.Sub[:i], func(s *syntax.Regexp) bool { return s.Op == syntax.OpEndText || p.advances(s) })
			if err := p.checkAnchors(sub, first && !behind, last && !slices.ContainsFunc(re.Sub[i+1:], p.advances), repeated); err != nil {
				return err
			}
		}
		return nil
	case syntax.OpCapture:
		switch {
		case p.reads(re):
		case repeated:
			return errors.New("lookahead ((?=, (?!) within a repetition (*, +, {m,n}) is not supported")
		case anchored(p.ahead[re.Name].of.re) && !(first && p.begins(p.re) == 1):
			return errors.New("an anchor (^) in a lookahead ((?=, (?!) that is not behind an anchor itself is not supported")
		}
	case syntax.OpStar, syntax.OpPlus, syntax.OpRepeat:
		first, last, repeated = false, false, true
	case syntax.OpQuest:
		first, last = false, false
	}
	for _, sub := range re.Sub {
		if err := p.checkAnchors(sub, first, last, repeated); err != nil {
			return err
		}
	}
	return nil
}

// Whole is the texts that the pattern matches from the first character to the last. runes makes an Expr of ranges of
// characters, as Runes does.
func (p *Pattern) Whole(runes func(...rune) Expr) Expr {
	if p.looks {
		return p.before(p.re, runes, Seq())
	}
	return convert(p.re, runes)
}

// Within is the texts in which the pattern matches somewhere, with any number of others around it where it has no anchor.
// Those around a pattern that looks at them are characters of runes.
func (p *Pattern) Within(runes func(...rune) Expr, others Expr) Expr {
	if p.looks {
		return p.somewhere(p.re, runes)
	}
	return within(p.re, runes, Repeat(others, 0, -1), true, true)
}

// within adds others at the ends, for each alternative by itself.
func within(re *syntax.Regexp, runes func(...rune) Expr, others Expr, first, last bool) Expr {
	switch re.Op {
	case syntax.OpCapture:
		return within(re.Sub[0], runes, others, first, last)
	case syntax.OpAlternate:
		parts := make([]Expr, len(re.Sub))
		for i, sub := range re.Sub {
			parts[i] = within(sub, runes, others, first, last)
		}
		return Any(parts...)
	case syntax.OpConcat:
		n := len(re.Sub)
		if n == 0 {
			break
		}
		if n == 1 {
			return within(re.Sub[0], runes, others, first, last)
		}
		parts := []Expr{within(re.Sub[0], runes, others, first, false)}
		for _, sub := range re.Sub[1 : n-1] {
			parts = append(parts, convert(sub, runes))
		}
		return Seq(append(parts, within(re.Sub[n-1], runes, others, false, last))...)
	case syntax.OpBeginText:
		if last {
			return others
		}
		return Seq()
	case syntax.OpEndText:
		if first {
			return others
		}
		return Seq()
	}
	e := convert(re, runes)
	if first {
		e = Seq(others, e)
	}
	if last {
		e = Seq(e, others)
	}
	return e
}

func convert(re *syntax.Regexp, runes func(...rune) Expr) Expr {
	switch re.Op {
	case syntax.OpNoMatch:
		return Any()
	case syntax.OpLiteral:
		parts := make([]Expr, len(re.Rune))
		for i, r := range re.Rune {
			ranges := []rune{r, r}
			if re.Flags&syntax.FoldCase != 0 {
				for f := unicode.SimpleFold(r); f != r; f = unicode.SimpleFold(f) {
					ranges = append(ranges, f, f)
				}
			}
			parts[i] = runes(ranges...)
		}
		return Seq(parts...)
	case syntax.OpCharClass:
		return runes(re.Rune...)
	case syntax.OpAnyCharNotNL:
		return runes(0, '\n'-1, '\n'+1, utf8.MaxRune)
	case syntax.OpAnyChar:
		return runes(0, utf8.MaxRune)
	case syntax.OpCapture:
		return convert(re.Sub[0], runes)
	case syntax.OpStar:
		return Repeat(convert(re.Sub[0], runes), 0, -1)
	case syntax.OpPlus:
		return Repeat(convert(re.Sub[0], runes), 1, -1)
	case syntax.OpQuest:
		return Optional(convert(re.Sub[0], runes))
	case syntax.OpRepeat:
		return Repeat(convert(re.Sub[0], runes), re.Min, re.Max)
	case syntax.OpConcat, syntax.OpAlternate:
		parts := make([]Expr, len(re.Sub))
		for i, sub := range re.Sub {
			parts[i] = convert(sub, runes)
		}
		if re.Op == syntax.OpConcat {
			return Seq(parts...)
		}
		return Any(parts...)
	}
	return Seq() // an empty match, or an anchor at an end
}
