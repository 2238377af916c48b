//go:build cuda

package cuda

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
)

const us = time.Microsecond

// TestOutlook: how long threads sleep, by what a look has left.
func TestOutlook(t *testing.T) {
	const now = time.Second
	for _, c := range []struct {
		name       string
		o          outlook
		changed    time.Duration
		rest, doze time.Duration
	}{
		{"nothing is due", outlook{next: now + 130*us}, now, 130*us - wakeEarly, 130*us - wakeEarly},
		{"for long", outlook{next: now + time.Hour}, now - time.Minute, maxDoze, maxDoze},
		{"soon", outlook{next: now + wakeEarly + shortNap - 1}, now, 0, 0},
		{"just not soon", outlook{next: now + wakeEarly + shortNap}, now, shortNap, shortNap},
		{"meanwhile", outlook{next: now - 1}, now - time.Minute, 0, 0},
		{"unknown", outlook{open: true}, now - spinFor + 1, 0, 0},
		{"unknown for longer", outlook{open: true}, now - spinFor, shortNap, 0},
		{"unknown for long", outlook{open: true}, now - time.Minute, watchNap, 0},
		{"unknown, and another one later", outlook{open: true, next: now + 130*us}, now, 0, 0},
		{"unknown for long, and another one later", outlook{open: true, next: now + 60*us}, now - time.Minute, 60*us - wakeEarly, 0},
		{"unknown for long, and another one soon", outlook{open: true, next: now + 30*us}, now - time.Minute, 0, 0},
		{"due", outlook{open: true, due: now - 1}, now - time.Minute, 0, 0},
		{"due for longer", outlook{open: true, due: now - spinFor}, now - time.Minute, shortNap, 0},
		{"due for longer, and something has changed", outlook{open: true, due: now - spinFor}, now - 1, 0, 0},
	} {
		if got := c.o.rest(now, c.changed); got != c.rest {
			t.Errorf("%s: the stream sleeps for %v, want %v", c.name, got, c.rest)
		}
		if got := c.o.doze(now); got != c.doze {
			t.Errorf("%s: a helper sleeps for %v, want %v", c.name, got, c.doze)
		}
	}
	o := outlook{}
	o.later(5)
	o.later(3)
	o.later(4)
	if o != (outlook{next: 3}) {
		t.Errorf("watches that are due at 5, 3 and 4: %+v", o)
	}
	o.now(2)
	o.now(0)
	if o != (outlook{open: true, due: 2, next: 3}) {
		t.Errorf("and one that was due at 2, and one that nobody knows of: %+v", o)
	}
}

// TestLookWhenDue: a look asks only for watches that are due, and for none behind one of its stream that
// is not.
func TestLookWhenDue(t *testing.T) {
	m := &Machine{WallClock: device.WallClock{Opened: time.Now().Add(-time.Hour)}}
	s := &hostStream{m: m, taken: true}
	one, other := &epoch{}, &epoch{}
	var due [3]device.Due
	later := time.Duration(1 << 62)
	fence := &fence{m: m, word: word{value: &atomic.Uint32{}}}
	add := func(of *epoch, point uint64, due *device.Due) {
		r := &gpuRecording{epoch: of, point: point, passed: true, refs: 1}
		s.watches = append(s.watches, watch{work: device.Work{Due: due}, event: &event{}, gpu: r})
	}
	look := func(ended, left int, want outlook) {
		t.Helper()
		s.mu.Lock()
		defer s.mu.Unlock()
		s.queue = s.queue[:0]
		if s.look(); len(s.queue) != ended || len(s.watches) != left || s.outlook != want {
			t.Errorf("%d watches are over, %d are left, with %+v; want %d and %d, with %+v", len(s.queue), len(s.watches), s.outlook, ended, left, want)
		}
	}
	due[0].NotBefore.Store(int64(later))
	due[1].NotBefore.Store(int64(later + 1))
	add(one, 1, &due[0])
	add(one, 2, nil) // behind it
	add(other, 1, &due[1])
	s.watches = append(s.watches, watch{fence: fence, value: 1, work: device.Work{Due: &due[2]}})
	look(0, 4, outlook{open: true, next: later})
	due[2].NotBefore.Store(5)
	look(0, 4, outlook{open: true, due: 5, next: later})
	fence.word.value.Store(1)
	look(1, 3, outlook{next: later})
	due[0].NotBefore.Store(0)
	look(2, 1, outlook{next: later + 1})
	due[1].NotBefore.Store(1)
	look(1, 0, outlook{})
	add(one, 3, nil)
	look(1, 0, outlook{})
}

