package pattern

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// ErrUnsupported is wrapped by Compile's errors.
var ErrUnsupported = errors.New("regular expression not supported")

type operator uint8

const (
	opEmpty operator = iota
	opSet
	opCat
	opAlt
	opRepeat
	opLook // kids[0] at the position, or ending there
	opAtomic
	opLineStart
	opLineEnd
	opTextStart
	opTextEnd
	opTextEndLine // or before a line break that ends the text
	opWordBound
)

// node is an expression.
type node struct {
	op       operator
	set      Ranges // opSet
	kids     []*node
	min, max int  // opRepeat; max unlimited: no limit
	lazy     bool // opRepeat
	negative bool // opLook, opWordBound
	behind   bool // opLook
}

const (
	unlimited = math.MaxInt
	maxNested = 50
	maxRepeat = 1000
	maxSource = 1 << 16
	// maxMinimum is where counts of characters stop; a program of so many is refused.
	maxMinimum = 1 << 20
)

type parser struct {
	source string
	at     int
	fold   bool // (?i)
	depth  int
}

func refuse(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrUnsupported, fmt.Sprintf(format, args...))
}

func parse(source string) (*node, error) {
	if len(source) > maxSource {
		return nil, refuse("it has %d bytes, over %d", len(source), maxSource)
	}
	if !utf8.ValidString(source) {
		return nil, refuse("it is not valid UTF-8")
	}
	p := &parser{source: source}
	n, err := p.alternatives()
	if err == nil && p.at < len(source) {
		err = refuse("a parenthesis is closed that was not opened")
	}
	return n, err
}

func (p *parser) more() bool { return p.at < len(p.source) }

func (p *parser) peek() byte { return p.source[p.at] }

func (p *parser) take(prefix string) bool {
	if strings.HasPrefix(p.source[p.at:], prefix) {
		p.at += len(prefix)
		return true
	}
	return false
}

func (p *parser) rune() rune {
	r, n := utf8.DecodeRuneInString(p.source[p.at:])
	p.at += n
	return r
}

func (p *parser) alternatives() (*node, error) {
	if p.depth++; p.depth > maxNested {
		return nil, refuse("groups are nested over %d deep", maxNested)
	}
	fold := p.fold
	defer func() { p.depth--; p.fold = fold }()
	if p.take("(?i)") {
		p.fold = true
	}
	out := &node{op: opAlt}
	for {
		n, err := p.sequence()
		if err != nil {
			return nil, err
		}
		out.kids = append(out.kids, n)
		if !p.take("|") {
			break
		}
	}
	if len(out.kids) == 1 {
		return out.kids[0], nil
	}
	return out, nil
}

func (p *parser) sequence() (*node, error) {
	out := &node{op: opCat}
	var letter rune // the literal letter before, with (?i)
	for p.more() && p.peek() != '|' && p.peek() != ')' {
		from := p.at
		n, err := p.atom()
		if err != nil {
			return nil, err
		}
		// Some pairs of letters are also one character in another case, which no set of single ones has.
		was := letter
		letter = 0
		if c := p.source[from] | 0x20; p.fold && p.at == from+1 && c >= 'a' && c <= 'z' {
			letter = rune(c)
			if pair := string([]rune{was, letter}); pair == "ss" || pair == "ff" || pair == "fi" || pair == "fl" || pair == "st" {
				return nil, refuse("%q in any case", pair)
			}
		}
		if n, err = p.quantified(n); err != nil {
			return nil, err
		}
		out.kids = append(out.kids, n)
	}
	switch len(out.kids) {
	case 0:
		return &node{op: opEmpty}, nil
	case 1:
		return out.kids[0], nil
	}
	return out, nil
}

