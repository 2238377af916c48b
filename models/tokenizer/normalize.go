package tokenizer

import (
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
	"golang.org/x/text/unicode/rangetable"

	"github.com/moeserve/moeserve/models/tokenizer/internal/pattern"
)

// normalizer is a list of steps, applied in order to text that is valid UTF-8.
type normalizer []normalizeStep

type normalizeStep interface {
	apply(text string) (string, error)
	// growth is how many times as long a text can become.
	growth() float64
}

// Limits of normalizers: no file in use comes near, and without them a few lines make a text of a kilobyte fill any memory.
const (
	maxSteps  = 64
	maxGrowth = 64   // of all steps together
	maxPrefix = 1024 // bytes of all Prepends together
)

func (n normalizer) apply(text string) (string, error) {
	var err error
	for _, step := range n {
		if text, err = step.apply(text); err != nil {
			return "", err
		}
	}
	return text, nil
}

// part normalizes a part of a text; first: the one at its start.
func (n normalizer) part(text string, first bool) (string, error) {
	var err error
	for _, step := range n {
		if _, ok := step.(prepend); ok && !first {
			continue
		}
		if text, err = step.apply(text); err != nil {
			return "", err
		}
	}
	return text, nil
}

func buildNormalizer(t *Pipeline, c *fileConfig, _ *sideConfig) error {
	steps := flatten(c.Normalizer, "normalizers")
	if len(steps) > maxSteps {
		return unsupported("normalizer with %d steps: up to %d are", len(steps), maxSteps)
	}
	growth, prefix := 1.0, 0
	for i, n := range steps {
		step, err := newNormalizeStep(n)
		if err != nil {
			return err
		}
		if growth *= step.growth(); growth > maxGrowth {
			return unsupported("normalizer, step %d, %s: a text could become over %d times as long", i, n.name(), maxGrowth)
		}
		if p, ok := step.(prepend); ok {
			if prefix += len(p); prefix > maxPrefix {
				return unsupported("normalizer, step %d, %s: over %d bytes are put before a text", i, n.name(), maxPrefix)
			}
		}
		t.normalizer = append(t.normalizer, step)
	}
	return nil
}

func newNormalizeStep(n component) (normalizeStep, error) {
	switch n.kind() {
	case "Prepend":
		return prepend(n.str("prepend")), nil
	case "Replace":
		s, err := searchOf("normalizer", n)
		return replace{s, n.str("content")}, err
	case "NFC":
		return unicodeForm{norm.NFC}, nil
	case "NFD":
		return unicodeForm{norm.NFD}, nil
	case "NFKC":
		return unicodeForm{norm.NFKC}, nil
	case "NFKD":
		return unicodeForm{norm.NFKD}, nil
	case "Lowercase":
		return lowercase{}, nil
	case "Strip":
		left, err := n.need("normalizer", "strip_left")
		if err != nil {
			return nil, err
		}
		right, err := n.need("normalizer", "strip_right")
		return strip{left, right}, err
	}
	return nil, unsupported("normalizer %s: Sequence, Prepend, Replace, NFC, NFD, NFKC, NFKD, Lowercase and Strip are", n.name())
}

// prepend puts a string before a text that is not empty.
type prepend string

func (p prepend) apply(text string) (string, error) {
	if text == "" {
		return text, nil
	}
	return string(p) + text, nil
}

func (p prepend) growth() float64 { return 1 }

// replace writes a string for each match.
type replace struct {
	old searcher
	new string
}

func (r replace) apply(text string) (string, error) {
	if old, ok := r.old.(literal); ok {
		return strings.ReplaceAll(text, string(old), r.new), nil
	}
	if text == "" {
		return text, nil
	}
	var b strings.Builder
	at := 0
	err := r.old.search(text, func(start, end int) {
		b.WriteString(text[at:start])
		b.WriteString(r.new)
		at = end
	})
	if at == 0 && b.Len() == 0 {
		return text, err
	}
	b.WriteString(text[at:])
	return b.String(), err
}

func (r replace) growth() float64 { return r.old.growth(len(r.new)) }

// lowercase takes each character on its own, as the reference does.
type lowercase struct{}

func (lowercase) apply(text string) (string, error) {
	var b strings.Builder
	b.Grow(len(text))
	for _, r := range text {
		first, second := pattern.Lower(r)
		b.WriteRune(first)
		if second >= 0 {
			b.WriteRune(second)
		}
	}
	return b.String(), nil
}

func (lowercase) growth() float64 { return 1.5 }

// strip removes white space at the ends.
type strip struct{ left, right bool }

