package devices

import (
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
)

// ownWindow is the time over which own copies are averaged: as long as the driver averages
// what it reports.
const ownWindow = time.Second

// ownLoad is the fraction of the time in which own copies read or write a peer's memory. The
// driver counts this time as the memory's utilization, whoever copies.
type ownLoad struct {
	// busy is the total duration of copies from and to a peer so far. nil: none.
	busy func(device.Space) time.Duration

	mu      sync.Mutex
	samples map[device.Space][]loadSample
}

type loadSample struct{ at, busy time.Duration }

// fraction takes a sample at the time now, and returns the mean of the window before it.
func (o *ownLoad) fraction(p device.Space, now time.Duration) float64 {
	if o.busy == nil {
		return 0
	}
	busy := o.busy(p)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.samples == nil {
		o.samples = map[device.Space][]loadSample{}
	}
	s := append(o.samples[p], loadSample{now, busy})
	for len(s) > 2 && now-s[1].at >= ownWindow {
		s = s[1:]
	}
	o.samples[p] = s
	if now <= s[0].at {
		return 0
	}
	return min((busy-s[0].busy).Seconds()/(now-s[0].at).Seconds(), 1)
}