// quantified reads what may follow an atom: how often it is repeated.
func (p *parser) quantified(n *node) (*node, error) {
	low, high, counted, ok := p.quantifier()
	if !ok {
		return n, nil
	}
	switch n.op {
	case opSet, opCat, opAlt, opRepeat, opAtomic:
	default:
		return nil, refuse("a quantifier of what has no length")
	}
	if high != unlimited && high > maxRepeat || low > maxRepeat {
		return nil, refuse("more than %d repetitions", maxRepeat)
	}
	if low > high {
		return nil, refuse("repetitions from %d to %d", low, high)
	}
	if n.op != opSet && n.minimum() == 0 && high == unlimited {
		return nil, refuse("a repeated group that may be empty")
	}
	out := &node{op: opRepeat, kids: []*node{n}, min: low, max: high}
	switch {
	case p.more() && p.peek() == '?':
		if counted && low == high {
			return nil, refuse("{n}?")
		}
		p.at++
		out.lazy = true
	case p.more() && p.peek() == '+':
		p.at++
		if counted { // Ruby's syntax repeats here, where others' is possessive
			if low == 0 {
				return nil, refuse("a repeated group that may be empty")
			}
			out = &node{op: opRepeat, kids: []*node{{op: opCat, kids: []*node{out}}}, min: 1, max: unlimited}
			break
		}
		out = &node{op: opAtomic, kids: []*node{out}}
	}
	if p.more() && (strings.IndexByte("*+?", p.peek()) >= 0) {
		return nil, refuse("a quantifier of a quantifier")
	}
	at := p.at
	if _, _, _, again := p.quantifier(); again {
		return nil, refuse("a quantifier of a quantifier")
	}
	p.at = at
	return out, nil
}

func (p *parser) quantifier() (low, high int, counted, ok bool) {
	switch {
	case !p.more():
	case p.take("*"):
		return 0, unlimited, false, true
	case p.take("+"):
		return 1, unlimited, false, true
	case p.take("?"):
		return 0, 1, false, true
	case p.peek() == '{':
		body, _, closed := strings.Cut(p.source[p.at+1:], "}")
		from, to, comma := strings.Cut(body, ",")
		if !closed || from == "" && (to == "" || !comma) {
			break // a brace as it is
		}
		low, err1 := strconv.ParseUint(from, 10, 31)
		high, err2 := strconv.ParseUint(to, 10, 31)
		if from != "" && err1 != nil || to != "" && err2 != nil {
			break
		}
		p.at += len(body) + 2
		switch {
		case !comma:
			return int(low), int(low), true, true
		case to == "":
			return int(low), unlimited, true, true
		}
		return int(low), int(high), true, true
	}
	return 0, 0, false, false
}

func (p *parser) atom() (*node, error) {
	switch c := p.peek(); c {
	case '(':
		return p.group()
	case '[':
		set, err := p.class()
		return &node{op: opSet, set: set}, err
	case '.':
		p.at++
		return &node{op: opSet, set: negated(Ranges{{'\n', '\n'}})}, nil
	case '^':
		p.at++
		return &node{op: opLineStart}, nil
	case '$':
		p.at++
		return &node{op: opLineEnd}, nil
	case '*', '+', '?':
		return nil, refuse("a quantifier of nothing")
	case '\\':
		for text, op := range map[string]node{
			`\A`: {op: opTextStart}, `\z`: {op: opTextEnd}, `\Z`: {op: opTextEndLine},
			`\b`: {op: opWordBound}, `\B`: {op: opWordBound, negative: true},
		} {
			if p.take(text) {
				return &op, nil
			}
		}
		set, _, err := p.escape()
		if err != nil {
			return nil, err
		}
		return p.single(set)
	}
	r := p.rune()
	return p.single(Ranges{{r, r}})
}

// single is one character of a set, in any case where that is asked for.
func (p *parser) single(set Ranges) (*node, error) {
	if p.fold {
		folded, ok := set.folded()
		if !ok {
			return nil, refuse("a large class in any case")
		}
		set = folded
	}
	return &node{op: opSet, set: set}, nil
}

