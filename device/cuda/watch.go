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
// of at most watchNap. Where another goroutine waits by Await, that one polls, and the
// stream's sleeps at once, for longNap: two that poll would take twice the processor time.
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

// watch adds a watch, or returns true if the wait is already over without an error.
func (s *hostStream) watch(w watch) (bool, error) {
	if over, err := w.over(); over && err == nil {
		if s.gone() {
			return false, closedError("watch", device.Host, s.String())
		}
		return true, nil
	}
	// The caller may reuse these slices.
	w.work.Reads, w.work.Writes = nil, nil
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.m.closed.Load() {
		return false, closedError("watch", device.Host, s.String())
	}
	s.watches, s.changed = append(s.watches, w), time.Now()
	// Helpers look by themselves; of the first watch the goroutine has to know, for none may be left.
	if len(s.watches) == 1 || s.helpers.Load() == 0 {
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

// look enqueues the work of watches that are over. The lock is held on entry and on return,
// and released while the driver is asked: whoever enqueues does not wait for that.
func (s *hostStream) look() {
	if len(s.watches) == 0 {
		return
	}
	s.looked = append(s.looked[:0], s.watches...)
	s.mu.Unlock()
	s.ends = s.ends[:0]
	// Recordings of one stream complete in order: those after a pending one need no
	// query. pending has one of each stream.
	s.pending = s.pending[:0]
	for i := range s.looked {
		w := &s.looked[i]
		over, err := false, error(nil)
		if w.gpu == nil || !slices.ContainsFunc(s.pending, w.gpu.follows) {
			over, err = w.over()
			if !over && w.gpu != nil {
				s.pending = append(s.pending, w.gpu)
			}
		}
		if over {
			w.drop()
		}
		s.ends = append(s.ends, watchEnd{over, err})
	}
	clear(s.looked)
	clear(s.pending)
	s.mu.Lock()
	// Watches were at most added meanwhile.
	left := s.watches[:0]
	for i, w := range s.watches {
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
		s.changed = time.Now()
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
	waited := time.Since(s.changed)
	if waited < spinFor && s.helpers.Load() == 0 {
		s.poll()
		return
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
	nap := min(watchNap, max(shortNap, waited/napShare))
	if s.helpers.Load() > 0 {
		nap = longNap // a helper looks, and the last one wakes this goroutine
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
	return f.wait(ctx, p.Value, s.help)
}

// help runs the work of watches that are over, if the stream's goroutine sleeps and has nothing
// else to run. Nobody waits for the lock on its account for longer than a few instructions.
func (s *hostStream) help() {
	if !s.mu.TryLock() {
		return
	}
	defer s.mu.Unlock()
	if s.taken || s.first < len(s.queue) {
		return
	}
	s.taken = true
	s.look()
	for s.first < len(s.queue) && s.queue[s.first].watched {
		s.runNext()
	}
	s.taken = false
	s.freed.wake()
	if s.first < len(s.queue) {
		s.sleeper.wake()
	}
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
