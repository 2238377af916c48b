package figure

import (
	"io"
	"math"
)

// Group is the values of one thing, one of each series; NaN: it has none.
type Group struct {
	Name   string
	Values []float64
}

// Bars is a chart of bars from left to right: a row for each group, in it a bar for each
// series, with its value written at its end.
type Bars struct {
	// Title says what is shown, Note of what and under which conditions.
	Title, Note string
	X           Axis
	// Series are the names of the bars of a group, up to four.
	Series []string
	Groups []Group
	// Value writes a value at the end of its bar.
	Value func(float64) string
}

// Write writes the chart in one of Formats.
func (b *Bars) Write(out io.Writer, format string) error { return b.scene().write(out, format) }

const (
	barHeight   = 18.0
	betweenBars = 2.0
	groupGap    = 16.0
)

func (b *Bars) scene() *scene {
	f := newFrame(b.Title, b.Note)
	var keys []key
	for i, name := range b.Series {
		keys = append(keys, key{name, func(s *scene, at point) { bar(s, i, at.x, at.x+keyWidth, at.y-5, at.y+5) }})
	}
	f.legend(keys)

	// The names take what they need, up to two fifths of the width.
	const maxWidth = 0.4 * canvas
	names, left := make([][]string, len(b.Groups)), 0.0
	group := float64(len(b.Series))*(barHeight+betweenBars) - betweenBars
	for i, g := range b.Groups {
		names[i] = wrap(g.Name, textSize, maxWidth, max(1, int(group/lineHeight(textSize))))
		for _, line := range names[i] {
			left = max(left, width(line, textSize))
		}
	}
	left += margin + 8
	right := canvas - margin - 6
	x := b.axis(right - left)
	plot := func(v float64) float64 { return left + x.at(v)*(right-left) }
	ticks := x.across(right - left)

	f.y += 8
	top := f.y
	bottom := top + float64(len(b.Groups))*(group+groupGap)
	for i, g := range b.Groups {
		y := top + groupGap/2 + float64(i)*(group+groupGap)
		line := lineHeight(textSize)
		first := y + group/2 - float64(len(names[i]))*line/2 + (line-textSize)/2 + ascent*textSize
		for j, text := range names[i] {
			f.add(&label{at: point{left - 8, first + float64(j)*line}, text: text, size: textSize, anchor: end, paint: ink})
		}
		for j, v := range g.Values {
			if math.IsNaN(v) {
				continue
			}
			low, high := y+float64(j)*(barHeight+betweenBars), y+float64(j)*(barHeight+betweenBars)+barHeight
			bar(f.scene, j, plot(0), plot(v), low, high)
			f.data = append(f.data, point{plot(v), (low + high) / 2})
			x := &label{at: point{plot(v) + valueGap, (low+high)/2 + 0.35*tickSize}, text: b.Value(v), size: tickSize, paint: ink}
			if v < 0 {
				x.at.x, x.anchor = plot(v)-valueGap, end
			}
			f.add(x)
		}
	}
	f.line(point{plot(0), top}, point{plot(0), bottom}, muted, thin)
	f.y = bottom + belowAxis
	for _, t := range ticks {
		f.line(point{plot(t.value), bottom}, point{plot(t.value), bottom + 5}, muted, thin)
		f.add(&label{at: point{plot(t.value), f.y + ascent*tickSize}, text: t.label, size: tickSize, anchor: middle, paint: muted})
	}
	f.y += lineHeight(tickSize) + 2
	f.add(&label{at: point{(left + right) / 2, f.y + ascent*textSize}, text: shorten(x.Label, textSize, right-left), size: textSize, anchor: middle, paint: ink})
	f.height = f.y + lineHeight(textSize) + margin/2
	return f.scene
}

// valueGap is between the end of a bar and its value.
const valueGap = 5.0

// axis is the horizontal axis, with room for the values at both ends of its length in
// pixels.
func (b *Bars) axis(pixels float64) Axis {
	x := b.X
	var lowest, highest, before, behind float64
	for _, g := range b.Groups {
		for _, v := range g.Values {
			if math.IsNaN(v) {
				continue
			}
			w := width(b.Value(v), tickSize) + 2*valueGap
			if v < 0 {
				before = max(before, w)
			} else {
				behind = max(behind, w)
			}
			lowest, highest = min(lowest, v), max(highest, v)
		}
	}
	if lowest == highest {
		highest = 1
	}
	scale := (highest - lowest) / max(pixels-before-behind, 1)
	x.From, x.To = lowest-before*scale, highest+behind*scale
	return x
}

// bar draws a bar of a series; every other is an outline, so that they differ in grey.
func bar(s *scene, series int, from, to, top, bottom float64) {
	look := []Look{LookA, LookD, LookC, LookB}[series%4]
	if from > to {
		from, to = to, from
	}
	to = max(to, from+thin)
	s.add(&area{points: rectangle(from, to, top, bottom), paint: look.paint()})
	if series%2 == 1 && to-from > 2*thick {
		s.add(&area{points: rectangle(from+thick, to-thick, top+thick, bottom-thick), paint: ground})
	}
}

func rectangle(left, right, top, bottom float64) []point {
	return []point{{left, top}, {right, top}, {right, bottom}, {left, bottom}}
}
