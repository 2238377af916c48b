//go:build cuda

package cuda

import "time"

// A thread that sleeps until a watch is due wakes wakeEarly before, since a sleep ends late. It sleeps for
// maxDoze at most: device.Due may change meanwhile, and a helper may wait for what no watch brings about. A
// sleep of less than shortNap is not worth its system calls.
const (
	wakeEarly = 20 * time.Microsecond
	maxDoze   = time.Millisecond
)

// outlook is what a look has learned of the watches that are left: when the next one can be over.
type outlook struct {
	// open: one of them can be over now. due is the latest device.Due of those that can; 0:
	// none has one.
	open bool
	due  time.Duration
	// next is the earliest of the others; 0: there are none.
	next time.Duration
}

// now notes a watch that can be over.
func (o *outlook) now(due time.Duration) { o.open, o.due = true, max(o.due, due) }

// later notes a watch that cannot be over before it is due.
func (o *outlook) later(due time.Duration) {
	if o.next == 0 || due < o.next {
		o.next = due
	}
}

// doze is how long a thread may sleep since no watch can be over; 0: it may not.
func (o *outlook) doze(now time.Duration) time.Duration {
	if o.open || o.next == 0 {
		return 0
	}
	return o.before(now)
}

// rest is how long the stream's thread sleeps before the next look; 0: it polls. changed is when a watch
// was last added or removed. It polls for spinFor from the latest change on, or from the time on at which
// the latest watch was due, then sleeps for watchNap at most. Before the next watch is due it polls again.
func (o *outlook) rest(now, changed time.Duration) time.Duration {
	if !o.open && o.next > 0 {
		return o.before(now)
	}
	waited := now - max(changed, o.due)
	if waited < spinFor {
		return 0
	}
	nap := min(watchNap, max(shortNap, waited/napShare))
	if o.next > 0 {
		nap = min(nap, o.before(now))
	}
	return nap
}

// before is a sleep that ends before the next watch is due; 0: there is no time for one.
func (o *outlook) before(now time.Duration) time.Duration {
	d := o.next - wakeEarly - now
	if d < shortNap {
		return 0
	}
	return min(d, maxDoze)
}
