package figure

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"image/color"
	"image/png"
	"io"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/tools/racedetector"
)

// Names of lines stay in the picture and off each other, and no line runs through one.
func TestFlags(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, maxSearched+2).Draw(t, "n")
		const from, to = 10.0, 500.0
		place := rapid.Float64Range(from, to)
		if rapid.Bool().Draw(t, "close") {
			at := rapid.Float64Range(from, to-30).Draw(t, "about")
			place = rapid.Float64Range(at, at+30)
		}
		at := rapid.SliceOfN(place, n, n).Draw(t, "at")
		widths := rapid.SliceOfN(rapid.Float64Range(1, to-from), n, n).Draw(t, "widths")
		f := flags(at, widths, from, to)
		if len(f) != n || !slices.Equal(f, flags(at, widths, from, to)) {
			t.Fatalf("%+v", f)
		}
		tall := false // each name has a lane of its own
		for i := range f {
			tall = tall || f[i].lane == n-1
		}
		for i, x := range f {
			if x.left < from || x.right > to+1e-9 || math.Abs(x.right-x.left-widths[i]) > 1e-9 || x.lane < 0 || x.lane >= n {
				t.Errorf("name %d: %+v", i, x)
			}
			for j, y := range f {
				if j == i {
					continue
				}
				if x.lane == y.lane && x.left < y.right && y.left < x.right {
					t.Errorf("names %d and %d overlap: %+v, %+v", i, j, x, y)
				}
				if !tall && y.lane >= x.lane && at[j] > x.left && at[j] < x.right {
					t.Errorf("line %d runs through name %d: %v, %+v", j, i, at[j], x)
				}
			}
		}
	})
}

func TestFlagsTakeFewLanes(t *testing.T) {
	for _, c := range []struct {
		name       string
		at, widths []float64
		want       []int
	}{
		{"far apart", []float64{50, 300}, []float64{100, 100}, []int{0, 0}},
		{"one on each side", []float64{200, 210}, []float64{150, 150}, []int{0, 0}},
		{"three at one place", []float64{200, 200, 200}, []float64{150, 150, 150}, []int{0, 0, 1}},
		{"at the right edge", []float64{480, 490}, []float64{150, 150}, []int{0, 1}},
		{"at the left edge", []float64{12, 20}, []float64{150, 150}, []int{1, 0}},
		{"too wide for either side", []float64{250}, []float64{480}, []int{0}},
	} {
		var lanes []int
		for _, f := range flags(c.at, c.widths, 10, 500) {
			lanes = append(lanes, f.lane)
		}
		if !slices.Equal(slices.Sorted(slices.Values(lanes)), slices.Sorted(slices.Values(c.want))) {
			t.Errorf("%s: lanes %v, want %v", c.name, lanes, c.want)
		}
	}
}

// long names, and a run of points that fall.
const long = "an-organization-of-some-length/A-Mixture-of-Experts-Model-With-A-Name-A22B-Instruct-2507"

func falling(level float64) []Point {
	var p []Point
	for x := range 11 {
		p = append(p, Point{X: float64(10 * x), Y: level / float64(1+x), Deviation: level / 20})
	}
	return p
}

func linesOf(tags ...float64) *Lines {
	l := &Lines{
		Title: "Throughput of " + long, Note: strings.Repeat("under conditions, ", 20),
		X: Axis{Label: "share (%)", From: 0, To: 100},
		Panels: []Panel{
			{Y: Axis{Label: "throughput (tokens/s)"}, Series: []Series{
				{Name: "peer memory, predicted", Look: LookA, Points: falling(5000), Line: true},
				{Name: "host memory, measured", Look: LookB, Points: falling(4900), Marks: true},
				{Name: long + long, Look: LookC, Points: falling(50), Line: true, Marks: true},
			}},
			{Y: Axis{Label: "a ratio whose name is longer than the panel is high", Log: true}, Height: 90, Series: []Series{
				{Look: LookD, Points: falling(12345), Line: true},
			}},
		},
	}
	for _, x := range tags {
		l.Tags = append(l.Tags, Tag{X: x, Name: fmt.Sprintf("model %v: saturation point", x)})
	}
	return l
}