// TestWatchWakes: a new watch wakes the thread where that may be over before it wakes of itself, and no
// helper looks.
func TestWatchWakes(t *testing.T) {
	m := &Machine{WallClock: device.WallClock{Opened: time.Now().Add(-time.Hour)}}
	const until = 2 * time.Hour
	for _, c := range []struct {
		name       string
		watches    int
		due, until time.Duration
		helpers    int32
		want       bool
	}{
		{"the first", 0, until + 1, 0, 1, true},
		{"while it naps", 1, until + 1, 0, 0, true},
		{"due later", 1, until + 1, until, 0, false},
		{"due sooner", 1, until - 1, until, 0, true},
		{"due at a time that nobody knows", 1, 0, until, 0, true},
		{"and somebody looks", 1, 0, until, 1, false},
	} {
		s := &hostStream{m: m, watches: make([]watch, c.watches), until: c.until}
		s.helpers.Store(c.helpers)
		s.sleeper.lie()
		var due device.Due
		due.NotBefore.Store(int64(c.due))
		over, err := s.watch(watch{fence: &fence{m: m, word: word{value: &atomic.Uint32{}}}, value: 1, work: device.Work{Due: &due}})
		if woken := s.sleeper.asleep.Load() == 0; over || err != nil || woken != c.want {
			t.Errorf("%s: woken %v, want %v (%v, %v)", c.name, woken, c.want, over, err)
		}
	}
}

// TestDue: a stream that sleeps since none of its watches is due runs what is executed, and what else is
// watched; so it does for who waits by Await.
func TestDue(t *testing.T) {
	r := newRig(t, 1)
	s, gpu := r.host("watches").(*hostStream), r.stream(0, "gpu")
	done, e := r.fence("done"), r.event()
	gate := r.fence("gate")
	for i := range uint32(40) {
		wait := func(at device.Point) { r.ok(at.Wait(r.ctx)) }
		if i%2 == 1 {
			wait = func(at device.Point) { r.ok(s.Await(r.ctx, at)) }
		}
		first, second := 2*i+1, 2*i+2
		var due device.Due
		var early, ran atomic.Bool
		due.NotBefore.Store(int64(s.m.Now() + time.Hour))
		r.ok(gpu.WaitFence(gate, first))
		r.ok(gpu.Record(e))
		passed, err := s.WatchEvent(e, device.Work{Due: &due, Run: func(device.Access) error {
			ran.Store(true)
			return done.Signal(second)
		}})
		r.ok(err)
		r.ok(gate.Signal(first))
		r.ok(gpu.Synchronize(r.ctx))
		r.ok(s.Execute(device.Work{Run: func(device.Access) error { early.Store(true); return nil }}))
		r.ok(s.Synchronize(r.ctx))
		other, err := s.Watch(device.Point{Fence: gate, Value: second}, device.Work{Run: func(device.Access) error { return done.Signal(first) }})
		r.ok(err)
		r.ok(gate.Signal(second))
		wait(device.Point{Fence: done, Value: first})
		if passed || other || !early.Load() || ran.Load() {
			t.Fatalf("what is not due was looked at: %v, %v; what is executed has run: %v", passed, ran.Load(), early.Load())
		}
		due.NotBefore.Store(0)
		wait(device.Point{Fence: done, Value: second})
	}
	// Where nothing is known, what has passed is over at once.
	r.ok(gpu.Record(e))
	r.ok(gpu.Synchronize(r.ctx))
	var due device.Due
	if passed, err := s.WatchEvent(e, device.Work{Due: &due}); !passed || err != nil {
		t.Errorf("what has passed is watched for: %v, %v", passed, err)
	}
	due.NotBefore.Store(int64(s.m.Now() + time.Hour))
	if passed, err := s.WatchEvent(e, device.Work{Due: &due}); passed || err != nil {
		t.Errorf("what is not due was looked at when the watch began: %v, %v", passed, err)
	}
	r.ok(s.Close())
}

// TestDueSoon: a host that has waited for long sleeps shortly near a chunk's end, and polls without a pause in
// a wait that this would make longer by more than 1 %.
func TestDueSoon(t *testing.T) {
	first := time.Unix(1, 0)
	for waited, sleeps := range map[time.Duration]bool{0: false, 300 * time.Microsecond: false, 100*shortNap - 1: false, 100 * shortNap: true, time.Second: true} {
		now := first.Add(waited)
		polled := now.Sub(dueSoon(first, now))
		if got := polled >= spinFor; got != sleeps || polled > 2*spinFor {
			t.Errorf("after %v: as if polled for %v, so it sleeps: %v, want %v", waited, polled, got, sleeps)
		}
	}
}
