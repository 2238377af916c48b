package figure

import (
	"fmt"
	"io"
	"math"
	"strings"
)

// Formats are the endings of file names that a chart can be written as.
var Formats = []string{"svg", "png"}

// point is a place in a scene: pixels right of and below the upper left corner.
type point struct{ x, y float64 }

// scene is a picture: shapes, the later above the earlier ones.
type scene struct {
	width, height float64
	// title and about describe the picture to screen readers.
	title, about string
	shapes       []shape
	// data are the points that no text may cover.
	data []point
}

// shape is a stroke, an area or a text.
type shape interface {
	writeSVG(w *svg)
	draw(c *raster)
}

// stroke is a line along points.
type stroke struct {
	points []point
	paint  paint
	width  float64
	dash   []float64
}

// area is a filled polygon.
type area struct {
	points []point
	paint  paint
}

// anchor is where a text has its point.
type anchor uint8

const (
	start anchor = iota
	middle
	end
)

// label is a line of text with its baseline at a point; turned: going upwards.
type label struct {
	at     point
	text   string
	size   float64
	anchor anchor
	paint  paint
	turned bool
}

// box is the room that a label takes up in a wide font.
func (x *label) box() (x0, y0, x1, y1 float64) {
	w := width(x.text, x.size)
	before := map[anchor]float64{start: 0, middle: w / 2, end: w}[x.anchor]
	if x.turned {
		return x.at.x - ascent*x.size, x.at.y - w + before, x.at.x + descent*x.size, x.at.y + before
	}
	return x.at.x - before, x.at.y - ascent*x.size, x.at.x - before + w, x.at.y + descent*x.size
}

func (s *scene) add(shapes ...shape) { s.shapes = append(s.shapes, shapes...) }

// line adds a thin straight line.
func (s *scene) line(from, to point, p paint, width float64, dash ...float64) {
	s.add(&stroke{points: []point{from, to}, paint: p, width: width, dash: dash})
}

// write writes a scene in one of Formats.
func (s *scene) write(out io.Writer, format string) error {
	switch format {
	case "svg":
		return s.svg(out)
	case "png":
		return s.png(out)
	}
	return fmt.Errorf("figure: format %q: must be %s", format, strings.Join(Formats, " or "))
}

// disc is a circle as a polygon.
func disc(c point, r float64) []point {
	const corners = 24
	points := make([]point, corners)
	for i := range points {
		sin, cos := math.Sincos(2 * math.Pi * float64(i) / corners)
		points[i] = point{c.x + r*cos, c.y + r*sin}
	}
	return points
}
