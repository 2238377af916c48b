package tokenizer

import (
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
	"golang.org/x/text/unicode/rangetable"
)

// normalizer is a list of steps, applied in order to text that is valid UTF-8.
type normalizer []normalizeStep

type normalizeStep interface{ apply(text string) string }

func (n normalizer) apply(text string) string {
	for _, step := range n {
		text = step.apply(text)
	}
	return text
}

// prepend puts a string before a text that is not empty.
type prepend string

func (p prepend) apply(text string) string {
	if text == "" {
		return text
	}
	return string(p) + text
}

// replace writes one string for another, which is not empty.
type replace struct{ old, new string }

func (r replace) apply(text string) string { return strings.ReplaceAll(text, r.old, r.new) }

// nfc is Unicode normalization form C as the reference has it.
//
// The reference's tables are those of Unicode 9.0. They treat a newer character as a base character that composes with
// nothing, so the text before it and the text after it are normalized separately. Package norm limits runs of combining
// characters to 30 (the Stream-Safe format), the reference does not; longer runs are normalized here.
type nfc struct{}

// assignedToReference is the set of characters that the reference's normalization knows.
var assignedToReference = sync.OnceValue(func() *unicode.RangeTable { return rangetable.Assigned("9.0.0") })

// maxLibraryRun is the maximum number of consecutive combining characters that package norm normalizes by the Unicode
// definition.
const maxLibraryRun = 30

func (nfc) apply(text string) string {
	if norm.NFC.QuickSpanString(text) == len(text) {
		return text
	}
	known := assignedToReference()
	out := make([]byte, 0, len(text)+len(text)/8)
	start := 0
	for i, r := range text {
		if r < utf8.RuneSelf || unicode.Is(known, r) {
			continue
		}
		n := utf8.RuneLen(r)
		out = appendNFC(out, text[start:i])
		out = append(out, text[i:i+n]...)
		start = i + n
	}
	return string(appendNFC(out, text[start:]))
}

func appendNFC(out []byte, text string) []byte {
	if text == "" {
		return out
	}
	run := 0
	for i := 0; i < len(text); {
		p := norm.NFD.PropertiesString(text[i:])
		i += p.Size()
		n := max(1, utf8.RuneCount(p.Decomposition()))
		if p.LeadCCC() == 0 {
			run = n - 1
		} else {
			run += n
		}
		if run > maxLibraryRun {
			return appendLongNFC(out, text)
		}
	}
	return append(out, norm.NFC.String(text)...) // AppendString would also look at what out ends with
}

// appendLongNFC normalizes by the definition: decompose, order combining characters, compose (Unicode, section 3.11).
func appendLongNFC(out []byte, text string) []byte {
	type char struct {
		r   rune
		ccc uint8
	}
	var chars []char
	for i := 0; i < len(text); {
		p := norm.NFD.PropertiesString(text[i:])
		d := text[i : i+p.Size()]
		if full := p.Decomposition(); len(full) > 0 {
			d = string(full)
		} else {
			d = norm.NFD.String(d)
		}
		i += p.Size()
		for _, r := range d {
			chars = append(chars, char{r, norm.NFD.PropertiesString(string(r)).CCC()})
		}
	}
	for i := 0; i < len(chars); {
		if chars[i].ccc == 0 {
			i++
			continue
		}
		end := i + 1
		for end < len(chars) && chars[end].ccc != 0 {
			end++
		}
		slices.SortStableFunc(chars[i:end], func(a, b char) int { return int(a.ccc) - int(b.ccc) })
		i = end
	}
	kept := chars[:0]
	starter := -1
	var last uint8 // class of the character kept last after the starter; 0: none
	for _, c := range chars {
		if starter >= 0 && (last == 0 && len(kept) == starter+1 || last != 0 && last < c.ccc) {
			if r, ok := compose(kept[starter].r, c.r); ok {
				kept[starter].r = r
				continue
			}
		}
		if c.ccc == 0 {
			starter = len(kept)
		}
		last = c.ccc
		kept = append(kept, c)
	}
	for _, c := range kept {
		out = utf8.AppendRune(out, c.r)
	}
	return out
}

// compose returns the primary composite of two characters.
func compose(a, b rune) (rune, bool) {
	s := norm.NFC.String(string([]rune{a, b}))
	r, n := utf8.DecodeRuneInString(s)
	return r, n == len(s)
}
