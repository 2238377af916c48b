package offload

import (
	"log/slog"
	"time"

	"github.com/moeserve/moeserve/device"
)

// warnInterval is the least time between two warnings of one kind: a disk that is full would
// cause one in each step.
const warnInterval = 10 * time.Second

// limitedLog logs the first warning of a kind in each interval.
type limitedLog struct {
	machine device.Machine // for the time
	out     *slog.Logger
	kinds   map[string]*warning // by message
}

// warning is what was logged of one kind.
type warning struct {
	next    time.Duration
	skipped int
}

func newLimitedLog(o Options) *limitedLog {
	return &limitedLog{machine: o.Machine, out: o.Log, kinds: map[string]*warning{}}
}

// Warn logs a warning, with the number of those of its kind that were not.
func (l *limitedLog) Warn(message string, args ...any) {
	w := l.kinds[message]
	if w == nil {
		w = &warning{next: -1}
		l.kinds[message] = w
	}
	now := l.machine.Now()
	if now < w.next {
		w.skipped++
		return
	}
	if w.skipped > 0 {
		args = append(args, "not_logged", w.skipped)
	}
	w.next, w.skipped = now+warnInterval, 0
	l.out.Warn(message, args...)
}
