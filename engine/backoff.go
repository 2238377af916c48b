package engine

import "time"

// Pauses before a failed step runs again double from the first to the last of these.
const (
	minPause = 5 * time.Millisecond
	maxPause = 2 * time.Second
)

// backoff says how long to wait between two attempts of a step.
type backoff struct {
	// limit of all pauses together, and those so far.
	limit, spent time.Duration
	last         time.Duration
}

// next is the next pause. It is not ok where the limit is reached.
func (b *backoff) next() (pause time.Duration, ok bool) {
	pause = min(max(2*b.last, minPause), maxPause, b.limit-b.spent)
	if pause <= 0 {
		return 0, false
	}
	b.last = pause
	b.spent += pause
	return pause, true
}
