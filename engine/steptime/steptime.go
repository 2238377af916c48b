package steptime

import (
	"math"
	"slices"

	"github.com/moeserve/moeserve/engine/scheduler"
)

// Options of a Pace.
type Options struct {
	// Predict is the time of a step, in seconds, before any was measured; its shape counts, as
	// measurements correct it. Default: proportional to its tokens, from 64 on.
	Predict func(scheduler.Mix) float64
	// MaxSeconds is the maximum time of a step that decodes, as far as prompts make it long.
	// 0: it is chosen (see the package's comment).
	MaxSeconds float64
	// StepTokens is the maximum number of tokens of a step.
	StepTokens int
}

// EnsureDefaults returns o with its defaults filled in.
func (o Options) EnsureDefaults() Options {
	if o.Predict == nil {
		o.Predict = func(m scheduler.Mix) float64 { return 1e-6 * float64(max(64, m.Decodes+m.Prompt)) }
	}
	return o
}

const (
	// share of MaxSeconds that is planned for, as steps vary.
	share = 0.9
	// decodeTimes is by how much prompts may lengthen a step that decodes, without MaxSeconds.
	decodeTimes = 2
	// promptRate is the part of the rate of prompts in steps of their own that they are given
	// where that is more.
	promptRate = 0.5
	// minTokens of prompts are in every step, if so many are left to compute. nearlyFree is how much
	// longer a step may take for having more, where it takes too long in any case.
	minTokens  = 64
	nearlyFree = 1.1
	// remembered is after how many steps with fewer prompt tokens a measurement is forgotten.
	remembered = 256
)

// Pace predicts steps and limits their prompt tokens. It implements scheduler.Pace and
// engine.Pace. One goroutine uses it.
type Pace struct {
	o Options
	// decodes and mixed are the corrections of steps without and with prompts.
	decodes, mixed corrections
	steps          int64 // measured with prompts
}

// New returns a Pace that has measured nothing.
func New(o Options) *Pace { return &Pace{o: o.EnsureDefaults()} }

// Seconds predicts the time of a step.
func (p *Pace) Seconds(m scheduler.Mix) float64 {
	at := position(m)
	c, measured := p.table(m).at(at)
	if !measured && m.Prompt > 0 {
		c, _ = p.decodes.at(at)
	}
	return p.o.Predict(m) * math.Exp(c)
}

// Measured records how long a step took, in seconds.
func (p *Pace) Measured(m scheduler.Mix, seconds float64) {
	predicted := p.o.Predict(m)
	if !(seconds > 0) || !(predicted > 0) {
		return // a clock that stands still, or an empty step
	}
	bucket := min(int(position(m)+0.5), buckets-1)
	t := p.table(m)
	t[bucket].add(math.Log(seconds/predicted), p.steps)
	if m.Prompt == 0 {
		return
	}
	p.steps++
	for i := range t[bucket+1:] {
		if x := &t[bucket+1+i]; x.count > 0 && p.steps-x.last > remembered {
			*x = correction{}
		}
	}
}

// PromptTokens implements scheduler.Pace.
func (p *Pace) PromptTokens(m scheduler.Mix, most int) int {
	if most <= minTokens || m.Decodes == 0 {
		return most
	}
	alone, least := m, m
	alone.Prompt, least.Prompt = 0, minTokens
	// Steps of any number of prompt tokens may take longer than they should.
	short := p.Seconds(least)
	if bound := p.o.MaxSeconds; bound > 0 {
		if short > bound {
			return p.within(m, nearlyFree*short, most)
		}
		return p.within(m, share*bound, most)
	}
	return max(p.within(m, max(decodeTimes*p.Seconds(alone), nearlyFree*short), most), p.worthwhile(m.PromptContext, most))
}

// within is the maximum number of prompt tokens with which a step takes no longer, at least
// minTokens.
func (p *Pace) within(m scheduler.Mix, seconds float64, most int) int {
	return search(minTokens, most, func(n int) bool {
		m.Prompt = n
		return p.Seconds(m) <= seconds
	})
}

// worthwhile is the number of prompt tokens from which on they have promptRate of the rate of the
// largest step, or most.
func (p *Pace) worthwhile(context, most int) int {
	rate := func(n int) float64 {
		return float64(n) / p.Seconds(scheduler.Mix{Prompt: n, PromptContext: context})
	}
	want := promptRate * rate(max(p.o.StepTokens, most))
	return search(minTokens, most, func(n int) bool { return rate(n) < want })
}

// search is the largest n from low to high for which ok holds, as it does up to some n; low where
// it holds for none.
func search(low, high int, ok func(n int) bool) int {
	for low < high {
		if middle := low + (high-low+1)/2; ok(middle) {
			low = middle
		} else {
			high = middle - 1
		}
	}
	return low
}

func (p *Pace) table(m scheduler.Mix) *corrections {
	if m.Prompt > 0 {
		return &p.mixed
	}
	return &p.decodes
}

// buckets is the number of sizes of steps, two to an octave, that are told apart.
const buckets = 50

// position is the place of a step's number of tokens in a table: the middle of bucket i is at i.
func position(m scheduler.Mix) float64 {
	return 2 * math.Log2(float64(max(1, m.Decodes+m.Prompt)))
}

// corrections are logarithms of measured over predicted times, by the number of tokens.
type corrections [buckets]correction

// at is the correction at a position, interpolated between the nearest measured ones; measured is
// false where there is none.
func (t *corrections) at(position float64) (c float64, measured bool) {
	below := min(int(position), buckets-1)
	above := below + 1
	for below >= 0 && t[below].count == 0 {
		below--
	}
	for above < buckets && t[above].count == 0 {
		above++
	}
	switch {
	case below < 0 && above == buckets:
		return 0, false
	case below < 0:
		return t[above].median, true
	case above == buckets:
		return t[below].median, true
	}
	part := (position - float64(below)) / float64(above-below)
	return t[below].median + part*(t[above].median-t[below].median), true
}

// correction is the median of the latest measurements.
type correction struct {
	latest [8]float64
	count  int // measured, at most as many as are kept
	next   int
	median float64
	last   int64 // step of the latest
}

func (c *correction) add(x float64, step int64) {
	c.latest[c.next] = x
	c.next = (c.next + 1) % len(c.latest)
	c.count, c.last = min(c.count+1, len(c.latest)), step
	sorted := c.latest // a copy
	slices.Sort(sorted[:c.count])
	// The lower one of two: what disturbs a step makes it slow.
	c.median = sorted[(c.count-1)/2]
}
