package grammar

import (
	"errors"
	"fmt"
	"regexp/syntax"
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
// Python, of ECMAScript and of others without backreferences and assertions; anchors may be at the ends alone.
func Regex(pattern string) (Expr, error) {
	p, err := ParsePattern(pattern)
	if err != nil {
		return nil, err
	}
	return p.Whole(Runes), nil
}

// Pattern is a parsed regular expression.
type Pattern struct{ re *syntax.Regexp }

// ParsePattern parses a regular expression. Errors name what is not supported.
func ParsePattern(pattern string) (*Pattern, error) {
	if len(pattern) > maxPattern {
		return nil, fmt.Errorf("it has %d bytes, and the maximum is %d", len(pattern), maxPattern)
	}
	if !utf8.ValidString(pattern) {
		return nil, errors.New("it is not valid UTF-8")
	}
	re, err := syntax.Parse(ecmaEscapes(pattern), syntax.Perl)
	if err != nil {
		var bad *syntax.Error
		if errors.As(err, &bad) {
			return nil, fmt.Errorf("%s", unsupportedPattern(bad))
		}
		return nil, err
	}
	if err := checkAnchors(re, true, true); err != nil {
		return nil, err
	}
	return &Pattern{re}, nil
}

// unsupportedPattern says what is wrong with a pattern, in the words of those who write it.
func unsupportedPattern(e *syntax.Error) string {
	at := strings.TrimPrefix(e.Expr, "(?P")
	switch {
	case e.Code == syntax.ErrInvalidEscape && len(e.Expr) == 2 && e.Expr[1] >= '1' && e.Expr[1] <= '9':
		return fmt.Sprintf("backreferences (%s) are not supported", e.Expr)
	case strings.HasPrefix(at, "(?=") || strings.HasPrefix(at, "(?!") || strings.HasPrefix(at, "(?<=") || strings.HasPrefix(at, "(?<!"):
		return "lookahead and lookbehind ((?=, (?!, (?<=, (?<!) are not supported"
	}
	return fmt.Sprintf("%s: %s", e.Code, e.Expr)
}

// ecmaEscapes writes \uXXXX as Go does, and two of them that are a surrogate pair as their one character.
func ecmaEscapes(pattern string) string {
	var b strings.Builder
	for i := 0; i < len(pattern); i++ {
		if pattern[i] != '\\' || i+1 == len(pattern) {
			b.WriteByte(pattern[i])
			continue
		}
		i++
		if pattern[i] == 'u' && i+4 < len(pattern) && isHex(pattern[i+1:i+5]) {
			r := hexRune(pattern[i+1 : i+5])
			i += 4
			if next := pattern[i+1:]; utf16.IsSurrogate(r) && len(next) >= 6 && next[:2] == `\u` && isHex(next[2:6]) {
				if pair := utf16.DecodeRune(r, hexRune(next[2:6])); pair != utf8.RuneError {
					r = pair
					i += 6
				}
			}
			fmt.Fprintf(&b, `\x{%x}`, r)
			continue
		}
		b.WriteByte('\\')
		b.WriteByte(pattern[i])
	}
	return b.String()
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

// checkAnchors refuses what looks at what is around it, but for anchors at the ends of the whole.
func checkAnchors(re *syntax.Regexp, first, last bool) error {
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
		if !last {
			return errors.New(`an anchor ($) that is not at the end is not supported`)
		}
	case syntax.OpConcat:
		for i, sub := range re.Sub {
			if err := checkAnchors(sub, first && i == 0, last && i == len(re.Sub)-1); err != nil {
				return err
			}
		}
		return nil
	case syntax.OpStar, syntax.OpPlus, syntax.OpQuest, syntax.OpRepeat:
		first, last = false, false
	}
	for _, sub := range re.Sub {
		if err := checkAnchors(sub, first, last); err != nil {
			return err
		}
	}
	return nil
}

// Whole is the texts that the pattern matches from the first character to the last. runes makes an Expr of ranges of
// characters, as Runes does.
func (p *Pattern) Whole(runes func(...rune) Expr) Expr { return convert(p.re, runes) }

// Within is the texts in which the pattern matches somewhere, with any number of others around it where it has no anchor.
func (p *Pattern) Within(runes func(...rune) Expr, others Expr) Expr {
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
