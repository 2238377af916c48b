package figure

import (
	"strings"
	"sync"
	"unicode/utf8"

	"codeberg.org/go-fonts/liberation/liberationsansregular"
	"golang.org/x/image/font"
	"golang.org/x/image/font/sfnt"
	"golang.org/x/image/math/fixed"
)

// fonts are what an SVG asks for, all with the widths of the font measured with, and the
// viewer's own where all of them are missing.
const fonts = "'Liberation Sans', Arial, Helvetica, sans-serif"

// fontSlack is how much wider than measured a text may get in the viewer's own font:
// DejaVu Sans is up to 18 % wider than Liberation Sans.
const fontSlack = 1.18

// How far a line of text reaches above and below its baseline, in sizes of the font.
const ascent, descent = 0.8, 0.22

var sans = sync.OnceValue(func() *sfnt.Font {
	f, err := sfnt.Parse(liberationsansregular.TTF)
	if err != nil {
		panic("figure: the built-in font: " + err.Error())
	}
	return f
})

// glyphs calls use with the glyph of each character of s, and where it begins, in units
// of the font; it returns where the last one ends. What the font does not have, and what
// cannot be measured, is an em wide.
func glyphs(s string, use func(g sfnt.GlyphIndex, x float64)) (end float64) {
	f := sans()
	em := f.UnitsPerEm()
	for _, r := range s {
		g, err := f.GlyphIndex(nil, r)
		if err != nil {
			g = 0
		}
		use(g, end)
		advance, err := f.GlyphAdvance(nil, g, fixed.I(int(em)), font.HintingNone)
		if g == 0 || err != nil {
			advance = fixed.I(int(em))
		}
		end += float64(advance) / 64
	}
	return end
}

// inked is the width of a text in a size, in pixels, in the font measured with.
func inked(s string, size float64) float64 {
	return glyphs(s, func(sfnt.GlyphIndex, float64) {}) / float64(sans().UnitsPerEm()) * size
}

// width is the room that a text takes up in a wide font.
func width(s string, size float64) float64 { return inked(s, size) * fontSlack }

// shorten cuts a text to a maximum width, with an ellipsis at its end.
func shorten(s string, size, limit float64) string {
	if width(s, size) <= limit {
		return s
	}
	for s != "" {
		_, n := utf8.DecodeLastRuneInString(s)
		s = s[:len(s)-n]
		if cut := strings.TrimRight(s, " -_/,") + "…"; width(cut, size) <= limit {
			return cut
		}
	}
	return ""
}

// wrap breaks a text into a maximum number of lines: behind spaces, and where it must
// behind -, _ and /. The last line is shortened where the text does not fit.
func wrap(s string, size, limit float64, lines int) []string {
	var out []string
	for len(out) < lines-1 && width(s, size) > limit {
		space, mark := 0, 0
		for i, r := range s {
			next := i + utf8.RuneLen(r)
			if r != utf8.RuneError && width(strings.TrimRight(s[:next], " "), size) > limit {
				break
			}
			switch r {
			case ' ':
				space = next
			case '-', '_', '/', ',':
				mark = next
			}
		}
		at := space
		if at == 0 {
			at = mark
		}
		if at == 0 || at == len(s) {
			break
		}
		out = append(out, strings.TrimRight(s[:at], " "))
		s = s[at:]
	}
	return append(out, shorten(s, size, limit))
}
