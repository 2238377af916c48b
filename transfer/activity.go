package transfer

import (
	"time"

	"github.com/moeserve/moeserve/device"
)

// Activity is when a link copied one chunk.
type Activity struct {
	From, To device.Space
	// Priority that the copy had when the chunk had landed.
	Priority Priority
	// Begin and End on the machine's clock, as the host saw them: from when the chunk was enqueued, or the one
	// before it had landed, until the host knew that it had landed.
	Begin, End time.Duration
}

// maxActivity is how many chunks are kept for the next call of Engine.Activity.
const maxActivity = 4096

// activity is what links do, while somebody wants to know. The engine's lock guards it.
type activity struct {
	on    bool
	since time.Duration
	all   []Activity
}

// Activity appends to buffer what links have copied since the last call, by the time at which chunks landed.
// False: that is not known, or not all of it. Chunks are recorded from the first call on, and while the
// calls keep up with them: what is recorded stops after maxActivity chunks without a call, and begins again
// with the next one. Otherwise copies cost the same as without it.
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
	if len(a.all) == maxActivity {
		a.on = false
		return
	}
	begin := min(max(s.began, l.landedAt, a.since), now)
	l.landedAt = now
	a.all = append(a.all, Activity{l.pair.From, l.pair.To, Priority(s.chunk.Request.Class), begin, now})
}