func barsOf(n int) *Bars {
	b := &Bars{
		Title: "Gain", Note: long, X: Axis{Label: "gain (%)"}, Series: []string{"decode throughput", "end-to-end throughput"},
		Value: func(v float64) string { return fmt.Sprintf("%+.0f %%", v) },
	}
	for i := range n {
		name := fmt.Sprintf("model %d", i)
		if i%3 == 2 {
			name = long
		}
		b.Groups = append(b.Groups, Group{name, []float64{617 - 111*float64(i), 40 - 20*float64(i)}})
	}
	return b
}

var charts = map[string]interface{ scene() *scene }{
	"no lines named":      linesOf(),
	"saturation apart":    linesOf(7, 51),
	"saturation together": linesOf(2.8, 2.9, 3, 3),
	"at the edges":        linesOf(0, 100),
	"seven models":        linesOf(50, 51, 52, 53, 54, 99, 100),
	"nine models":         linesOf(50, 51, 52, 53, 54, 55, 56, 99, 100),
	"sizes of copies": &Lines{
		Title: "Latency", X: Axis{Label: "size (MiB)", Log: true},
		Panels: []Panel{{Y: Axis{Label: "time (µs)", Log: true}, Series: []Series{{Name: "host", Points: []Point{{X: 0.0625, Y: 8.6}, {X: 4, Y: 83}}, Line: true}}}},
	},
	"titled panels": &Lines{
		Title: "Loads", X: Axis{Label: "entries", Log: true},
		Panels: []Panel{
			{Title: "model " + long, Y: Axis{Label: "ms", Log: true}, Height: 110, Series: []Series{{Name: "host", Points: []Point{{X: 100, Y: 0.1}, {X: 8000, Y: 10}}, Line: true}}},
			{Title: "another model", Y: Axis{Label: "ms", Log: true}, Height: 110, Series: []Series{{Points: []Point{{X: 100, Y: 0.02}, {X: 8000, Y: 1}}, Line: true}}},
		},
	},
	"one point": &Lines{
		Panels: []Panel{{Y: Axis{Log: true}, Series: []Series{{Name: "one", Points: []Point{{X: 1, Y: 10}}, Marks: true}}}}, X: Axis{Log: true},
	},
	"one model":          barsOf(1),
	"four models":        barsOf(4),
	"seven bars":         barsOf(7),
	"nothing gained":     &Bars{Series: []string{"a"}, Groups: []Group{{"x", []float64{0}}}, Value: number},
	"everything is lost": &Bars{Series: []string{"a"}, Groups: []Group{{"x", []float64{-100}}}, Value: number},
}

func labels(s *scene) []*label {
	var all []*label
	for _, x := range s.shapes {
		if l, ok := x.(*label); ok && l.text != "" {
			all = append(all, l)
		}
	}
	return all
}

// No text overlaps another, leaves the picture, or covers what is measured, even in a
// font as wide as DejaVu Sans.
func TestTextsStayApart(t *testing.T) {
	for name, c := range charts {
		s := c.scene()
		all := labels(s)
		for i, x := range all {
			x0, y0, x1, y1 := x.box()
			if x0 < 0 || y0 < 0 || x1 > s.width || y1 > s.height {
				t.Errorf("%s: %q leaves the picture: %v %v %v %v of %v x %v", name, x.text, x0, y0, x1, y1, s.width, s.height)
			}
			for _, y := range all[:i] {
				u0, v0, u1, v1 := y.box()
				if x0 < u1 && u0 < x1 && y0 < v1 && v0 < y1 {
					t.Errorf("%s: %q and %q overlap", name, x.text, y.text)
				}
			}
			for _, p := range s.data {
				if p.x > x0 && p.x < x1 && p.y > y0 && p.y < y1 {
					t.Errorf("%s: %q covers a point", name, x.text)
				}
			}
		}
		for _, p := range s.data {
			if p.x < 0 || p.y < 0 || p.x > s.width || p.y > s.height {
				t.Errorf("%s: the point %v leaves the picture", name, p)
			}
		}
	}
}

