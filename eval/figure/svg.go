package figure

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// svg is a picture being written.
type svg struct{ bytes.Buffer }

// svg writes the scene with the colors for light pages as attributes, which every viewer
// understands, and those for dark ones in a style sheet.
func (s *scene) svg(out io.Writer) error {
	var w svg
	fmt.Fprintf(&w, `<svg xmlns="http://www.w3.org/2000/svg" width="%s" height="%s" viewBox="0 0 %[1]s %[2]s" role="img" font-family="%s">`+"\n",
		pixels(s.width), pixels(s.height), fonts)
	fmt.Fprintf(&w, "<title>%s</title>\n<desc>%s</desc>\n", escape(s.title), escape(s.about))
	w.WriteString("<style>@media (prefers-color-scheme: dark) {\n")
	for p := range paints {
		fmt.Fprintf(&w, ".%s { fill: %s } .%[3]s { stroke: %[2]s }\n", filled(p), hex(dark[p]), stroked(p))
	}
	w.WriteString("}</style>\n")
	fmt.Fprintf(&w, "<rect width=\"%s\" height=\"%s\" rx=\"6\"%s/>\n", pixels(s.width), pixels(s.height), fill(ground))
	for _, x := range s.shapes {
		x.writeSVG(&w)
	}
	w.WriteString("</svg>\n")
	_, err := w.WriteTo(out)
	return err
}

func (x *stroke) writeSVG(w *svg) {
	fmt.Fprintf(w, `<path d="%s" class="%s" fill="none" stroke="%s" stroke-width="%s" stroke-linejoin="round"`,
		path(x.points), stroked(x.paint), hex(light[x.paint]), pixels(x.width))
	if len(x.dash) > 0 {
		lengths := make([]string, len(x.dash))
		for i, d := range x.dash {
			lengths[i] = pixels(d)
		}
		fmt.Fprintf(w, ` stroke-dasharray="%s"`, strings.Join(lengths, " "))
	}
	w.WriteString("/>\n")
}

func (x *area) writeSVG(w *svg) {
	fmt.Fprintf(w, "<path d=\"%sZ\"%s/>\n", path(x.points), fill(x.paint))
}

func (x *label) writeSVG(w *svg) {
	fmt.Fprintf(w, `<text x="%s" y="%s" font-size="%s"%s`, pixels(x.at.x), pixels(x.at.y), pixels(x.size), fill(x.paint))
	if x.anchor != start {
		fmt.Fprintf(w, ` text-anchor="%s"`, map[anchor]string{middle: "middle", end: "end"}[x.anchor])
	}
	if x.turned {
		fmt.Fprintf(w, ` transform="rotate(-90 %s %s)"`, pixels(x.at.x), pixels(x.at.y))
	}
	fmt.Fprintf(w, ">%s</text>\n", escape(x.text))
}

// path is the points as the data of a path element.
func path(points []point) string {
	var b strings.Builder
	for i, p := range points {
		b.WriteByte("ML"[min(i, 1)])
		b.WriteString(pixels(p.x))
		b.WriteByte(' ')
		b.WriteString(pixels(p.y))
	}
	return b.String()
}

// The classes by which the style sheet finds what has a color.
func filled(p paint) string  { return "f" + strconv.Itoa(int(p)) }
func stroked(p paint) string { return "s" + strconv.Itoa(int(p)) }

func fill(p paint) string { return fmt.Sprintf(` class="%s" fill="%s"`, filled(p), hex(light[p])) }

func hex(c rgb) string { return fmt.Sprintf("#%06x", uint32(c)) }

// pixels writes a length with up to two decimal places.
func pixels(v float64) string {
	s := strconv.FormatFloat(v, 'f', 2, 64)
	s = strings.TrimRight(strings.TrimRight(s, "0"), ".")
	if s == "-0" {
		return "0"
	}
	return s
}

func escape(s string) string {
	var b bytes.Buffer
	xml.EscapeText(&b, []byte(s)) //nolint:errcheck // a buffer takes all
	return b.String()
}
