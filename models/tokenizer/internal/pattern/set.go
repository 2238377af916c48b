package pattern

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// Ranges is a set of code points: first and last of each run, ascending and not adjacent.
type Ranges [][2]rune

// all is every code point.
var all = Ranges{{0, unicode.MaxRune}}

func normalized(r Ranges) Ranges {
	slices.SortFunc(r, func(a, b [2]rune) int { return cmp.Compare(a[0], b[0]) })
	out := r[:0]
	for _, x := range r {
		if n := len(out); n > 0 && x[0] <= out[n-1][1]+1 {
			out[n-1][1] = max(out[n-1][1], x[1])
			continue
		}
		out = append(out, x)
	}
	return out
}

func union(sets ...Ranges) Ranges { return normalized(slices.Concat(sets...)) }

func negated(r Ranges) Ranges {
	var out Ranges
	next := rune(0)
	for _, x := range r {
		if x[0] > next {
			out = append(out, [2]rune{next, x[0] - 1})
		}
		next = x[1] + 1
	}
	if next <= unicode.MaxRune {
		out = append(out, [2]rune{next, unicode.MaxRune})
	}
	return out
}

func intersection(a, b Ranges) Ranges { return negated(union(negated(a), negated(b))) }

func (r Ranges) size() int {
	n := 0
	for _, x := range r {
		n += int(x[1]-x[0]) + 1
	}
	return n
}

// folded adds what differs from members only in case; false if the set is too large for that.
func (r Ranges) folded() (Ranges, bool) {
	if r.size() > 1024 {
		return nil, false
	}
	out := slices.Clone(r)
	for _, x := range r {
		for c := x[0]; c <= x[1]; c++ {
			for f := unicode.SimpleFold(c); f != c; f = unicode.SimpleFold(f) {
				out = append(out, [2]rune{f, f})
			}
		}
	}
	return normalized(out), true
}

// Named returns a class by the name of a general category, or of the groups of categories that are one letter, or one of
// "Han", "digit" (of the pre-tokenizer Digits), "space" and "word" (\s and \w), and "bound" (the \w of added tokens).
func Named(name string) (Ranges, bool) {
	r, ok := classes()[strings.ToLower(strings.NewReplacer("_", "", " ", "", "-", "").Replace(name))]
	return r, ok
}

var classes = sync.OnceValue(func() map[string]Ranges {
	m := map[string]Ranges{}
	var assigned Ranges
	for _, x := range categoryRanges {
		run := [2]rune{x[0], x[1]}
		name := strings.ToLower(categoryNames[x[2]])
		m[name] = append(m[name], run)
		m[name[:1]] = append(m[name[:1]], run)
		assigned = append(assigned, run)
	}
	for name := range m {
		m[name] = normalized(m[name])
	}
	surrogates := Ranges{{0xD800, 0xDFFF}}
	m["cs"] = surrogates
	m["cn"] = negated(union(assigned, surrogates))
	m["c"] = union(m["c"], m["cn"], surrogates)
	m["any"] = all
	m["han"], m["space"], m["word"], m["digit"], m["bound"] = hanRanges, spaceRanges, wordRanges, digitRanges, boundRanges
	for long, short := range map[string]string{
		"letter": "l", "uppercaseletter": "lu", "lowercaseletter": "ll", "titlecaseletter": "lt", "modifierletter": "lm",
		"otherletter": "lo", "mark": "m", "nonspacingmark": "mn", "spacingmark": "mc", "enclosingmark": "me", "number": "n",
		"decimalnumber": "nd", "letternumber": "nl", "othernumber": "no", "punctuation": "p", "symbol": "s", "mathsymbol": "sm",
		"currencysymbol": "sc", "modifiersymbol": "sk", "othersymbol": "so", "separator": "z", "control": "cc", "format": "cf",
	} {
		m[long] = m[short]
	}
	return m
})

// Lower returns the lower case of a character as the reference has it: one character, or two for U+0130.
func Lower(r rune) (first, second rune) {
	if r == 0x130 {
		return 'i', 0x307
	}
	i, ok := slices.BinarySearchFunc(lowerRanges, r, func(x [4]int32, r rune) int {
		switch {
		case x[1] < r:
			return -1
		case x[0] > r:
			return 1
		}
		return 0
	})
	if ok && (r-lowerRanges[i][0])%lowerRanges[i][3] == 0 {
		r += lowerRanges[i][2]
	}
	return r, -1
}

// Set is a class that answers fast.
type Set struct {
	ascii [2]uint64
	pages [(unicode.MaxRune + 1) >> 8]*page
}

type page [4]uint64

var fullPage, emptyPage = &page{^uint64(0), ^uint64(0), ^uint64(0), ^uint64(0)}, &page{}

// NewSet makes a set of ranges.
func NewSet(r Ranges) *Set {
	s := new(Set)
	i := 0
	for p := range s.pages {
		first, last := rune(p)<<8, rune(p)<<8|0xFF
		for i < len(r) && r[i][1] < first {
			i++
		}
		switch {
		case i == len(r) || r[i][0] > last:
			s.pages[p] = emptyPage
			continue
		case r[i][0] <= first && r[i][1] >= last:
			s.pages[p] = fullPage
			continue
		}
		var pg page
		for k := i; k < len(r) && r[k][0] <= last; k++ {
			for c := max(r[k][0], first); c <= min(r[k][1], last); c++ {
				pg[c&0xFF>>6] |= 1 << (c & 63)
			}
		}
		s.pages[p] = &pg
	}
	s.ascii = [2]uint64{s.pages[0][0], s.pages[0][1]}
	return s
}

// Has reports whether a code point is in the set.
func (s *Set) Has(r rune) bool {
	if r < utf8.RuneSelf {
		return s.ascii[r>>6]>>(r&63)&1 != 0
	}
	return s.pages[r>>8][r&0xFF>>6]>>(r&63)&1 != 0
}
