package figure

import (
	"image"
	"image/png"
	"io"
	"math"
	"slices"

	"golang.org/x/image/font/sfnt"
	"golang.org/x/image/math/fixed"
	"golang.org/x/image/vector"
)

// pngScale is how many points of a PNG a pixel of a scene is wide.
const pngScale = 2

// raster is a picture being drawn.
type raster struct {
	image *image.RGBA
	mask  vector.Rasterizer
}

// png writes the scene in the colors for light pages.
func (s *scene) png(out io.Writer) error {
	c := raster{image: image.NewRGBA(image.Rect(0, 0, int(math.Ceil(s.width*pngScale)), int(math.Ceil(s.height*pngScale))))}
	background := area{points: []point{{0, 0}, {s.width, 0}, {s.width, s.height}, {0, s.height}}, paint: ground}
	background.draw(&c)
	for _, x := range s.shapes {
		x.draw(&c)
	}
	encoder := png.Encoder{CompressionLevel: png.BestCompression}
	return encoder.Encode(out, c.image)
}

// fill fills outlines.
func (c *raster) fill(outlines [][]point, p paint) {
	box := image.Rectangle{}
	for _, o := range outlines {
		for _, q := range o {
			x, y := q.x*pngScale, q.y*pngScale
			box = box.Union(image.Rect(int(math.Floor(x)), int(math.Floor(y)), int(math.Ceil(x))+1, int(math.Ceil(y))+1))
		}
	}
	if box = box.Intersect(c.image.Bounds()); box.Empty() {
		return
	}
	c.mask.Reset(box.Dx(), box.Dy())
	for _, o := range outlines {
		for i, q := range o {
			x, y := float32(q.x*pngScale)-float32(box.Min.X), float32(q.y*pngScale)-float32(box.Min.Y)
			if i == 0 {
				c.mask.MoveTo(x, y)
			} else {
				c.mask.LineTo(x, y)
			}
		}
		c.mask.ClosePath()
	}
	c.mask.Draw(c.image, box, image.NewUniform(light[p].rgba()), image.Point{})
}

func (x *area) draw(c *raster) { c.fill([][]point{x.points}, x.paint) }

func (x *stroke) draw(c *raster) {
	for _, piece := range dashed(x.points, x.dash) {
		c.fill([][]point{outline(piece, x.width/2)}, x.paint)
	}
}

// outline is the border of a line that reaches half its width to either side of points:
// along one side to the end, and along the other back.
func outline(points []point, half float64) []point {
	points = slices.Compact(slices.Clone(points))
	if len(points) < 2 {
		return nil
	}
	// across is what is right of the way from a to b, 1 long.
	across := func(a, b point) point {
		length := math.Hypot(b.x-a.x, b.y-a.y)
		return point{(a.y - b.y) / length, (b.x - a.x) / length}
	}
	out, back := make([]point, len(points)), make([]point, len(points))
	for i, p := range points {
		n := across(points[max(i-1, 0)], points[max(i, 1)])
		if i > 0 && i < len(points)-1 {
			// The sides of both pieces meet at this corner, which is cut where the turn is sharp.
			m := across(p, points[i+1])
			to := 1 / max(1+n.x*m.x+n.y*m.y, 0.2)
			n = point{(n.x + m.x) * to, (n.y + m.y) * to}
		}
		out[i] = point{p.x + n.x*half, p.y + n.y*half}
		back[len(points)-1-i] = point{p.x - n.x*half, p.y - n.y*half}
	}
	return append(out, back...)
}

// dashed cuts a line into its dashes.
func dashed(points []point, dash []float64) [][]point {
	if len(dash) == 0 || len(points) < 2 {
		return [][]point{points}
	}
	var pieces [][]point
	piece, n, left := []point{points[0]}, 0, dash[0]
	for i := 1; i < len(points); i++ {
		a, b := points[i-1], points[i]
		for {
			length := math.Hypot(b.x-a.x, b.y-a.y)
			if length <= left {
				left -= length
				piece = append(piece, b)
				break
			}
			a = point{a.x + (b.x-a.x)*left/length, a.y + (b.y-a.y)*left/length}
			if n%2 == 0 {
				pieces = append(pieces, append(piece, a))
			}
			n++
			piece, left = []point{a}, dash[n%len(dash)]
		}
	}
	if n%2 == 0 {
		pieces = append(pieces, piece)
	}
	return pieces
}

func (x *label) draw(c *raster) {
	f := sans()
	scale := x.size / float64(f.UnitsPerEm())
	before := inked(x.text, x.size) * map[anchor]float64{start: 0, middle: 0.5, end: 1}[x.anchor]
	// Segments go downwards in y, as the scene does.
	place := func(p fixed.Point26_6, from float64) point {
		right, down := (from+float64(p.X)/64)*scale-before, float64(p.Y)/64*scale
		if x.turned {
			return point{x.at.x + down, x.at.y - right}
		}
		return point{x.at.x + right, x.at.y + down}
	}
	var outlines [][]point
	glyphs(x.text, func(g sfnt.GlyphIndex, from float64) {
		segments, err := f.LoadGlyph(nil, g, fixed.I(int(f.UnitsPerEm())), nil)
		if err != nil {
			return // it stays empty, as wide as it is
		}
		for _, s := range segments {
			to := func(i int) point { return place(s.Args[i], from) }
			if s.Op == sfnt.SegmentOpMoveTo {
				outlines = append(outlines, []point{to(0)})
				continue
			}
			last := &outlines[len(outlines)-1]
			switch s.Op {
			case sfnt.SegmentOpQuadTo:
				*last = append(*last, curve((*last)[len(*last)-1], to(0), to(1))...)
			default: // the font has straight lines and quadratic curves
				*last = append(*last, to(0))
			}
		}
	})
	c.fill(outlines, x.paint)
}

// curve is a quadratic curve from a to c as straight pieces.
func curve(a, b, c point) []point {
	const pieces = 6
	points := make([]point, 0, pieces)
	for i := 1; i <= pieces; i++ {
		t := float64(i) / pieces
		u := 1 - t
		points = append(points, point{u*u*a.x + 2*u*t*b.x + t*t*c.x, u*u*a.y + 2*u*t*b.y + t*t*c.y})
	}
	return points
}