func (s strip) apply(text string) (string, error) {
	if s.left {
		text = strings.TrimLeftFunc(text, unicode.IsSpace)
	}
	if s.right {
		text = strings.TrimRightFunc(text, unicode.IsSpace)
	}
	return text, nil
}

func (strip) growth() float64 { return 1 }

// unicodeForm is one of Unicode's normalization forms as the reference has it.
//
// The reference's tables are those of Unicode 9.0. They treat a newer character as a base character that neither
// decomposes nor composes. Package norm limits runs of combining characters to 30 (the Stream-Safe format), by inserting
// U+034F; the reference does not. So the forms are made here by their definition (Unicode, section 3.11), from the
// tables of package norm, which alone finds that a text is normalized already.
type unicodeForm struct{ form norm.Form }

// assignedToReference is the set of characters that the reference's normalization knows.
var assignedToReference = sync.OnceValue(func() *unicode.RangeTable { return rangetable.Assigned("9.0.0") })

// char is a character of a text that is being normalized.
type char struct {
	r     rune
	class uint8 // canonical combining class
	back  bool  // may compose with a character before it
}

func (u unicodeForm) growth() float64 {
	// Unicode Standard Annex 15, section 13.
	if u.form == norm.NFKC || u.form == norm.NFKD {
		return 11
	}
	return 3
}

func (u unicodeForm) apply(text string) (string, error) {
	if u.form.QuickSpanString(text) == len(text) {
		return text, nil
	}
	chars := u.decompose(text)
	order(chars)
	if u.form == norm.NFC || u.form == norm.NFKC {
		chars = composed(chars)
	}
	out := make([]byte, 0, len(text)+len(text)/8)
	for _, c := range chars {
		out = utf8.AppendRune(out, c.r)
	}
	return string(out), nil
}

// decompose replaces characters by their full decompositions.
func (u unicodeForm) decompose(text string) []char {
	known := assignedToReference()
	full := norm.NFD
	if u.form == norm.NFKC || u.form == norm.NFKD {
		full = norm.NFKD
	}
	chars := make([]char, 0, len(text))
	add := func(r rune) {
		if r < 0x300 { // none of these combines
			chars = append(chars, char{r: r})
			return
		}
		var b [utf8.UTFMax]byte
		p := norm.NFC.Properties(b[:utf8.EncodeRune(b[:], r)])
		chars = append(chars, char{r, p.CCC(), !p.BoundaryBefore()})
	}
	for i, r := range text {
		switch {
		case r < utf8.RuneSelf:
			chars = append(chars, char{r: r})
		case !unicode.Is(known, r):
			chars = append(chars, char{r: r})
		case r >= hangulBase && r < hangulBase+hangulCount:
			s := r - hangulBase
			add(0x1100 + s/588)
			add(0x1161 + s%588/28)
			if t := s % 28; t > 0 {
				add(0x11A7 + t)
			}
		default:
			d := full.PropertiesString(text[i:]).Decomposition()
			if len(d) == 0 {
				add(r)
			}
			for len(d) > 0 {
				r, n := utf8.DecodeRune(d)
				add(r)
				d = d[n:]
			}
		}
	}
	return chars
}

// Hangul syllables decompose by arithmetic (Unicode, section 3.12).
const (
	hangulBase  = 0xAC00
	hangulCount = 11172
)

// order sorts runs of combining characters by their class.
func order(chars []char) {
	for i := 0; i < len(chars); {
		if chars[i].class == 0 {
			i++
			continue
		}
		end := i + 1
		for end < len(chars) && chars[end].class != 0 {
			end++
		}
		slices.SortStableFunc(chars[i:end], func(a, b char) int { return int(a.class) - int(b.class) })
		i = end
	}
}

// composed puts characters together with the starter before them, where nothing between blocks that.
func composed(chars []char) []char {
	kept := chars[:0]
	starter := -1
	var last uint8 // class of the character kept last after the starter; 0: none
	for _, c := range chars {
		if c.back && starter >= 0 && (last == 0 && len(kept) == starter+1 || last != 0 && last < c.class) {
			if r, ok := compose(kept[starter].r, c.r); ok {
				kept[starter].r = r
				continue
			}
		}
		if c.class == 0 {
			starter = len(kept)
		}
		last = c.class
		kept = append(kept, c)
	}
	return kept
}

// compose returns the primary composite of two characters.
func compose(a, b rune) (rune, bool) {
	var text [2 * utf8.UTFMax]byte
	n := utf8.EncodeRune(text[:], a)
	n += utf8.EncodeRune(text[n:], b)
	var out [2 * utf8.UTFMax]byte
	s := norm.NFC.Append(out[:0], text[:n]...)
	r, size := utf8.DecodeRune(s)
	return r, size == len(s)
}
