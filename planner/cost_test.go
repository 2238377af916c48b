//go:build unix

package planner

import (
	"syscall"
	"testing"
	"time"
)

// TestSearchCost: for no preset of a model and of hardware a search takes more than
// 25,000 predictions do: where one takes 5 us, 125 ms.
func TestSearchCost(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector slows one down more than the other")
	}
	const most = 25_000
	for _, hardware := range hardwareNames {
		for _, model := range modelNames {
			p := problem(t, model, hardware)
			r, err := p.Search(Choices{})
			if err != nil {
				continue // TestSearch
			}
			search := cost(t, func() { _, _ = p.Search(Choices{}) })
			prediction := cost(t, func() { _, _ = p.Predict(r.Policy) })
			if n := search / prediction; n > most {
				t.Errorf("%s on %s: a search takes %v, as %.0f predictions do, more than %d", model, hardware, time.Duration(search), n, most)
			}
		}
	}
}

// cost is the processor time that f takes, in nanoseconds, on average over runs that are
// long enough for any clock. Unlike the time that goes by, others on the machine do not
// add to it.
func cost(t *testing.T, f func()) float64 {
	t.Helper()
	used := func() time.Duration {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	start := used()
	for n := 1; ; n++ {
		f()
		if d := used() - start; d >= 50*time.Millisecond {
			return float64(d) / float64(n)
		}
	}
}
