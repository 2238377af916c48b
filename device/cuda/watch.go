//go:build cuda

package cuda

import (
	"context"
	"runtime"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
)

// watch is work that a host stream executes once a fence has reached value, or a
// recording has completed. While it has no other work, the stream's goroutine polls its
// watches in turn: without a pause for spinFor after the latest change, then with sleeps
// of at most watchNap. Watches that are not due (device.Due) are left out, and
// where none is, the goroutine sleeps until shortly before the first one is: a chunk of a
// PCIe link takes 150 us, and looks in between find nothing. Where another
// goroutine waits by Await, that one polls, and the stream's sleeps at once, for longNap: two
// that poll would take twice the processor time. While no watch is due, the other one sleeps
// too, and does not count: what is added meanwhile wakes the stream's.
type watch struct {
	work  device.Work
	fence *fence
	value uint32
	// event's recording is host or gpu; the watch holds gpu.
	event *event
	host  *hostRecording
	gpu   *gpuRecording
}

// watchEnd is what look has learned of a watch.
type watchEnd struct {
	over bool
	err  error
}

const (
	watchNap = 50 * time.Microsecond
	// spinLoads is a pause of some 0.1 us between two looks.
	spinLoads = 200
)

// due is when the wait can be over at the earliest; 0: at any time.
func (w *watch) due() time.Duration {
	if w.work.Due == nil {
		return 0
	}
	return time.Duration(w.work.Due.NotBefore.Load())
}

// over reports whether the wait is over, and its error.
func (w *watch) over() (bool, error) {
	switch {
	case w.fence != nil:
		return w.fence.over(w.value)
	case w.host != nil:
		return w.host.passed(), w.host.failure()
	}
	w.event.mu.Lock()
	defer w.event.mu.Unlock()
	return w.gpu.query()
}

// over reports whether a wait for value is over, and its error. Close ends the wait too,
// since the word may be reused afterwards.
func (f *fence) over(value uint32) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.closed:
		return true, closedError("watch", device.Host, f.String())
	case f.reached(value):
		return true, f.failureLocked(value)
	}
	return false, nil
}

// Watch implements device.Watcher.
func (s *hostStream) Watch(p device.Point, work device.Work) (bool, error) {
	f, err := s.m.fence("watch", device.Host, p.Fence)
	if err != nil {
		return false, err
	}
	f.mu.Lock()
	closed := f.closed
	f.mu.Unlock()
	if closed {
		return false, closedError("watch", device.Host, f.String())
	}
	return s.watch(watch{work: work, fence: f, value: p.Value})
}

// WatchEvent implements device.Watcher.
func (s *hostStream) WatchEvent(e device.Event, work device.Work) (bool, error) {
	ev, err := s.m.event("watch", device.Host, e)
	if err != nil {
		return false, err
	}
	ev.mu.Lock()
	err = ev.recorded("watch", device.Host)
	w := watch{work: work, event: ev, host: ev.host, gpu: ev.gpu}
	if err == nil && w.gpu != nil {
		ev.hold(w.gpu)
	}
	ev.mu.Unlock()
	if err != nil {
		return false, err
	}
	reached, err := s.watch(w)
	if reached || err != nil {
		w.drop()
	}
	return reached, err
}

// watch adds a watch, or returns true if the wait is due and already over without an error.
func (s *hostStream) watch(w watch) (bool, error) {
	now, due := s.m.Now(), w.due()
	if due <= now {
		if over, err := w.over(); over && err == nil {
			if s.gone() {
				return false, closedError("watch", device.Host, s.String())
			}
			return true, nil
		}
	}
	// The caller may reuse these slices.
	w.work.Reads, w.work.Writes = nil, nil
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.m.closed.Load() {
		return false, closedError("watch", device.Host, s.String())
	}
	s.watches, s.changed = append(s.watches, w), now
	// Helpers look by themselves, and the goroutine may be awake before the watch is due; of the first
	// watch it has to know, for none may be left.
	if len(s.watches) == 1 || s.helpers.Load() == 0 && (s.until == 0 || due < s.until) {
		s.sleeper.wake()
	}
	return false, nil
}

// drop releases the GPU recording that the watch holds.
func (w *watch) drop() {
	if w.gpu != nil {
		w.event.drop(w.gpu)
	}
}

