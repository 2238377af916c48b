package tokenizer

import (
	"sync"
	"unicode/utf8"

	"github.com/moeserve/moeserve/models/tokenizer/internal/pattern"
)

// class is a character class of the split patterns.
type class uint8

const (
	other  class = iota
	letter       // \p{L}
	number       // \p{N}
	space        // \s
)

// A code point finds its class in two steps: blocks of 256 code points that look alike share a page. The tables are
// empty until loadClasses has run, which Parse sees to.
var (
	classPage  [0x110000 >> 8]uint8
	classPages [][256]class
)

// loadClasses fills the tables from the generated ranges, once: it takes milliseconds, which a program that loads no
// tokenizer need not spend.
var loadClasses = sync.OnceFunc(func() {
	var sets [space + 1]pattern.Ranges
	for c, name := range map[class]string{letter: "L", number: "N", space: "space"} {
		sets[c], _ = pattern.Named(name)
	}
	seen := map[[256]class]uint8{}
	for block := range classPage {
		var page [256]class
		first, last := rune(block<<8), rune(block<<8|0xFF)
		for c, set := range sets {
			for len(set) > 0 && set[0][1] < first {
				set = set[1:]
			}
			sets[c] = set
			for _, x := range set {
				if x[0] > last {
					break
				}
				for r := max(x[0], first); r <= min(x[1], last); r++ {
					page[r&0xFF] = class(c)
				}
			}
		}
		p, ok := seen[page]
		if !ok {
			p = uint8(len(classPages))
			seen[page] = p
			classPages = append(classPages, page)
		}
		classPage[block] = p
	}
})

// classAt returns the class and length in bytes of the character of s at i.
func classAt(s string, i int) (class, int) {
	if c := s[i]; c < utf8.RuneSelf {
		return classPages[0][c], 1
	}
	r, n := utf8.DecodeRuneInString(s[i:])
	return classPages[classPage[r>>8]][r&0xFF], n
}

// isWord reports whether r is a word character (\w) as single_word added tokens are bounded by.
func isWord(r rune) bool { return boundClass().Has(r) }

var boundClass = sync.OnceValue(func() *pattern.Set {
	r, _ := pattern.Named("bound")
	return pattern.NewSet(r)
})
