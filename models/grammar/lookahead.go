package grammar

import (
	"errors"
	"fmt"
	"regexp/syntax"
	"slices"
	"strings"
	"unicode/utf8"
)

// lookahead is what has to match, or must not, where it stands.
type lookahead struct {
	of  *Pattern
	not bool
}

const (
	maxLookaheads     = 32
	maxLookaheadDepth = 4
)

// takeLookaheads replaces the lookaheads of a pattern, which Go's syntax does not have, by empty groups with names.
func takeLookaheads(pattern string, depth int, loose bool) (text string, ahead map[string]lookahead, err error) {
	if !strings.Contains(pattern, "(?=") && !strings.Contains(pattern, "(?!") {
		return pattern, nil, nil
	}
	if depth > maxLookaheadDepth {
		return "", nil, fmt.Errorf("it has lookaheads ((?=, (?!) nested more than %d deep", maxLookaheadDepth)
	}
	var b strings.Builder
	ahead = map[string]lookahead{}
	flags := false
	for i := 0; i < len(pattern); {
		end := i + width(pattern[i:])
		switch rest := pattern[i:]; {
		case strings.HasPrefix(rest, "(?=") || strings.HasPrefix(rest, "(?!"):
			if end = closing(pattern, i); end < 0 {
				return "", nil, fmt.Errorf("a lookahead (%s) has no end", rest[:3])
			}
			if len(ahead) == maxLookaheads {
				return "", nil, fmt.Errorf("it has more than %d lookaheads ((?=, (?!)", maxLookaheads)
			}
			of, err := parsePattern(pattern[i+3:end-1], depth+1, loose != (rest[2] == '!'))
			if err != nil {
				return "", nil, err
			}
			name := fmt.Sprintf("lookahead%d", len(ahead))
			ahead[name] = lookahead{of, rest[2] == '!'}
			b.WriteString("(?P<" + name + ">)")
			i = end
			continue
		case strings.HasPrefix(rest, "(?") && len(rest) > 2 && strings.IndexByte("imsU-", rest[2]) >= 0:
			flags = true
		}
		b.WriteString(pattern[i:end])
		i = end
	}
	if flags && len(ahead) > 0 {
		return "", nil, errors.New("flags such as (?i) beside lookahead ((?=, (?!) are not supported")
	}
	return b.String(), ahead, nil
}

// width is that of an escape, a quotation, a class of characters, or one byte.
func width(pattern string) int {
	switch {
	case strings.HasPrefix(pattern, `\Q`):
		if n := strings.Index(pattern, `\E`); n >= 0 {
			return n + 2
		}
		return len(pattern)
	case pattern[0] == '\\':
		return min(2, len(pattern))
	case pattern[0] != '[':
		return 1
	}
	i := 1
	if strings.HasPrefix(pattern[i:], "^") {
		i++
	}
	for first := true; i < len(pattern); first = false {
		switch {
		case pattern[i] == ']' && !first:
			return i + 1
		case pattern[i] == '\\':
			i++
		case strings.HasPrefix(pattern[i:], "[:"):
			if n := strings.Index(pattern[i:], ":]"); n >= 0 {
				i += n + 1
			}
		}
		i++
	}
	return len(pattern)
}

// closing is behind the end of the group that begins at i; negative: it has none.
func closing(pattern string, i int) int {
	for open := 0; i < len(pattern); {
		next := i + width(pattern[i:])
		switch pattern[i] {
		case '(':
			open++
		case ')':
			if open--; open == 0 {
				return next
			}
		}
		i = next
	}
	return -1
}

// peeks says whether a part looks at what follows it.
func (p *Pattern) peeks(re *syntax.Regexp) bool {
	return re.Op == syntax.OpEndText || !p.reads(re) || slices.ContainsFunc(re.Sub, p.peeks)
}

// reads says whether a part is other than a lookahead.
func (p *Pattern) reads(re *syntax.Regexp) bool {
	_, ok := p.ahead[re.Name]
	return !ok || re.Op != syntax.OpCapture
}