func TestSVG(t *testing.T) {
	for name, c := range charts {
		var out, again bytes.Buffer
		if err := c.scene().write(&out, "svg"); err != nil {
			t.Fatal(err)
		}
		if err := c.scene().write(&again, "svg"); err != nil || !bytes.Equal(out.Bytes(), again.Bytes()) {
			t.Errorf("%s: drawn twice, it differs; %v", name, err)
		}
		if strings.Contains(out.String(), "NaN") || strings.Contains(out.String(), "Inf") {
			t.Errorf("%s: a number is none", name)
		}
		style, texts := "", ""
		classes := map[string]bool{}
		d := xml.NewDecoder(&out)
		for {
			token, err := d.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%s: not an SVG: %v", name, err)
			}
			switch x := token.(type) {
			case xml.CharData:
				texts += string(x) + "\n"
				if strings.Contains(string(x), "prefers-color-scheme: dark") {
					style = string(x)
				}
			case xml.StartElement:
				for _, a := range x.Attr {
					switch a.Name.Local {
					case "font-family":
						if x.Name.Local != "svg" || !strings.HasSuffix(a.Value, ", sans-serif") {
							t.Errorf("%s: %s has the fonts %s", name, x.Name.Local, a.Value)
						}
					case "class":
						classes[a.Value] = true
					}
				}
			}
		}
		for class := range classes {
			if !strings.Contains(style, "."+class+" {") {
				t.Errorf("%s: class %s has no color for dark pages", name, class)
			}
		}
		var series []string
		switch c := c.(type) {
		case *Lines:
			for _, p := range c.Panels {
				for _, s := range p.Series {
					series = append(series, s.Name)
				}
			}
			for _, tag := range c.Tags {
				series = append(series, tag.Name)
			}
		case *Bars:
			series = c.Series
		}
		for _, s := range series {
			if s = strings.TrimSuffix(shorten(s, textSize, canvas-100), "…"); !strings.Contains(texts, s[:min(len(s), 60)]) {
				t.Errorf("%s: %q is not named", name, s)
			}
		}
	}
}

func TestPNG(t *testing.T) {
	racedetector.SkipSequential(t)
	s := charts["saturation apart"].scene()
	var out bytes.Buffer
	if err := s.write(&out, "png"); err != nil {
		t.Fatal(err)
	}
	picture, err := png.Decode(&out)
	if err != nil {
		t.Fatal(err)
	}
	if b := picture.Bounds(); b.Dx() != pngScale*int(s.width) || b.Dy() != int(math.Ceil(pngScale*s.height)) {
		t.Errorf("%v for %v x %v", b, s.width, s.height)
	}
	points := map[color.RGBA]int{}
	for y := range picture.Bounds().Dy() {
		for x := range picture.Bounds().Dx() {
			points[color.RGBAModel.Convert(picture.At(x, y)).(color.RGBA)]++
		}
	}
	for p := range paints {
		if points[light[p].rgba()] < 100 {
			t.Errorf("paint %d: %d points", p, points[light[p].rgba()])
		}
	}
	if err := s.write(io.Discard, "gif"); err == nil || !strings.Contains(err.Error(), "svg or png") {
		t.Error(err)
	}
}

// A text has as much ink in each direction.
func TestTurnedText(t *testing.T) {
	ink := func(turned bool) int {
		s := &scene{width: 200, height: 200}
		s.add(&label{at: point{100, 100}, text: "tokens/s", size: 20, anchor: middle, paint: ink, turned: turned})
		var out bytes.Buffer
		if err := s.png(&out); err != nil {
			t.Fatal(err)
		}
		picture, err := png.Decode(&out)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for y := range 400 {
			for x := range 400 {
				if r, _, _, _ := picture.At(x, y).RGBA(); r < 0x8000 {
					n++
				}
			}
		}
		return n
	}
	if across, up := ink(false), ink(true); across < 500 || math.Abs(float64(up)/float64(across)-1) > 0.1 {
		t.Errorf("%d dark points across, %d upwards", across, up)
	}
}

