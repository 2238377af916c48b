package transfer

import (
	"time"

	"github.com/moeserve/moeserve/device"
)

// Activity is when a link copied chunks of one priority, one after the other.
type Activity struct {
	From, To device.Space
	// Priority that the copies had when the chunks had landed.
	Priority Priority
	// Begin and End on the machine's clock, as the host saw them: from when the first chunk was enqueued, or the one
	// before it had landed, until the host knew that the last one had landed.
	Begin, End time.Duration
}

// maxActivity is how many of them are kept for the next call of Engine.Activity.
const maxActivity = 4096

// activity is what links do, while somebody wants to know. The engine's lock guards it.
type activity struct {
	on    bool
	since time.Duration
	all   []Activity
}

// Activity appends to buffer what links have copied since the last call, that of each link in order.
// False: that is not known, or not all of it. Chunks are recorded from the first call on, and while the
// calls keep up with them: what is recorded stops after maxActivity times that a link idled or changed its priority
// without a call, and begins again with the next one. Otherwise copies cost the same as without it.
func (e *Engine) Activity(buffer []Activity) ([]Activity, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	a := &e.activity
	complete := a.on
	if buffer = append(buffer, a.all...); !a.on {
		a.on, a.since = true, e.o.Machine.Now()
	}
	if a.all == nil {
		a.all = make([]Activity, 0, maxActivity)
	}
	a.all = a.all[:0]
	return buffer, complete
}

// launched notes that a chunk was enqueued in a slot.
func (a *activity) launched(l *link, i int) {
	if a.on {
		l.slots[i].began = l.engine.o.Machine.Now()
	}
}

// landed records the chunk of a slot. Hops are no links of their own.
func (a *activity) landed(l *link, i int) {
	if !a.on || l.hop {
		return
	}
	now, s := l.engine.o.Machine.Now(), &l.slots[i]
	next := Activity{l.pair.From, l.pair.To, Priority(s.chunk.Request.Class), min(max(s.began, l.landedAt, a.since), now), now}
	l.landedAt = now
	if l.recorded < len(a.all) && a.all[l.recorded].goesOn(next) {
		a.all[l.recorded].End = now
		return
	}
	if len(a.all) == maxActivity {
		a.on = false
		return
	}
	l.recorded = len(a.all)
	a.all = append(a.all, next)
}

// goesOn reports whether the link of a has copied for the same, without a pause, in next.
func (a *Activity) goesOn(next Activity) bool {
	return a.From == next.From && a.To == next.To && a.Priority == next.Priority && a.End == next.Begin
}