// advances says whether a part is other than a lookahead and an anchor.
func (p *Pattern) advances(re *syntax.Regexp) bool {
	return p.reads(re) && re.Op != syntax.OpBeginText && re.Op != syntax.OpEndText
}

// anchored says whether there is an anchor (^) in a part.
func anchored(re *syntax.Regexp) bool {
	return re.Op == syntax.OpBeginText || slices.ContainsFunc(re.Sub, anchored)
}

// begins is 1 where all texts of a part begin with an anchor, 0 where none does, and -1 of others.
func (p *Pattern) begins(re *syntax.Regexp) int {
	switch re.Op {
	case syntax.OpBeginText:
		return 1
	case syntax.OpCapture:
		return p.begins(re.Sub[0])
	case syntax.OpConcat:
		for _, sub := range re.Sub {
			if p.reads(sub) {
				return p.begins(sub)
			}
		}
	case syntax.OpAlternate:
		all := p.begins(re.Sub[0])
		for _, sub := range re.Sub[1:] {
			if p.begins(sub) != all {
				return -1
			}
		}
		return all
	}
	return 0
}

// mixed says whether a part that somewhere does not divide has an anchor in some of its texts.
func (p *Pattern) mixed(re *syntax.Regexp) bool {
	if re.Op == syntax.OpCapture || re.Op == syntax.OpAlternate {
		return slices.ContainsFunc(re.Sub, p.mixed)
	}
	return p.begins(re) < 0
}

// somewhere is the texts in which a part of a pattern with lookaheads matches.
func (p *Pattern) somewhere(re *syntax.Regexp, runes func(...rune) Expr) Expr {
	switch {
	case re.Op == syntax.OpCapture && p.reads(re):
		return p.somewhere(re.Sub[0], runes)
	case re.Op == syntax.OpAlternate:
		parts := make([]Expr, len(re.Sub))
		for i, sub := range re.Sub {
			parts[i] = p.somewhere(sub, runes)
		}
		return Any(parts...)
	}
	rest := Repeat(runes(0, utf8.MaxRune), 0, -1)
	e := p.before(re, runes, rest)
	if p.begins(re) == 0 {
		e = Seq(rest, e)
	}
	return e
}

// before is the texts of a part of the pattern with what follows it, at which the part looks.
func (p *Pattern) before(re *syntax.Regexp, runes func(...rune) Expr, follows Expr) Expr {
	if !p.peeks(re) {
		return Seq(convert(re, runes), follows)
	}
	switch re.Op {
	case syntax.OpEndText:
		return All(follows, Seq())
	case syntax.OpCapture:
		l, ok := p.ahead[re.Name]
		switch {
		case !ok:
			return p.before(re.Sub[0], runes, follows)
		case l.not:
			return Except(follows, l.texts(runes))
		}
		return All(follows, l.texts(runes))
	case syntax.OpConcat:
		for _, sub := range slices.Backward(re.Sub) {
			follows = p.before(sub, runes, follows)
		}
		return follows
	}
	// Alternatives, or one and nothing. Those that do not look share what follows.
	var parts, rest []Expr
	for _, sub := range re.Sub {
		for (sub.Op == syntax.OpCapture || sub.Op == syntax.OpAlternate) && len(sub.Sub) == 1 && p.reads(sub) {
			sub = sub.Sub[0]
		}
		each := []*syntax.Regexp{sub}
		if sub.Op == syntax.OpAlternate {
			each = sub.Sub
		}
		for _, sub := range each {
			if p.peeks(sub) {
				parts = append(parts, p.before(sub, runes, follows))
			} else {
				rest = append(rest, convert(sub, runes))
			}
		}
	}
	if re.Op == syntax.OpQuest {
		rest = append(rest, Seq())
	}
	if len(rest) > 0 {
		parts = append(parts, Seq(Any(rest...), follows))
	}
	return Any(parts...)
}

// texts are those that a lookahead matches at their beginning.
func (l lookahead) texts(runes func(...rune) Expr) Expr {
	return l.of.before(l.of.re, runes, Repeat(runes(0, utf8.MaxRune), 0, -1))
}