func (p *parser) group() (*node, error) {
	fold := p.fold
	defer func() { p.fold = fold }()
	out := &node{op: opAtomic}
	switch {
	case p.take("(?:"):
		out = nil
	case p.take("(?i:"):
		out, p.fold = nil, true
	case p.take("(?-i:"):
		out, p.fold = nil, false
	case p.take("(?>"):
	case p.take("(?="):
		out = &node{op: opLook}
	case p.take("(?!"):
		out = &node{op: opLook, negative: true}
	case p.take("(?<="):
		out = &node{op: opLook, behind: true}
	case p.take("(?<!"):
		out = &node{op: opLook, behind: true, negative: true}
	case strings.HasPrefix(p.source[p.at:], "(?"):
		return nil, refuse("the group %s", strconv.QuoteToGraphic(clip(p.source[p.at:])))
	default:
		p.at++ // captures are not used
		out = nil
	}
	n, err := p.alternatives()
	if err != nil {
		return nil, err
	}
	if !p.take(")") {
		return nil, refuse("a parenthesis is not closed")
	}
	if out == nil {
		if n.op == opRepeat { // so that a quantifier has a group to repeat
			return &node{op: opCat, kids: []*node{n}}, nil
		}
		return n, nil
	}
	if out.behind {
		if _, ok := n.fixed(); !ok {
			return nil, refuse("a look behind of no fixed length")
		}
	}
	out.kids = []*node{n}
	return out, nil
}

func clip(s string) string {
	if len(s) > 10 {
		return s[:10]
	}
	return s
}

// escape reads a backslash and what follows. char is the character that it is; -1 for a class.
func (p *parser) escape() (set Ranges, char rune, err error) {
	p.at++
	if !p.more() {
		return nil, 0, refuse("it ends with a backslash")
	}
	c := p.rune()
	one := func(r rune) (Ranges, rune, error) { return Ranges{{r, r}}, r, nil }
	named := func(name string, negative bool) (Ranges, rune, error) {
		r, ok := Named(name)
		if !ok {
			return nil, 0, refuse("the class %s", strconv.QuoteToGraphic(clip(name)))
		}
		if negative {
			r = negated(r)
		}
		return r, -1, nil
	}
	switch c {
	case 'p', 'P':
		if !p.take("{") {
			return nil, 0, refuse(`\%c without braces`, c)
		}
		name, _, ok := strings.Cut(p.source[p.at:], "}")
		if !ok {
			return nil, 0, refuse(`\%c{ is not closed`, c)
		}
		p.at += len(name) + 1
		bare, caret := strings.CutPrefix(name, "^")
		if slices.Contains([]string{"digit", "space", "word", "bound"}, strings.ToLower(bare)) { // not the reference's names
			return nil, 0, refuse("the class %s", bare)
		}
		return named(bare, (c == 'P') != caret)
	case 's', 'S':
		return named("space", c == 'S')
	case 'd', 'D':
		return named("nd", c == 'D')
	case 'w', 'W':
		return named("word", c == 'W')
	case 'n':
		return one('\n')
	case 'r':
		return one('\r')
	case 't':
		return one('\t')
	case 'f':
		return one('\f')
	case 'v':
		return one('\v')
	case 'a':
		return one('\a')
	case 'e':
		return one(0x1B)
	case 'x', 'u':
		var digits string
		switch {
		case c == 'x' && p.take("{"):
			var ok bool
			if digits, _, ok = strings.Cut(p.source[p.at:], "}"); !ok {
				return nil, 0, refuse(`\x{ is not closed`)
			}
			p.at += len(digits) + 1
		default:
			n := map[rune]int{'x': 2, 'u': 4}[c]
			if p.at+n > len(p.source) {
				return nil, 0, refuse(`\%c with too few digits`, c)
			}
			digits = p.source[p.at : p.at+n]
			p.at += n
		}
		v, err := strconv.ParseUint(digits, 16, 32)
		if err != nil || v > 0x10FFFF || c == 'x' && len(digits) <= 2 && v > 0x7F {
			return nil, 0, refuse(`\%c%s`, c, strconv.QuoteToGraphic(clip(digits)))
		}
		return one(rune(v))
	}
	if c < utf8.RuneSelf && (c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'z') {
		return nil, 0, refuse(`\%c`, c)
	}
	return one(c)
}