// look enqueues the work of watches that are over, and notes the outlook. The lock is held on
// entry and on return, and released while the driver is asked: whoever enqueues does not wait
// for that.
func (s *hostStream) look() {
	s.outlook = outlook{}
	if len(s.watches) == 0 {
		return
	}
	s.looked = append(s.looked[:0], s.watches...)
	s.mu.Unlock()
	s.ends = s.ends[:0]
	now := s.m.Now()
	// Recordings of one stream complete in order: those after a pending one, or one that is not
	// due, need no query. pending has one of each stream.
	s.pending = s.pending[:0]
	for i := range s.looked {
		w := &s.looked[i]
		if w.gpu != nil && slices.ContainsFunc(s.pending, w.gpu.follows) {
			s.ends = append(s.ends, watchEnd{})
			continue
		}
		over, err := false, error(nil)
		if due := w.due(); due > now {
			s.outlook.later(due)
		} else if over, err = w.over(); !over {
			s.outlook.now(due)
			if w.work.Due != nil {
				w.work.Due.Pending.Store(int64(now))
			}
		}
		if over {
			w.drop()
		} else if w.gpu != nil {
			s.pending = append(s.pending, w.gpu)
		}
		s.ends = append(s.ends, watchEnd{over, err})
	}
	clear(s.looked)
	clear(s.pending)
	s.mu.Lock()
	// Watches were at most added meanwhile.
	left := s.watches[:0]
	for i, w := range s.watches {
		if i >= len(s.ends) {
			s.outlook.now(0) // the next look tells
		}
		if i >= len(s.ends) || !s.ends[i].over {
			left = append(left, w)
			continue
		}
		o := hostOp{kind: hostWork, work: w.work, watched: true}
		if err := s.ends[i].err; err != nil {
			o.kind, o.failure = hostFailed, err
		}
		s.push(o)
	}
	if len(left) < len(s.watches) {
		s.changed = s.m.Now()
		clear(s.watches[len(left):])
		s.watches = left
	}
}

// follows reports whether a recording completes after another one of its stream.
func (r *gpuRecording) follows(before *gpuRecording) bool {
	return r.epoch == before.epoch && r.point >= before.point
}

// rest yields or sleeps before the next look. The lock is held on entry and on return, and
// released in between.
func (s *hostStream) rest() {
	if s.spin > 0 && time.Since(s.ran) < s.spin {
		s.poll()
		return
	}
	if len(s.watches) == 0 {
		s.sleep(0)
		return
	}
	now, nap := s.m.Now(), longNap
	helped := s.helpers.Load() > 0 // one looks, and the last one wakes this goroutine
	if !helped {
		if nap = s.outlook.rest(now, s.changed); nap == 0 {
			s.poll()
			return
		}
		if !s.outlook.open {
			s.until = now + nap
			s.sleep(nap)
			s.until = 0
			return
		}
	}
	if time.Since(s.probed) > probeEvery {
		s.probed = time.Now()
		s.mu.Unlock()
		defer s.mu.Lock()
		for _, g := range s.m.gpus {
			g.probe()
		}
		return // something may have been enqueued meanwhile
	}
	s.sleep(nap)
}

// poll yields before the next look. The lock is held on entry and on return, and released in between:
// it is free for those who enqueue.
func (s *hostStream) poll() {
	s.mu.Unlock()
	defer s.mu.Lock()
	if s.yields {
		runtime.Gosched()
	}
	for range spinLoads {
		s.m.closed.Load()
	}
}

// Await implements device.Helper.
func (s *hostStream) Await(ctx context.Context, p device.Point) error {
	f, err := s.m.fence("wait", device.Host, p.Fence)
	if err != nil {
		return err
	}
	s.helpers.Add(1)
	defer func() {
		if s.helpers.Add(-1) == 0 {
			s.mu.Lock()
			s.sleeper.wake()
			s.mu.Unlock()
		}
	}()
	return f.wait(ctx, p.Value, s)
}

// help runs the work of watches that are over, if the stream's goroutine sleeps and has nothing
// else to run. Nobody waits for the lock on its account for longer than a few instructions. Where no
// watch is due it sleeps until shortly before the first one is, for maxDoze at most, and returns true if
// it is the first to wake: one that polls from then on is enough. What no watch brings about (Fail, a
// context that ends, a copy that is taken back) a helper notices by so much later.
func (s *hostStream) help() (first bool) {
	idle := s.helpOnce()
	if idle == 0 {
		return false
	}
	precise()
	nap(idle)
	return s.helpers.Add(1) == 1
}

// helpOnce is help without the sleep: it returns how long that is. If it is not 0, the helper no longer
// counts as one, so that what is added meanwhile wakes the stream's goroutine.
func (s *hostStream) helpOnce() (idle time.Duration) {
	if !s.mu.TryLock() {
		return 0
	}
	defer s.mu.Unlock()
	if s.taken || s.first < len(s.queue) {
		return 0
	}
	s.taken = true
	s.look()
	ran := s.first < len(s.queue)
	for s.first < len(s.queue) && s.queue[s.first].watched {
		s.runNext()
	}
	if s.first == len(s.queue) && !ran { // otherwise what it waits for may be reached
		if idle = s.outlook.doze(s.m.Now()); idle > 0 {
			s.helpers.Add(-1)
		}
	}
	s.taken = false
	s.freed.wake()
	if s.first < len(s.queue) {
		s.sleeper.wake()
	}
	return idle
}

// unwatch drops the remaining watches when the stream's goroutine ends.
// ---
func (s *hostStream) unwatch() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.watches {
		s.watches[i].drop()
	}
	s.watches = nil
}
