package devicetest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
)

// watcher is a host stream whose Work records how it ended and signals a fence.
type watcher struct {
	*suite
	device.Watcher
	ran device.Fence

	mu    sync.Mutex
	notes []string
	errs  []error
}

func (s *suite) watcher() *watcher {
	s.Helper()
	w, ok := s.stream(device.Host, "watcher").(device.Watcher)
	if !ok {
		s.Fatal("a host stream is no device.Watcher")
	}
	return &watcher{suite: s, Watcher: w, ran: s.fence()}
}

// work returns Work that records its name and the error passed to Failed, or nil.
func (w *watcher) work(name string) device.Work {
	note := func(err error) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.notes, w.errs = append(w.notes, name), append(w.errs, err)
		return w.ran.Signal(uint32(len(w.notes)))
	}
	return device.Work{
		Name: name, Host: true,
		Run:    func(device.Access) error { return note(nil) },
		Failed: func(err error) { _ = note(err) },
	}
}

// pending checks that a watch was accepted and its point is not yet reached.
func (w *watcher) pending(over bool, err error) {
	w.Helper()
	w.ok(err)
	if over {
		w.Fatal("what has not happened is said to be over")
	}
}

// wants waits until len(names) Works have run or failed, and compares their names in order.
func (w *watcher) wants(names ...string) {
	w.Helper()
	w.ok(w.ran.Wait(w.ctx, uint32(len(names))))
	w.mu.Lock()
	defer w.mu.Unlock()
	if !slices.Equal(w.notes, names) {
		w.Fatalf("work ran as %v, want %v", w.notes, names)
	}
}

// watches: Work runs when its point is reached or its event has passed, in any order, and
// other Work of the stream runs meanwhile.
func watches(s *suite) {
	w, gpu := s.watcher(), s.stream(device.HBM(0), "gpu")
	a, b, gate := s.fence(), s.fence(), s.fence()
	ev := s.event()
	w.pending(w.Watch(device.Point{Fence: a, Value: 1}, w.work("a1")))
	w.pending(w.Watch(device.Point{Fence: b, Value: 2}, w.work("b2")))
	s.ok(gpu.WaitFence(gate, 1))
	s.ok(gpu.Record(ev))
	w.pending(w.WatchEvent(ev, w.work("event")))
	s.ok(w.Execute(w.work("executed")))
	s.ok(w.Synchronize(s.ctx))
	w.wants("executed")
	s.ok(b.Signal(1))
	s.ok(w.Synchronize(s.ctx))
	s.ok(b.Signal(2))
	w.wants("executed", "b2")
	s.ok(gate.Signal(1))
	w.wants("executed", "b2", "event")
	s.ok(gpu.SignalFence(a, 1)) // by a stream
	w.wants("executed", "b2", "event", "a1")

	for _, over := range []func() (bool, error){
		func() (bool, error) { return w.Watch(device.Point{Fence: a, Value: 1}, w.work("late")) },
		func() (bool, error) { return w.Watch(device.Point{Fence: b, Value: 1}, w.work("late")) },
		func() (bool, error) { return w.WatchEvent(ev, w.work("late")) },
	} {
		if reached, err := over(); !reached || err != nil {
			s.Errorf("what has happened is watched for: %v, %v", reached, err)
		}
	}
	s.ok(w.Synchronize(s.ctx))
	w.wants("executed", "b2", "event", "a1")

	// The event can be recorded and watched again.
	s.ok(gpu.WaitFence(gate, 2))
	s.ok(gpu.Record(ev))
	w.pending(w.WatchEvent(ev, w.work("again")))
	s.ok(gate.Signal(2))
	w.wants("executed", "b2", "event", "a1", "again")
}

// watchesOutOfOrder: of two recordings on one stream, the later is watched first, and
// passes only after the Work watching the earlier one has run.
func watchesOutOfOrder(s *suite) {
	w, gpu := s.watcher(), s.stream(device.HBM(0), "gpu")
	first, last := s.event(), s.event()
	gate := s.fence()
	s.ok(gpu.WaitFence(gate, 1))
	s.ok(gpu.Record(first))
	s.ok(gpu.WaitFence(gate, 2))
	s.ok(gpu.Record(last))
	w.pending(w.WatchEvent(last, w.work("last")))
	w.pending(w.WatchEvent(first, w.work("first")))
	s.ok(gate.Signal(1))
	w.wants("first")
	s.ok(gate.Signal(2))
	w.wants("first", "last")
}

// watchesFail: watched Work receives the error of a failed fence or event, whether it
// failed before or after the watch, and the watching stream is not in error then.
func watchesFail(s *suite) {
	w, host := s.watcher(), s.hostStream("host")
	f, gate := s.fence(), s.fence()
	ev := s.event()
	cause := errors.New("the copy before it failed")
	w.pending(w.Watch(device.Point{Fence: f, Value: 1}, w.work("before")))
	s.ok(f.Fail(1, cause))
	w.wants("before")
	w.pending(w.Watch(device.Point{Fence: f, Value: 1}, w.work("after")))
	w.wants("before", "after")

	s.ok(host.WaitFence(gate, 1))
	s.ok(host.Execute(device.Work{Name: "fails", Host: true, Run: func(device.Access) error { return cause }}))
	s.ok(host.Record(ev))
	w.pending(w.WatchEvent(ev, w.work("event")))
	s.ok(gate.Signal(1))
	w.wants("before", "after", "event")
	w.pending(w.WatchEvent(ev, w.work("event again")))
	w.wants("before", "after", "event", "event again")
	s.wants(host.Recover(s.ctx), "", cause)
	for i, err := range w.errs {
		if !errors.Is(err, cause) {
			s.Errorf("work %q was notified %v", w.notes[i], err)
		}
	}
	s.ok(w.Synchronize(s.ctx))
	s.ok(w.Execute(w.work("executed")))
	s.ok(f.Signal(2))
	if reached, err := w.Watch(device.Point{Fence: f, Value: 2}, w.work("late")); !reached || err != nil {
		s.Errorf("behind a failure: %v, %v", reached, err)
	}
	w.wants("before", "after", "event", "event again", "executed")
	if w.errs[4] != nil {
		s.Errorf("the stream is in error: %v", w.errs[4])
	}
}