// contrast of two colors as WCAG 2.2 defines it.
func contrast(a, b rgb) float64 {
	luminance := func(c rgb) float64 {
		linear := func(v uint8) float64 {
			if x := float64(v) / 255; x > 0.04045 {
				return math.Pow((x+0.055)/1.055, 2.4)
			}
			return float64(v) / 255 / 12.92
		}
		x := c.rgba()
		return 0.2126*linear(x.R) + 0.7152*linear(x.G) + 0.0722*linear(x.B)
	}
	x, y := luminance(a), luminance(b)
	return (max(x, y) + 0.05) / (min(x, y) + 0.05)
}

func TestContrast(t *testing.T) {
	if c := contrast(0, 0xffffff); c != 21 {
		t.Fatalf("black on white has a contrast of %v", c)
	}
	for page, colors := range map[string]palette{"light": light, "dark": dark} {
		for p := range paints {
			minimum := 3.0
			switch p {
			case ground, grid: // the grid stands behind all else, and its ticks are labeled
				continue
			case ink, muted: // of texts, too
				minimum = 4.5
			}
			if c := contrast(colors[p], colors[ground]); c < minimum {
				t.Errorf("%s: paint %d has a contrast of %.2f, want %v", page, p, c, minimum)
			}
		}
	}
	for name, c := range charts {
		for _, l := range labels(c.scene()) {
			if l.paint != ink && l.paint != muted {
				t.Errorf("%s: %q has the paint %d", name, l.text, l.paint)
			}
		}
	}
}

// Without colors, series still differ by their dashes, and by their marks.
func TestLooksDiffer(t *testing.T) {
	looks := []Look{LookA, LookB, LookC, LookD}
	for i, a := range looks {
		for _, b := range looks[:i] {
			if a.paint() == b.paint() || slices.Equal(a.dash(), b.dash()) || reflect.DeepEqual(a.mark(point{}), b.mark(point{})) {
				t.Errorf("looks %d and %d are alike", a, b)
			}
		}
	}
}

func TestTicks(t *testing.T) {
	for _, c := range []struct {
		name            string
		axis            Axis
		lowest, highest float64
		want            string
	}{
		{"less than a decade", Axis{Log: true}, 8.6, 83, "5 10 20 50 100"},
		{"sizes", Axis{Log: true}, 0.0625, 336, "0.05 0.1 0.2 0.5 1 2 5 10 20 50 100 200 500"},
		{"many decades", Axis{Log: true}, 1e-6, 9e9, "1e-06 0.0001 0.01 1 100 10,000 1,000,000 1e+08 1e+10"},
		{"one value", Axis{Log: true}, 10, 10, "5 10 20"},
		{"from zero", Axis{}, 136, 4787, "0 500 1,000 1,500 2,000 2,500 3,000 3,500 4,000 4,500 5,000"},
		{"below zero", Axis{}, -36, 61, "−40 −20 0 20 40 60 80"},
		{"nothing", Axis{}, 0, 0, "0 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1"},
		{"fixed", Axis{From: 0, To: 100}, 3, 7, "0 10 20 30 40 50 60 70 80 90 100"},
	} {
		a := c.axis.ends(c.lowest, c.highest, 10)
		var got []string
		for _, x := range a.across(600) {
			if x.label != "" {
				got = append(got, x.label)
			}
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%s: %s, want %s", c.name, strings.Join(got, " "), c.want)
		}
		if a.From > c.lowest || a.To < c.highest {
			t.Errorf("%s: from %v to %v", c.name, a.From, a.To)
		}
	}
}

func TestWrap(t *testing.T) {
	for _, c := range []struct {
		text  string
		limit float64
		lines int
		want  []string
	}{
		{"short", 100, 2, []string{"short"}},
		{"two words of it", 80, 2, []string{"two words", "of it"}},
		{"one-long-model-name", 90, 2, []string{"one-long-", "model-name"}},
		{"one-long-model-name", 90, 1, []string{"one-long…"}},
		{"unbreakablebutlong", 60, 3, []string{"unbre…"}},
		{"µµµµµµµµµµµµ", 30, 1, []string{"µ…"}},
		{"", 60, 3, []string{""}},
	} {
		got := wrap(c.text, 13, c.limit, c.lines)
		for _, line := range got {
			if width(line, 13) > c.limit {
				t.Errorf("%q: %q is %v wide", c.text, line, width(line, 13))
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%q in %v: %q, want %q", c.text, c.limit, got, c.want)
		}
	}
}
