package harvest

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

func TestCost(t *testing.T) {
	for _, c := range []struct {
		rate  float64
		saved time.Duration
		want  time.Duration
	}{
		{0.5, 2 * time.Millisecond, 10 * time.Millisecond},
		{0, time.Second, 0},
		{1, -time.Second, 0},
		{math.NaN(), time.Second, 0},
		{math.Inf(1), time.Second, maxCost},
	} {
		if got := Cost(c.rate, c.saved); got != c.want {
			t.Errorf("%g uses per second that save %v each: %v, want %v", c.rate, c.saved, got, c.want)
		}
	}
}

// TestReuse: the rate is near the true one, follows a change within a few seconds, and stays over
// a pause.
func TestReuse(t *testing.T) {
	var r Reuse
	rng := rand.New(rand.NewPCG(1, 2))
	var now time.Duration
	uses := int64(0)
	run := func(d time.Duration, objects int, rate float64) {
		const dt = 100 * time.Millisecond
		for end := now + d; now < end; {
			now += dt
			for range objects {
				if rng.Float64() < rate*dt.Seconds() {
					uses++
				}
			}
			r.Observe(uses, float64(objects), now)
		}
	}
	near := func(when string, want float64) {
		t.Helper()
		if got := r.PerSecond(); math.Abs(got-want) > 0.3*want {
			t.Errorf("%s: %.3f uses per second of an object, want about %.3f", when, got, want)
		}
	}
	if got := r.PerSecond(); got != 0 {
		t.Errorf("%g before any use", got)
	}
	run(10*time.Second, 1000, 0.1)
	near("at first", 0.1)
	run(10*time.Second, 200, 0.1)
	near("with fewer objects", 0.1)
	run(4*time.Second, 1000, 0.5)
	near("used more", 0.5)
	run(15*time.Second, 1000, 0.05)
	near("used less", 0.05)
	now += 12 * time.Hour
	run(100*time.Millisecond, 1000, 0.05)
	if got := r.PerSecond(); got < 0.02 {
		t.Errorf("%g after a night", got)
	}
}