// watchesEnd: a stream that is closed drops its watches, and watches that cannot complete
// are refused.
func watchesEnd(s *suite) {
	w, gpu := s.watcher(), s.stream(device.HBM(0), "gpu")
	f, gate, closed := s.fence(), s.fence(), s.fence()
	ev := s.event()
	point := device.Point{Fence: f, Value: 1}
	_, err := w.WatchEvent(ev, w.work("never"))
	s.wants(err, "watch", device.ErrNotRecorded)
	s.ok(closed.Close())
	_, err = w.Watch(device.Point{Fence: closed, Value: 1}, w.work("never"))
	s.wants(err, "watch", device.ErrClosed)
	s.ok(gpu.WaitFence(gate, 1))
	s.ok(gpu.Record(ev))
	w.pending(w.Watch(point, w.work("dropped")))
	w.pending(w.WatchEvent(ev, w.work("dropped")))
	s.ok(w.Execute(w.work("executed")))
	s.ok(w.Close())
	w.wants("executed")
	_, err = w.Watch(point, w.work("never"))
	s.wants(err, "watch", device.ErrClosed)
	s.ok(f.Signal(1))
	s.ok(gate.Signal(1))
	s.ok(gpu.Synchronize(s.ctx))
	_, err = w.Watch(point, w.work("never"))
	s.wants(err, "watch", device.ErrClosed)
	other := s.hostStream("another") // runs behind what would be left
	s.ok(other.Synchronize(s.ctx))
	w.wants("executed")
	s.ok(ev.Close())
}

// helps: who waits by Await sees what watched work signals, whichever goroutine runs it, never two
// works of a stream at a time and those of its queue before those that are due later; a wait ends with
// its context, and with the error of the fence.
func helps(s *suite) {
	w, gpu := s.watcher(), s.stream(device.HBM(0), "gpu")
	h, ok := w.Watcher.(device.Helper)
	if !ok {
		return
	}
	due, done := s.fence(), s.fence()
	var busy atomic.Bool
	alone := func(then func() error) device.Work {
		run := func(error) error {
			if busy.Swap(true) {
				s.Error("two works of a stream run at the same time")
			}
			defer busy.Store(false)
			return then()
		}
		return device.Work{Host: true, Run: func(device.Access) error { return run(nil) }, Failed: func(err error) { _ = run(err) }}
	}
	ev := s.event()
	const rounds = 200
	executed, seen := 0, 0
	var others sync.WaitGroup
	for range 2 { // others that wait for the same
		others.Go(func() {
			if err := h.Await(s.ctx, device.Point{Fence: done, Value: rounds}); err != nil {
				s.Errorf("Await: %v", err)
			}
		})
	}
	for i := range uint32(rounds) {
		if i%16 == 0 {
			time.Sleep(time.Millisecond) // the stream goes to sleep
		}
		s.ok(gpu.WaitFence(due, i+1))
		s.ok(gpu.Record(ev))
		w.pending(w.WatchEvent(ev, alone(func() error { seen = executed; return done.Signal(i + 1) })))
		if i%3 == 0 {
			s.ok(w.Execute(alone(func() error { executed++; return nil })))
		}
		s.ok(due.Signal(i + 1))
		s.ok(h.Await(s.ctx, device.Point{Fence: done, Value: i + 1}))
	}
	others.Wait()
	s.ok(w.Synchronize(s.ctx))
	if executed != (rounds+2)/3 || seen == 0 {
		s.Errorf("%d works ran, of which the last watched one saw %d", executed, seen)
	}
	cause := errors.New("the copy failed")
	s.ok(done.Fail(rounds+1, cause))
	if err := h.Await(s.ctx, device.Point{Fence: done, Value: rounds + 1}); !errors.Is(err, cause) {
		s.Errorf("a failed fence: %v", err)
	}
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	if err := h.Await(ctx, device.Point{Fence: done, Value: rounds + 2}); !errors.Is(err, context.Canceled) {
		s.Errorf("a wait that is canceled: %v", err)
	}
}

// watchesDue: watches run once, whenever they were said to be due.
func watchesDue(s *suite) {
	w, gpu := s.watcher(), s.stream(device.HBM(0), "gpu")
	gate, ev := s.fence(), s.event()
	for i, due := range []time.Duration{0, 1, s.m.Now(), s.m.Now() + time.Millisecond} {
		at := &device.Due{}
		at.NotBefore.Store(int64(due))
		s.ok(gpu.WaitFence(gate, uint32(i+1)))
		s.ok(gpu.Record(ev))
		work := w.work("due")
		work.Due = at
		w.pending(w.WatchEvent(ev, work))
		w.pending(w.Watch(device.Point{Fence: gate, Value: uint32(i + 1)}, work))
		s.ok(gate.Signal(uint32(i + 1)))
		w.wants(slices.Repeat([]string{"due"}, 2*(i+1))...)
	}
	s.ok(w.Synchronize(s.ctx))
	w.wants(slices.Repeat([]string{"due"}, 8)...)
}
