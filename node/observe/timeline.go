package observe

import (
	"cmp"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/transfer"
)

// Timeline is what the compute stream and each link did in a step.
type Timeline struct {
	// Begin of the step, on a clock that all steps share.
	Begin int64 `json:"begin_ns"`
	// Duration of the step. In a step that was run again it is the last try.
	Duration int64 `json:"duration_ns"`
	// Stalls of the compute stream, by cause, in order; the rest is computing.
	Stalls []Span `json:"stalls"`
	// Links that have copied something since the step before.
	Links []LinkTimeline `json:"links"`
}

// LinkTimeline is when a link copied.
type LinkTimeline struct {
	Source      string `json:"src"`
	Destination string `json:"dst"`
	// Copies by purpose, in order of their ends. They may have begun before the step.
	Copies []Span `json:"copies"`
}

// Span is a part of a step's time, from its begin on.
type Span struct {
	// For is the cause of a stall, or the purpose of copies.
	For  string `json:"for"`
	From int64  `json:"from_ns"`
	To   int64  `json:"to_ns"`
}

const (
	// timelineSteps is how many consecutive steps have a timeline, at most, in each timelineInterval.
	timelineSteps    = 16
	timelineInterval = time.Second
	// timelineParts: a gap between two spans for the same that is shorter than this part of the step is not shown.
	timelineParts = 500
)

// recorder makes the timelines of some steps. Its buffers are used again.
type recorder struct {
	began    time.Duration // of the first of the present steps
	steps    int
	activity []transfer.Activity
	stalls   []pipeline.Stall
}

// step returns the timeline of the step that has just ended; nil: it has none. follows: that of the step before was
// asked for, too.
func (r *recorder) step(p *Parts, follows bool) *Timeline {
	var complete bool
	var err error
	r.activity, complete = p.Transfer.Activity(r.activity[:0])
	now := p.Machine.Now()
	if r.steps == 0 || now-r.began >= timelineInterval {
		r.began, r.steps = now, 0
	}
	if r.steps++; !complete || !follows || r.steps > timelineSteps {
		return nil
	}
	var began, ended time.Duration
	if began, ended, r.stalls, err = p.Pipeline.LatestStep(r.stalls[:0]); err != nil {
		return nil
	}
	return timeline(began, ended, r.stalls, r.activity)
}

// timeline describes a step by the stalls and the copies within it.
func timeline(began, ended time.Duration, stalls []pipeline.Stall, copies []transfer.Activity) *Timeline {
	t := &Timeline{Begin: began.Nanoseconds(), Duration: (ended - began).Nanoseconds(), Stalls: []Span{}, Links: []LinkTimeline{}}
	gap := t.Duration / timelineParts
	for _, s := range stalls {
		t.Stalls = extend(t.Stalls, Span{s.Cause.String(), (s.Begin - began).Nanoseconds(), (s.End - began).Nanoseconds()}, gap)
	}
	pairs := map[device.Pair][]Span{}
	for _, c := range copies {
		pair := device.Pair{From: c.From, To: c.To}
		pairs[pair] = extend(pairs[pair], Span{c.Priority.String(), (c.Begin - began).Nanoseconds(), (c.End - began).Nanoseconds()}, gap)
	}
	for pair, spans := range pairs {
		t.Links = append(t.Links, LinkTimeline{pair.From.String(), pair.To.String(), spans})
	}
	slices.SortFunc(t.Links, func(a, b LinkTimeline) int {
		return cmp.Or(cmp.Compare(a.Source, b.Source), cmp.Compare(a.Destination, b.Destination))
	})
	return t
}

// extend appends a span, or lets the last one go on where it is for the same and the gap is short.
func extend(all []Span, s Span, gap int64) []Span {
	if n := len(all); n > 0 && all[n-1].For == s.For && s.From-all[n-1].To <= gap {
		all[n-1].To = max(all[n-1].To, s.To)
		return all
	}
	return append(all, s)
}
