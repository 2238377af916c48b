package figure

import (
	"io"
	"math"
	"slices"
)

// Point is a pair of values.
type Point struct {
	X, Y float64
	// Deviation of Y, drawn as a bar up and down; 0: none.
	Deviation float64
}

// low is where the bar of the deviation ends: at the value itself where it would reach
// below 0 from above: rates and times are positive, and so is what a logarithm is of.
func (p *Point) low() float64 {
	if low := p.Y - p.Deviation; low > 0 || p.Y <= 0 {
		return low
	}
	return p.Y
}

// Series is a line, marks, or both.
type Series struct {
	Name   string
	Look   Look
	Points []Point // in order of X
	Line   bool
	Marks  bool
}

// Panel is a plot with a vertical axis of its own.
type Panel struct {
	// Title stands above the panel. Default: none.
	Title  string
	Y      Axis
	Series []Series
	// Height in pixels. Default: 300.
	Height float64
}

// Tag is a named vertical line through all panels.
type Tag struct {
	X    float64
	Name string
}

// Lines is a chart of panels over one horizontal axis, and of lines by which values of
// that axis are named.
type Lines struct {
	// Title says what is shown, Note of what and under which conditions.
	Title, Note string
	X           Axis
	Panels      []Panel
	Tags        []Tag
}

// Write writes the chart in one of Formats.
func (l *Lines) Write(out io.Writer, format string) error { return l.scene().write(out, format) }

const (
	defaultPanelHeight = 300.0
	betweenPanels      = 22.0
	laneHeight         = 18.0
)

func (l *Lines) scene() *scene {
	f := newFrame(l.Title, l.Note)
	var keys []key
	for _, p := range l.Panels {
		for _, s := range p.Series {
			if s.Name != "" {
				keys = append(keys, key{s.Name, s.key})
			}
		}
	}
	f.legend(keys)

	// What the vertical axes take of the width.
	panels := make([]panel, len(l.Panels))
	left := 0.0
	for i, p := range l.Panels {
		panels[i] = newPanel(p)
		left = max(left, panels[i].room())
	}
	left += margin
	right := canvas - margin - 6

	x := l.X.ends(l.bounds())
	plot := func(v float64) float64 { return left + x.at(v)*(right-left) }
	top := f.tags(l.Tags, plot)
	for i := range panels {
		if title := panels[i].Title; title != "" {
			f.text(shorten(title, textSize, canvas-2*margin), textSize, ink)
			f.y += 4
		}
		panels[i].draw(f, x, left, right, i == len(panels)-1)
		if i < len(panels)-1 {
			f.y += betweenPanels
		}
	}
	bottom := f.y
	for i, tag := range l.Tags {
		// Under the data.
		at := plot(tag.X)
		f.shapes = slices.Insert(f.shapes, 0, shape(&stroke{points: []point{{at, top[i]}, {at, bottom}}, paint: muted, width: thin, dash: []float64{3, 3}}))
	}
	f.y += belowAxis
	for _, t := range x.across(right - left) {
		at := plot(t.value)
		length := 5.0
		if t.label == "" {
			length = 3
		}
		f.line(point{at, bottom}, point{at, bottom + length}, muted, thin)
		f.add(&label{at: point{at, f.y + ascent*tickSize}, text: t.label, size: tickSize, anchor: middle, paint: muted})
	}
	f.y += lineHeight(tickSize) + 2
	f.add(&label{at: point{(left + right) / 2, f.y + ascent*textSize}, text: shorten(x.Label, textSize, right-left), size: textSize, anchor: middle, paint: ink})
	f.height = f.y + lineHeight(textSize) + margin/2
	return f.scene
}

// bounds are the minimum and the maximum on the horizontal axis, and its number of ticks.
func (l *Lines) bounds() (lowest, highest float64, ticks int) {
	lowest, highest = math.Inf(1), math.Inf(-1)
	for _, p := range l.Panels {
		for _, s := range p.Series {
			for _, q := range s.Points {
				lowest, highest = min(lowest, q.X), max(highest, q.X)
			}
		}
	}
	return lowest, highest, 10
}

