package grammar

import (
	"slices"
	"unicode/utf8"
)

// Expr is a set of texts. Exprs are immutable, but for the bodies of rules.
type Expr interface{ expr() }

type (
	literal  string
	byteSet  [4]uint64
	sequence []Expr
	choice   []Expr
	repeat   struct {
		of       Expr
		min, max int // max < 0: any number
	}
	graph struct {
		states int
		ends   []int
		paths  []Path
	}
	separated struct {
		items     []Item
		separator Expr
	}
)

// Rule is an Expr with a name, which its own body may contain. Body is set before New.
type Rule struct {
	Name string
	Body Expr
	// Place is where its texts are described, such as "at #/items", for errors; "": where the rule is that contains it.
	Place string
}

// Item is an element of Separated.
type Item struct {
	Of Expr
	// Optional: it may be left out. Repeated: it may come again, with separators between.
	Optional, Repeated bool
}

func (literal) expr()    {}
func (*byteSet) expr()   {}
func (sequence) expr()   {}
func (choice) expr()     {}
func (*repeat) expr()    {}
func (*separated) expr() {}
func (*graph) expr()     {}
func (*Rule) expr()      {}

// Literal is one text.
func Literal(text string) Expr { return literal(text) }

// Seq is one text of each part after another.
func Seq(parts ...Expr) Expr { return sequence(parts) }

// Any is the texts of all parts; without parts there are none.
func Any(parts ...Expr) Expr { return choice(parts) }

// Repeat is from least to most texts of e, one after another; most < 0: any number.
func Repeat(e Expr, least, most int) Expr { return &repeat{e, least, most} }

// Optional is e or nothing.
func Optional(e Expr) Expr { return Repeat(e, 0, 1) }

// Separated is the items in their order, with a separator between those that are there.
func Separated(separator Expr, items ...Item) Expr { return &separated{items, separator} }

// Path is the texts of Of from one state of a graph to another one.
type Path struct {
	From, To int
	Of       Expr
}

// Graph is the texts of all ways through paths, from the state 0 to one of the ends. It has as many states as are given.
func Graph(states int, ends []int, paths []Path) Expr { return &graph{states, ends, paths} }

// Literals is a choice of texts.
func Literals(texts ...string) Expr {
	parts := make([]Expr, len(texts))
	for i, t := range texts {
		parts[i] = literal(t)
	}
	return choice(parts)
}

// Runes is one character of these ranges, which are pairs of a first and a last one. Surrogates are none.
func Runes(ranges ...rune) Expr {
	var parts choice
	ascii := &byteSet{}
	for i := 0; i < len(ranges); i += 2 {
		lo, hi := max(ranges[i], 0), min(ranges[i+1], utf8.MaxRune)
		for ; lo <= hi && lo < utf8.RuneSelf; lo++ {
			ascii.add(byte(lo))
		}
		for _, part := range [][2]rune{{0x80, 0x7ff}, {0x800, 0xd7ff}, {0xe000, 0xffff}, {0x10000, utf8.MaxRune}} {
			if from, to := max(lo, part[0]), min(hi, part[1]); from <= to {
				parts = appendEncoded(parts, string(from), string(to))
			}
		}
	}
	if *ascii != (byteSet{}) {
		parts = append(parts, ascii)
	}
	return parts
}

// appendEncoded appends the encodings from one to another of the same length.
func appendEncoded(parts choice, lo, hi string) choice {
	same := 0
	for same < len(lo) && lo[same] == hi[same] {
		same++
	}
	if same >= len(lo)-1 {
		if same == len(lo) {
			return append(parts, literal(lo))
		}
		return append(parts, sequence{literal(lo[:same]), byteRange(lo[same], hi[same])})
	}
	// The first byte that differs, and below it ranges that are not whole at either end.
	first, last := lo[same], hi[same]
	rest := len(lo) - same - 1
	low, high := string(slices.Repeat([]byte{0x80}, rest)), string(slices.Repeat([]byte{0xbf}, rest))
	prefix := lo[:same]
	if lo[same+1:] != low {
		parts = appendEncoded(parts, lo, prefix+string([]byte{first})+high)
		first++
	}
	end := last
	if hi[same+1:] != high {
		end--
	}
	if first <= end && end <= last {
		whole := sequence{literal(prefix), byteRange(first, end)}
		for range rest {
			whole = append(whole, byteRange(0x80, 0xbf))
		}
		parts = append(parts, whole)
	}
	if hi[same+1:] != high {
		parts = appendEncoded(parts, prefix+string([]byte{last})+low, hi)
	}
	return parts
}

func byteRange(lo, hi byte) *byteSet {
	s := &byteSet{}
	for b := int(lo); b <= int(hi); b++ {
		s.add(byte(b))
	}
	return s
}

func (s *byteSet) add(b byte)      { s[b/64] |= 1 << (b % 64) }
func (s *byteSet) has(b byte) bool { return s[b/64]>>(b%64)&1 != 0 }

// each calls f for the ranges of s.
func (s *byteSet) each(f func(lo, hi byte)) {
	for b := 0; b < 256; b++ {
		if !s.has(byte(b)) {
			continue
		}
		lo := b
		for b < 255 && s.has(byte(b+1)) {
			b++
		}
		f(byte(lo), byte(b))
	}
}

// Until is any text of valid UTF-8 that ends with end, and has it nowhere else. end is not empty.
func Until(end string) Expr { return search(end, true) }

// Without is any text of valid UTF-8 that does not have a part, which is not empty.
func Without(part string) Expr { return search(part, false) }

// search is the automaton of Knuth, Morris and Pratt, whose states are how much of a text has been read: all texts up to
// where it is complete or, without until, those where it never is.
func search(part string, until bool) Expr {
	states := make([]*Rule, len(part))
	for i := range states {
		states[i] = &Rule{Name: "text before " + part}
	}
	to := func(n int) Expr {
		switch {
		case n < len(part):
			return states[n]
		case until:
			return literal("")
		}
		return choice{}
	}
	follow := func(read int, next string) int { // how much is read behind part[:read] and next
		text := part[:read] + next
		for n := min(len(text), len(part)); n > 0; n-- {
			if text[len(text)-n:] == part[:n] {
				return n
			}
		}
		return 0
	}
	for i := range states {
		others := []rune{0, utf8.MaxRune}
		var body choice
		seen := map[rune]bool{}
		for _, r := range part {
			if !seen[r] {
				seen[r] = true
				body = append(body, sequence{literal(string(r)), to(follow(i, string(r)))})
				others = excluding(others, r)
			}
		}
		if body = append(body, sequence{Runes(others...), to(0)}); !until {
			body = append(body, literal(""))
		}
		states[i].Body = body
	}
	return states[0]
}

// excluding returns ranges without a character.
func excluding(ranges []rune, r rune) []rune {
	var out []rune
	for i := 0; i < len(ranges); i += 2 {
		lo, hi := ranges[i], ranges[i+1]
		if r < lo || r > hi {
			out = append(out, lo, hi)
			continue
		}
		if lo < r {
			out = append(out, lo, r-1)
		}
		if r < hi {
			out = append(out, r+1, hi)
		}
	}
	return out
}