// class reads a class in brackets.
func (p *parser) class() (Ranges, error) {
	if p.depth++; p.depth > maxNested {
		return nil, refuse("classes are nested over %d deep", maxNested)
	}
	defer func() { p.depth-- }()
	p.at++
	negative := p.take("^")
	if p.more() && p.peek() == ']' {
		return nil, refuse("an empty class")
	}
	var set, left Ranges
	and := false // left && ...
	join := func() {
		set = normalized(set)
		if and {
			set = intersection(left, set)
		}
		left, set, and = set, nil, true
	}
	for {
		if !p.more() {
			return nil, refuse("a bracket is not closed")
		}
		if p.take("]") {
			break
		}
		if p.take("&&") {
			join()
			continue
		}
		if p.peek() == '[' {
			if strings.HasPrefix(p.source[p.at:], "[:") {
				return nil, refuse("a POSIX class")
			}
			inner, err := p.class()
			if err != nil {
				return nil, err
			}
			set = append(set, inner...)
			continue
		}
		first, char, err := p.member()
		if err != nil {
			return nil, err
		}
		if char >= 0 && p.at+1 < len(p.source) && p.peek() == '-' && p.source[p.at+1] != ']' {
			p.at++
			if p.peek() == '[' || strings.HasPrefix(p.source[p.at:], "&&") {
				return nil, refuse("a range that ends in a class")
			}
			_, last, err := p.member()
			if err != nil {
				return nil, err
			}
			if last < char {
				return nil, refuse("a range that ends before it begins, or in a class")
			}
			first = Ranges{{char, last}}
		} else if char < 0 && p.at+1 < len(p.source) && p.peek() == '-' && p.source[p.at+1] != ']' {
			return nil, refuse("a range that begins in a class")
		}
		set = append(set, first...)
	}
	set = normalized(set)
	if and {
		set = intersection(left, set)
	}
	if p.fold {
		folded, ok := set.folded()
		if !ok {
			return nil, refuse("a large class in any case")
		}
		set = folded
	}
	if negative {
		set = negated(set)
	}
	return set, nil
}

func (p *parser) member() (Ranges, rune, error) {
	if p.peek() == '\\' {
		if p.take(`\b`) {
			return Ranges{{'\b', '\b'}}, '\b', nil
		}
		return p.escape()
	}
	r := p.rune()
	return Ranges{{r, r}}, r, nil
}

// minimum is the least number of characters that n matches.
func (n *node) minimum() int {
	switch n.op {
	case opSet:
		return 1
	case opCat, opAtomic:
		sum := 0
		for _, k := range n.kids {
			sum = min(sum+k.minimum(), maxMinimum)
		}
		return sum
	case opAlt:
		least := math.MaxInt
		for _, k := range n.kids {
			least = min(least, k.minimum())
		}
		return least
	case opRepeat:
		return min(n.min*n.kids[0].minimum(), maxMinimum)
	}
	return 0
}

// fixed is the number of characters that n matches; false if that depends.
func (n *node) fixed() (int, bool) {
	switch n.op {
	case opSet:
		return 1, true
	case opCat, opAtomic:
		sum := 0
		for _, k := range n.kids {
			m, ok := k.fixed()
			if !ok {
				return 0, false
			}
			sum = min(sum+m, maxMinimum)
		}
		return sum, true
	case opAlt:
		first, ok := n.kids[0].fixed()
		for _, k := range n.kids[1:] {
			if m, fixed := k.fixed(); !fixed || m != first {
				ok = false
			}
		}
		return first, ok
	case opRepeat:
		m, ok := n.kids[0].fixed()
		return min(n.min*m, maxMinimum), ok && n.min == n.max
	}
	return 0, true
}

// first returns the characters that a match can begin with, and whether it can be empty.
func (n *node) first() (Ranges, bool) {
	switch n.op {
	case opSet:
		return n.set, false
	case opCat, opAtomic:
		var out Ranges
		for _, k := range n.kids {
			r, empty := k.first()
			if out = union(out, r); !empty {
				return out, false
			}
		}
		return out, true
	case opAlt:
		var out Ranges
		empty := false
		for _, k := range n.kids {
			r, e := k.first()
			out, empty = union(out, r), empty || e
		}
		return out, empty
	case opRepeat:
		r, empty := n.kids[0].first()
		return r, empty || n.min == 0
	}
	return nil, true
}
