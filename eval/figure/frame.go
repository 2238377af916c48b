package figure

import "math"

// Sizes of a picture, in pixels.
const (
	canvas = 680.0 // its width

	margin = 16.0

	titleSize = 17.0
	textSize  = 13.0
	tickSize  = 12.0

	belowAxis = 8.0 // between a horizontal axis and its labels

	keyWidth = 34.0 // of a key of the legend

	headLines = 6 // of a title or a note at most

	thin  = 1.0
	thick = 2.0
)

// lineHeight is the room of a line of text.
func lineHeight(size float64) float64 { return math.Ceil(size * 1.4) }

// key draws a series' sample of the legend, keyWidth wide, around a point on its left.
type key struct {
	name string
	draw func(s *scene, at point)
}

// frame lays out what all charts have: title and note on top, the legend below.
type frame struct {
	*scene
	y float64 // where the next thing goes
}

func newFrame(title, note string) *frame {
	f := &frame{scene: &scene{width: canvas, title: title, about: note}, y: margin}
	for _, x := range []struct {
		text  string
		size  float64
		paint paint
	}{{title, titleSize, ink}, {note, textSize, muted}} {
		if x.text == "" {
			continue
		}
		for _, line := range wrap(x.text, x.size, canvas-2*margin, headLines) {
			f.text(line, x.size, x.paint)
		}
	}
	return f
}

// text adds a line of text from the left margin.
func (f *frame) text(line string, size float64, p paint) {
	f.add(&label{at: point{margin, f.y + ascent*size}, text: line, size: size, paint: p})
	f.y += lineHeight(size)
}

// legend adds keys with their names in columns, in as few lines as there is room for.
func (f *frame) legend(keys []key) {
	const between, beside = 6.0, 16.0
	if len(keys) == 0 {
		return
	}
	column := 0.0
	for i := range keys {
		k := &keys[i]
		k.name = shorten(k.name, textSize, canvas-2*margin-keyWidth-between)
		column = max(column, keyWidth+between+width(k.name, textSize)+beside)
	}
	columns := max(1, int((canvas-2*margin+beside)/column))
	lines := (len(keys) + columns - 1) / columns
	columns = (len(keys) + lines - 1) / lines
	f.y += 6
	for i, k := range keys {
		x, y := margin+float64(i%columns)*column, f.y+float64(i/columns)*lineHeight(textSize)
		k.draw(f.scene, point{x, y + 0.45*textSize})
		f.add(&label{at: point{x + keyWidth + between, y + ascent*textSize}, text: k.name, size: textSize, paint: ink})
	}
	f.y += float64(lines) * lineHeight(textSize)
}

// apart says whether labels in a row or column, each of some length and centered on a
// place of an axis, do not touch.
func apart(a Axis, pixels float64, ticks []tick, length func(string) float64) bool {
	last := math.Inf(-1)
	for _, t := range ticks {
		if t.label == "" {
			continue
		}
		half := length(t.label) / 2
		if at := a.at(t.value) * pixels; at-half < last+4 {
			return false
		} else {
			last = at + half
		}
	}
	return true
}

// across are the ticks of a horizontal axis with a length in pixels.
func (a Axis) across(pixels float64) []tick {
	return a.ticks(10, func(t []tick) bool {
		return apart(a, pixels, t, func(s string) float64 { return width(s, tickSize) })
	})
}

// upwards are the ticks of a vertical one.
func (a Axis) upwards(pixels float64) []tick {
	return a.ticks(upTicks(pixels), func(t []tick) bool {
		return apart(a, pixels, t, func(string) float64 { return tickSize })
	})
}

// upTicks is how many ticks suit a vertical axis with a length in pixels.
func upTicks(pixels float64) int { return max(2, int(pixels/36)) }

// widest is the room that the labels of ticks take side by side with an axis.
func widest(ticks []tick) float64 {
	w := 0.0
	for _, t := range ticks {
		w = max(w, width(t.label, tickSize))
	}
	return w
}
