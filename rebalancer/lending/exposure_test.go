package lending

import (
	"math"
	"testing"
	"time"
)

// TestExposure: a copy more is waited for where compute waits for a noticeable share of copies, and
// the link's load is the share of time in which it copies. A moment in which copies are taken back
// does not hide them.
func TestExposure(t *testing.T) {
	for _, c := range []struct {
		name           string
		waited, copied float64 // per second
		back           float64 // copies taken back at the end, in seconds
		exposed, load  float64
	}{
		{"nothing is copied", 0, 0, 0, 0, 0},
		{"all is hidden", 0, 0.5, 0, 0, 0.5},
		{"a little is waited for", 0.0125, 0.5, 0, 0.5, 0.5},
		{"half is", 0.5, 1, 0, 1, 1},
		{"and some are skipped", 0.5, 1, 0.3, 1, 1},
	} {
		var e exposure
		waited, copied := 0.0, 0.0
		for now := time.Duration(0); now < time.Minute; now += 100 * time.Millisecond {
			e.observe(waited, copied, now)
			waited, copied = waited+c.waited/10, copied+c.copied/10
		}
		if c.back > 0 {
			e.observe(waited, copied-c.back, time.Minute)
		}
		if math.Abs(e.exposed()-c.exposed) > 0.02 || math.Abs(e.load()-c.load) > 0.02 {
			t.Errorf("%s: %.2f exposed, a load of %.2f; want %.2f and %.2f", c.name, e.exposed(), e.load(), c.exposed, c.load)
		}
	}
}
