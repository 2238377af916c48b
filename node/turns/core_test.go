package turns_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/moeserve/moeserve/node/turns"
	"github.com/moeserve/moeserve/tools/racedetector"
)

const ms = time.Millisecond

// world simulates models that take turns, on a virtual clock.
type world struct {
	*testing.T
	core   *turns.Core
	limits turns.Limits
	now    time.Duration
	// requests of each model, by arrival: how much they have to compute.
	requests [][]*request
	// slots is how many requests of a model run at a time.
	slots int
	// admitting: the model that is awake takes requests.
	awake     int
	admitting bool
	// under is what is under way, until when; sleep waits for running requests.
	under   turns.Kind
	model   int
	until   time.Duration
	hurried bool
	// switchTime of each half; failures: a sleep or a wake fails with this probability.
	switchTime time.Duration
	failures   float64
	rng        *rand.Rand
	// switches are the times of wakes; worst is the longest wait of a request for its first step.
	switches []time.Duration
	worst    time.Duration
	// asked is since when each model that is not awake has requests, -1: it has none; starved the
	// longest time from then to its wake.
	asked   []time.Duration
	starved time.Duration
	early   int // turns that ended before their time although the model had requests
	began   time.Duration
	busy    time.Duration // when the awake model last had requests
}

type request struct {
	arrived, left time.Duration
	running       bool
	started       bool
}

func newWorld(t *testing.T, models int, l turns.Limits, rng *rand.Rand) *world {
	return &world{
		T: t, core: turns.NewCore(l, models, 0, 0), limits: l.EnsureDefaults(), requests: make([][]*request, models), slots: 4,
		admitting: true, switchTime: 200 * ms, rng: rng,
	}
}

func (w *world) arrive(model int, work time.Duration) {
	w.requests[model] = append(w.requests[model], &request{arrived: w.now, left: work})
}

func (w *world) loads() []turns.Load {
	all := make([]turns.Load, len(w.requests))
	for i, rs := range w.requests {
		for _, r := range rs {
			if r.running {
				all[i].Running++
			} else {
				all[i].Waiting++
			}
		}
	}
	return all
}

// step lets d pass, in which the model that is awake computes, and then carries out a decision.
func (w *world) step(d time.Duration) {
	w.now += d
	if w.awake >= 0 {
		w.compute(d)
	}
	w.advance()
	loads := w.loads()
	for len(w.asked) < len(loads) {
		w.asked = append(w.asked, -1)
	}
	for i, l := range loads {
		switch {
		case i == w.awake || l == (turns.Load{}):
			w.asked[i] = -1
		case w.asked[i] < 0:
			w.asked[i] = w.now
		default:
			w.starved = max(w.starved, w.now-w.asked[i])
		}
	}
	if w.awake >= 0 && loads[w.awake] != (turns.Load{}) {
		w.busy = w.now
	}
	a := w.core.Decide(w.now, loads)
	if a.At >= 0 && a.At < w.now {
		w.Fatalf("at %v the next decision was due at %v", w.now, a.At)
	}
	switch a.Kind {
	case turns.Sleep:
		if w.under != turns.Nothing || a.Model != w.awake {
			w.Fatalf("sleep of %d while %v of %d is under way and %d awake", a.Model, w.under, w.model, w.awake)
		}
		if w.now < w.began+w.limits.Turn && w.now < w.busy+w.limits.Linger {
			w.early++
		}
		w.under, w.model, w.admitting, w.until, w.hurried = turns.Sleep, a.Model, false, -1, false
	case turns.Hurry:
		if w.under != turns.Sleep || w.hurried {
			w.Fatalf("hurry while %v is under way", w.under)
		}
		w.hurried = true
		for _, r := range w.requests[w.model] {
			r.running = false
		}
	case turns.Wake:
		if w.under != turns.Nothing || w.awake >= 0 {
			w.Fatalf("wake of %d while %v is under way and %d awake", a.Model, w.under, w.awake)
		}
		w.under, w.model, w.until = turns.Wake, a.Model, w.now+w.switchTime
	}
}

// advance ends what is under way and due.
func (w *world) advance() {
	fails := w.rng != nil && w.rng.Float64() < w.failures
	switch {
	case w.under == turns.Sleep && w.until < 0:
		if w.loads()[w.model].Running == 0 {
			w.until = w.now + w.switchTime
		}
	case w.under == turns.Sleep && w.now >= w.until:
		w.under = turns.Nothing
		if w.core.Slept(w.now, !fails); fails {
			w.admitting = true
			return
		}
		w.awake = -1
	case w.under == turns.Wake && w.now >= w.until:
		w.under = turns.Nothing
		if w.core.Woken(w.now, !fails); fails {
			return
		}
		w.awake, w.admitting, w.began, w.busy = w.model, true, w.now, w.now
		w.switches = append(w.switches, w.now)
	}
}

