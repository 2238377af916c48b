package figure

import "image/color"

// paint is what a color is for.
type paint uint8

const (
	ground paint = iota // the background
	ink                 // titles, names, values
	muted               // axes, ticks, notes
	grid
	seriesA
	seriesB
	seriesC
	seriesD
	paints
)

// rgb is a color in the notation of CSS, without the #.
type rgb uint32

func (c rgb) rgba() color.RGBA {
	return color.RGBA{R: uint8(c >> 16), G: uint8(c >> 8), B: uint8(c), A: 0xff}
}

type palette [paints]rgb

// The colors for light and for dark pages.
var (
	light = palette{
		ground: 0xffffff, ink: 0x1f2328, muted: 0x59636e, grid: 0xdfe3e8,
		seriesA: 0x0969da, seriesB: 0xbc4c00, seriesC: 0x1a7f37, seriesD: 0x8250df,
	}
	dark = palette{
		ground: 0x0d1117, ink: 0xe6edf3, muted: 0x9198a1, grid: 0x2a3037,
		seriesA: 0x58a6ff, seriesB: 0xf0883e, seriesC: 0x3fb950, seriesD: 0xbc8cff,
	}
)

// Look is how a series is drawn. Looks differ in color, dashes and marks.
type Look uint8

// Looks of series.
const (
	LookA     Look = iota // blue, solid, circles
	LookB                 // orange, dashed, squares
	LookC                 // green, dotted, triangles
	LookD                 // violet, dashed and dotted, diamonds
	LookPlain             // the color of text, solid, small circles
)

func (l Look) paint() paint {
	if l == LookPlain {
		return ink
	}
	return seriesA + paint(l)
}

// dash is the lengths of strokes and gaps, in pixels; nil: solid.
func (l Look) dash() []float64 {
	switch l {
	case LookB:
		return []float64{8, 4}
	case LookC:
		return []float64{2, 3}
	case LookD:
		return []float64{9, 3, 2, 3}
	}
	return nil
}

// mark is the outline of a point's mark at p.
func (l Look) mark(p point) []point {
	switch l {
	case LookB:
		const r = 4
		return []point{{p.x - r, p.y - r}, {p.x + r, p.y - r}, {p.x + r, p.y + r}, {p.x - r, p.y + r}}
	case LookC:
		return []point{{p.x, p.y - 5.2}, {p.x + 4.8, p.y + 3.4}, {p.x - 4.8, p.y + 3.4}}
	case LookD:
		const r = 5.4
		return []point{{p.x, p.y - r}, {p.x + r, p.y}, {p.x, p.y + r}, {p.x - r, p.y}}
	}
	if l == LookPlain {
		return disc(p, 3)
	}
	return disc(p, 4)
}
