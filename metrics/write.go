package metrics

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// ContentType is what Write writes.
const ContentType = "text/plain; version=0.0.4; charset=utf-8"

type kind string

const (
	counter   kind = "counter"
	gauge     kind = "gauge"
	histogram kind = "histogram"
	summary   kind = "summary"
)

// Sink takes what collectors read.
type Sink struct {
	families map[string]*family
	err      error // the first
}

// family is all series of a name.
type family struct {
	desc   *Desc
	kind   kind
	series []series
}

type series struct {
	labels       []label
	value        float64 // of a counter or a gauge
	distribution         // of a histogram or a summary
}

// distribution is how observations lie: counts up to each bound, or values at quantiles.
type distribution struct {
	points []point
	sum    float64
	count  uint64
}

type point struct{ at, value float64 }

// Counter takes a counter's value, with the values of its labels.
func (s *Sink) Counter(d *Desc, v float64, values ...string) {
	s.add(d, counter, series{labels: d.labels(values), value: v})
}

// Gauge takes a gauge's value, with the values of its labels.
func (s *Sink) Gauge(d *Desc, v float64, values ...string) {
	s.add(d, gauge, series{labels: d.labels(values), value: v})
}

// Histogram takes the numbers of observations up to each bound and above the one before, with a last
// one of those above all bounds, and their sum, with the values of its labels.
func (s *Sink) Histogram(d *Desc, bounds []float64, counts []uint64, sum float64, values ...string) {
	one := series{labels: d.labels(values), distribution: distribution{points: make([]point, 0, len(counts)), sum: sum}}
	for i, n := range counts {
		one.count += n
		at := math.Inf(1)
		if i < len(bounds) {
			at = bounds[i]
		}
		one.points = append(one.points, point{at, float64(one.count)})
	}
	s.add(d, histogram, one)
}

func (s *Sink) add(d *Desc, k kind, one series) {
	f, ok := s.families[d.name]
	if !ok {
		f = &family{desc: d, kind: k}
		s.families[d.name] = f
	}
	if f.kind != k || f.desc.help != d.help {
		s.fail(fmt.Errorf("metrics: %s is a %s (%s) and a %s (%s)", d.name, f.kind, f.desc.help, k, d.help))
		return
	}
	if one.labels == nil {
		one.labels = d.labels(nil)
	}
	f.series = append(f.series, one)
}

// labeled is a collector whose series get a label.
type labeled struct {
	of    Collector
	label label
}

// WithLabel returns a collector whose series have a label more, but for those that have one of that
// name.
func WithLabel(c Collector, name, value string) Collector { return labeled{c, label{name, value}} }

// Collect implements Collector.
func (l labeled) Collect(to *Sink) {
	own := &Sink{families: map[string]*family{}}
	l.of.Collect(own)
	if own.err != nil {
		to.fail(own.err)
	}
	for _, f := range own.families {
		for _, one := range f.series {
			if !slices.ContainsFunc(one.labels, func(x label) bool { return x.name == l.label.name }) {
				one.labels = append(slices.Clone(one.labels), l.label)
				slices.SortFunc(one.labels, func(a, b label) int { return strings.Compare(a.name, b.name) })
			}
			to.add(f.desc, f.kind, one)
		}
	}
}

func (s *Sink) fail(err error) { s.err = cmp.Or(s.err, err) }

// Write writes the metrics of all collectors. A name that has two meanings, or a series that is
// there twice, is an error, and then nothing is written.
func Write(w io.Writer, collectors ...Collector) error {
	s := &Sink{families: map[string]*family{}}
	for _, c := range collectors {
		c.Collect(s)
	}
	var text []byte
	for _, name := range slices.Sorted(maps.Keys(s.families)) {
		f := s.families[name]
		slices.SortStableFunc(f.series, compare)
		for i := 1; i < len(f.series); i++ {
			if slices.Equal(f.series[i-1].labels, f.series[i].labels) {
				s.fail(fmt.Errorf("metrics: %s is there twice with the labels %v", name, f.series[i].labels))
			}
		}
		text = f.append(text)
	}
	if s.err != nil {
		return s.err
	}
	_, err := w.Write(text)
	return err
}

// compare orders series by their labels' values.
func compare(a, b series) int {
	return slices.CompareFunc(a.labels, b.labels, func(a, b label) int {
		return cmp.Or(strings.Compare(a.value, b.value), strings.Compare(a.name, b.name))
	})
}

var (
	helpText  = strings.NewReplacer(`\`, `\\`, "\n", `\n`)
	labelText = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)
)

func (f *family) append(text []byte) []byte {
	name := f.desc.name
	text = fmt.Appendf(text, "# HELP %s %s\n# TYPE %s %s\n", name, helpText.Replace(f.desc.help), name, f.kind)
	for i := range f.series {
		s := &f.series[i]
		suffix, at := "", ""
		switch f.kind {
		case counter, gauge:
			text = appendFloat(appendSeries(text, name, s.labels), s.value)
			continue
		case histogram:
			suffix, at = "_bucket", "le"
		case summary:
			at = "quantile"
		}
		for _, p := range s.points {
			labels := append(slices.Clip(s.labels), label{at, string(formatFloat(nil, p.at))})
			text = appendFloat(appendSeries(text, name+suffix, labels), p.value)
		}
		text = appendFloat(appendSeries(text, name+"_sum", s.labels), s.sum)
		text = appendFloat(appendSeries(text, name+"_count", s.labels), float64(s.count))
	}
	return text
}

func appendSeries(text []byte, name string, labels []label) []byte {
	text = append(text, name...)
	for i, l := range labels {
		before := byte(',')
		if i == 0 {
			before = '{'
		}
		text = append(text, before)
		text = append(text, l.name...)
		text = append(text, `="`...)
		text = append(text, labelText.Replace(l.value)...)
		text = append(text, '"')
	}
	if len(labels) > 0 {
		text = append(text, '}')
	}
	return append(text, ' ')
}

func appendFloat(text []byte, v float64) []byte { return append(formatFloat(text, v), '\n') }

func formatFloat(text []byte, v float64) []byte {
	switch {
	case math.IsInf(v, 1):
		return append(text, "+Inf"...)
	case math.IsInf(v, -1):
		return append(text, "-Inf"...)
	}
	return strconv.AppendFloat(text, v, 'g', -1, 64)
}