// compute lets requests of the model that is awake run.
func (w *world) compute(d time.Duration) {
	rs := w.requests[w.awake]
	running := w.loads()[w.awake].Running
	left := rs[:0]
	for _, r := range rs {
		if !r.running && w.admitting && running < w.slots {
			r.running = true
			running++
			if !r.started {
				r.started = true
				w.worst = max(w.worst, w.now-r.arrived)
			}
		}
		if r.running {
			r.left -= d
		}
		if r.left > 0 {
			left = append(left, r)
		}
	}
	w.requests[w.awake] = left
}

// TestLoneRequests: a request for a model that sleeps is served at once where the other one has been
// idle, and nothing is switched without requests.
func TestLoneRequests(t *testing.T) {
	w := newWorld(t, 2, turns.Limits{Turn: 2 * time.Second}, nil)
	for range 5000 {
		w.step(ms)
	}
	if len(w.switches) > 0 {
		t.Errorf("switched at %v without requests", w.switches)
	}
	w.arrive(1, 50*ms)
	for range 1000 {
		w.step(ms)
	}
	if len(w.switches) != 1 || w.worst > 2*w.switchTime+5*ms {
		t.Errorf("switched at %v; the request waited %v", w.switches, w.worst)
	}
}

// TestFullLoad: two models with requests all the time share the time, in turns, and a request that
// would never end is preempted.
func TestFullLoad(t *testing.T) {
	w := newWorld(t, 2, turns.Limits{Turn: 2 * time.Second}, nil)
	w.arrive(0, time.Hour)
	for i := range 60_000 {
		if i%50 == 0 {
			w.arrive(0, 40*ms)
			w.arrive(1, 40*ms)
		}
		w.step(ms)
	}
	// Model 0's turns end after a second Turn, since one of its requests does not.
	round := 3*w.limits.Turn + 4*w.switchTime
	if n := len(w.switches); n < int(2*time.Minute/2/round)*2-2 || n > int(time.Minute/w.limits.Turn) {
		t.Errorf("%d switches in a minute", n)
	}
	if w.early > 0 || w.worst > round+100*ms {
		t.Errorf("%d turns ended early; a request waited %v", w.early, w.worst)
	}
}

// TestAlternating: clients that send a request to each model as soon as they are answered do not
// cause a switch for each.
func TestAlternating(t *testing.T) {
	w := newWorld(t, 2, turns.Limits{Turn: 2 * time.Second}, nil)
	served, last := 0, [2]int{}
	for range 60_000 {
		for m := range 2 {
			if len(w.requests[m]) == 0 {
				w.arrive(m, 20*ms)
				last[m]++
			}
		}
		w.step(ms)
	}
	served = last[0] + last[1]
	if served < 40*len(w.switches) || w.early > 0 {
		t.Errorf("%d switches for %d requests, %d of them early", len(w.switches), served, w.early)
	}
}

// TestRandom: whatever comes, and whatever fails, no model starves, turns do not end early, and the
// order of sleeps and wakes holds.
func TestRandom(t *testing.T) {
	for seed := range uint64(racedetector.Fewer(200, 4)) {
		rng := rand.New(rand.NewPCG(seed, 1))
		models := 2 + rng.IntN(3)
		l := turns.Limits{Turn: time.Duration(10+rng.IntN(3000)) * ms, Retry: 100 * ms}
		w := newWorld(t, models, l, rng)
		w.switchTime = time.Duration(rng.IntN(500)) * ms
		rates := make([]float64, models)
		for i := range rates {
			rates[i] = rng.Float64() * rng.Float64() / 50
		}
		for range 30_000 {
			for m, rate := range rates {
				if rng.Float64() < rate {
					w.arrive(m, time.Duration(1+rng.IntN(200))*ms)
				}
			}
			w.step(ms)
		}
		if limit := time.Duration(models) * (2*l.Turn + 2*w.switchTime + 10*ms); w.starved > limit {
			t.Errorf("seed %d: one of %d models with requests was not awake for %v, limit %v", seed, models, w.starved, limit)
		}
		if w.early > 0 {
			t.Errorf("seed %d: %d turns of %v ended early", seed, w.early, l.Turn)
		}
	}
}

// TestFailures: after a failed sleep or wake others are tried, and it goes on when it works again.
func TestFailures(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 3))
	w := newWorld(t, 3, turns.Limits{Turn: 500 * ms, Retry: 50 * ms}, rng)
	w.failures = 0.5
	for i := range 20_000 {
		if i%500 == 0 {
			for m := range 3 {
				w.arrive(m, 20*ms)
			}
		}
		w.step(ms)
	}
	w.failures = 0
	for range 10_000 {
		w.step(ms)
	}
	if left := fmt.Sprint(w.loads()); left != "[{0 0} {0 0} {0 0}]" {
		t.Errorf("requests are left: %s", left)
	}
}
