package metrics

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// Desc is a metric's name, help and labels. All series of a name have the same Desc.
type Desc struct {
	name, help string
	variable   []string // names of labels whose values come with each series
	constant   []label
}

type label struct{ name, value string }

// NewDesc describes a metric. A series of it gives a value for each of the labels, in their order.
func NewDesc(name, help string, labels ...string) *Desc {
	return &Desc{name: name, help: help, variable: labels}
}

// With is the same metric with a label that all its series have.
func (d *Desc) With(name, value string) *Desc {
	w := *d
	w.constant = append(slices.Clone(d.constant), label{name, value})
	return &w
}

// labels of a series, by name.
func (d *Desc) labels(values []string) []label {
	if len(values) != len(d.variable) {
		panic(fmt.Sprintf("metrics: %s has the labels %v, and was given the values %q", d.name, d.variable, values))
	}
	all := slices.Clone(d.constant)
	for i, v := range values {
		all = append(all, label{d.variable[i], v})
	}
	for i := range all {
		all[i].value = strings.ToValidUTF8(all[i].value, "\uFFFD") // as the format has it
	}
	slices.SortFunc(all, func(a, b label) int { return strings.Compare(a.name, b.name) })
	return all
}

// Collector has metrics.
type Collector interface {
	// Collect hands over the metrics as they are now. It may be called by several goroutines at a time.
	Collect(to *Sink)
}

// Counter counts up. It is a Collector.
type Counter struct {
	desc   *Desc
	values []string // of its labels
	n      atomic.Uint64
}

// NewCounter makes a counter at 0, with the values of its labels.
func NewCounter(d *Desc, values ...string) *Counter { return &Counter{desc: d, values: values} }

// Add counts n, which is not negative.
func (c *Counter) Add(n int) {
	if n < 0 {
		panic(fmt.Sprintf("metrics: %s cannot go down, by %d", c.desc.name, n))
	}
	c.n.Add(uint64(n))
}

// Collect implements Collector.
func (c *Counter) Collect(to *Sink) { to.Counter(c.desc, float64(c.n.Load()), c.values...) }

// Counters are counters of one metric, one for each value of its label. They are a Collector.
type Counters struct {
	desc *Desc
	mu   sync.Mutex
	by   map[string]*Counter
}

// NewCounters makes the counters of a metric with one label, at 0 for these values of it:
// what is not there yet has no rate.
func NewCounters(d *Desc, values ...string) *Counters {
	c := &Counters{desc: d, by: map[string]*Counter{}}
	for _, v := range values {
		c.Of(v)
	}
	return c
}

// Of is the counter of a label's value.
func (c *Counters) Of(value string) *Counter {
	c.mu.Lock()
	defer c.mu.Unlock()
	one, ok := c.by[value]
	if !ok {
		one = NewCounter(c.desc, value)
		c.by[value] = one
	}
	return one
}

// Collect implements Collector.
func (c *Counters) Collect(to *Sink) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, one := range c.by {
		one.Collect(to)
	}
}

// Histogram counts observations by size. It is a Collector.
type Histogram struct {
	desc   *Desc
	bounds []float64

	mu     sync.Mutex
	counts []uint64 // of observations up to each bound and above the one before, and above all
	sum    float64
}

// NewHistogram makes an empty histogram with these upper bounds of its buckets, which rise; a
// last bucket without a bound is added.
func NewHistogram(d *Desc, bounds []float64) *Histogram {
	for i := range bounds {
		if i > 0 && !(bounds[i-1] < bounds[i]) || math.IsInf(bounds[i], 0) {
			panic(fmt.Sprintf("metrics: the bounds of %s do not rise, or are infinite: %v", d.name, bounds))
		}
	}
	return &Histogram{desc: d, bounds: bounds, counts: make([]uint64, len(bounds)+1)}
}

// Observe counts v.
func (h *Histogram) Observe(v float64) {
	i, _ := slices.BinarySearch(h.bounds, v) // the first bound that is not below v
	if math.IsNaN(v) {
		i = len(h.bounds)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.counts[i]++
	h.sum += v
}

// Collect implements Collector.
func (h *Histogram) Collect(to *Sink) {
	h.mu.Lock()
	defer h.mu.Unlock()
	to.Histogram(h.desc, h.bounds, h.counts, h.sum)
}