// tags puts the names of vertical lines into lanes above the first panel, and returns
// how high the lines reach.
func (f *frame) tags(tags []Tag, plot func(float64) float64) []float64 {
	at, widths, names := make([]float64, len(tags)), make([]float64, len(tags)), make([]string, len(tags))
	for i, t := range tags {
		at[i], names[i] = plot(t.X), shorten(t.Name, tickSize, canvas-2*margin)
		widths[i] = width(names[i], tickSize)
	}
	placed := flags(at, widths, margin, canvas-margin)
	lanes := 0
	for _, p := range placed {
		lanes = max(lanes, p.lane+1)
	}
	f.y += 8
	bottom := f.y + float64(lanes)*laneHeight
	top := make([]float64, len(tags))
	for i, p := range placed {
		y := bottom - float64(p.lane+1)*laneHeight
		x := &label{at: point{p.left, y + ascent*tickSize}, text: names[i], size: tickSize, paint: ink}
		top[i] = y
		switch {
		case p.right < at[i]: // in a narrower font it must not stand off its line
			x.at.x, x.anchor = p.right, end
		case p.left < at[i]:
			top[i] = y + laneHeight
			if math.Abs((p.left+p.right)/2-at[i]) < 1 {
				x.at.x, x.anchor = at[i], middle
			}
		}
		f.add(x)
	}
	f.y = bottom + 4
	return top
}

// panel is a Panel that is being laid out.
type panel struct {
	Panel
	ticks []tick
	label []string
}

func newPanel(p Panel) panel {
	if p.Height == 0 {
		p.Height = defaultPanelHeight
	}
	lowest, highest := math.Inf(1), math.Inf(-1)
	for _, s := range p.Series {
		for _, q := range s.Points {
			lowest, highest = min(lowest, q.low()), max(highest, q.Y+q.Deviation)
		}
	}
	p.Y = p.Y.ends(lowest, highest, upTicks(p.Height))
	return panel{Panel: p, ticks: p.Y.upwards(p.Height), label: wrap(p.Y.Label, textSize, p.Height, 3)}
}

// room is the width of the axis, its ticks and its name.
func (p *panel) room() float64 {
	return float64(len(p.label))*lineHeight(textSize) + 6 + widest(p.ticks) + 8
}

// draw draws the panel between left and right, and the grid of axis x; the last panel
// has the axis itself.
func (p *panel) draw(f *frame, x Axis, left, right float64, last bool) {
	top, bottom := f.y, f.y+p.Height
	place := func(q Point) point {
		return point{left + x.at(q.X)*(right-left), bottom - p.Y.at(q.Y)*p.Height}
	}
	for _, t := range x.across(right - left) {
		at := left + x.at(t.value)*(right-left)
		f.line(point{at, top}, point{at, bottom}, grid, thin)
	}
	for _, t := range p.ticks {
		at := bottom - p.Y.at(t.value)*p.Height
		f.line(point{left, at}, point{right, at}, grid, thin)
		if t.label != "" {
			f.add(&label{at: point{left - 8, at + 0.35*tickSize}, text: t.label, size: tickSize, anchor: end, paint: muted})
		}
	}
	f.line(point{left, top}, point{left, bottom}, muted, thin)
	if last || p.Y.From == 0 {
		f.line(point{left, bottom}, point{right, bottom}, muted, thin)
	}
	for i, line := range p.label {
		f.add(&label{at: point{margin + float64(i)*lineHeight(textSize) + ascent*textSize, (top + bottom) / 2}, text: line, size: textSize, anchor: middle, paint: ink, turned: true})
	}
	// Lines below marks, and the first series' marks above those of others, so that each
	// point is seen.
	for _, s := range p.Series {
		if s.Line && len(s.Points) > 1 {
			points := make([]point, len(s.Points))
			for i, q := range s.Points {
				points[i] = place(q)
			}
			f.add(&stroke{points: points, paint: s.Look.paint(), width: thick, dash: s.Look.dash()})
		}
	}
	for _, s := range slices.Backward(p.Series) {
		for _, q := range s.Points {
			at := place(q)
			f.data = append(f.data, at)
			if q.Deviation > 0 {
				high, low := place(Point{X: q.X, Y: q.Y + q.Deviation}), place(Point{X: q.X, Y: q.low()})
				f.line(high, low, s.Look.paint(), thin)
				for _, end := range []point{high, low} {
					f.line(point{end.x - 4, end.y}, point{end.x + 4, end.y}, s.Look.paint(), thin)
				}
			}
			if s.Marks {
				f.add(&area{points: s.Look.mark(at), paint: s.Look.paint()})
			}
		}
	}
	f.y = bottom
}

// key draws the sample of the legend.
func (s *Series) key(c *scene, at point) {
	if s.Line {
		c.add(&stroke{points: []point{at, {at.x + keyWidth, at.y}}, paint: s.Look.paint(), width: thick, dash: s.Look.dash()})
	}
	if s.Marks {
		c.add(&area{points: s.Look.mark(point{at.x + keyWidth/2, at.y}), paint: s.Look.paint()})
	}
}
