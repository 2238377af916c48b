package emulated

import (
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
)

// watch is Work that a stream executes once a fence has reached value or a recording has
// passed. The stream reuses the struct for later watches.
type watch struct {
	s     *stream
	fence *fence
	value uint32
	rec   *recording
	op    op
}

func (w *watch) String() string {
	if w.rec != nil {
		return fmt.Sprintf("work %q of %s waits for an event of %s", w.op.work.Name, w.s, w.rec.stream)
	}
	return fmt.Sprintf("work %q of %s waits for %s to reach %d (now %d)", w.op.work.Name, w.s, w.fence, w.value, w.fence.value)
}

// Watch implements device.Watcher.
func (s *stream) Watch(p device.Point, work device.Work) (bool, error) {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	f, err := s.fence("watch", p.Fence)
	if err != nil {
		return false, err
	}
	over, failure := f.reached(p.Value), f.failure(p.Value)
	if over && failure == nil {
		m.calls++
		if m.check != nil {
			m.check.caller().join(f.clockAt(p.Value))
		}
		return true, nil
	}
	w, err := s.watch(work)
	if err != nil {
		return false, err
	}
	w.fence, w.value = f, p.Value
	if over {
		w.fire(failure, f.clockAt(p.Value))
	} else {
		f.watches = append(f.watches, w)
	}
	return false, nil
}

// WatchEvent implements device.Watcher.
func (s *stream) WatchEvent(e device.Event, work device.Work) (bool, error) {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := s.usable("watch"); err != nil {
		return false, err
	}
	ev, err := m.event("watch", s.sp.id, e)
	if err != nil {
		return false, err
	}
	r, err := ev.latest("watch")
	if err != nil {
		return false, err
	}
	if r.passed && r.err == nil {
		m.calls++
		return true, m.learn(r)
	}
	w, err := s.watch(work)
	if err != nil {
		return false, err
	}
	w.rec = r
	if r.passed {
		w.fire(r.err, r.clock)
	} else {
		r.refs++
		r.watches = append(r.watches, w)
	}
	return false, nil
}

// watch returns a new watch of the stream, with its fence or recording still to be set.
func (s *stream) watch(work device.Work) (*watch, error) {
	o, err := s.workOp(work)
	if err != nil {
		return nil, err
	}
	s.m.called()
	if s.m.check != nil {
		o.clock = s.m.check.caller().snapshot()
	}
	var w *watch
	if n := len(s.spare); n > 0 {
		w, s.spare = s.spare[n-1], s.spare[:n-1]
	} else {
		w = &watch{}
	}
	*w = watch{s: s, op: o}
	s.watches = append(s.watches, w)
	return w, nil
}

// fire enqueues the Work of a watch whose fence or recording is reached, unless its stream
// is closed; clock is the clock of that fence or recording.
func (w *watch) fire(err error, clock vclock) {
	s := w.s
	s.watches = slices.DeleteFunc(s.watches, func(x *watch) bool { return x == w })
	if s.m.closed || s.stop {
		s.m.unref(&w.op)
	} else {
		w.op.failure, w.op.noticed = err, s.m.clock()+s.m.o.NoticeLatency
		if s.m.check != nil {
			w.op.clock = joined(w.op.clock, clock)
		}
		s.enqueued++
		s.q.push(&w.op)
		s.wake()
	}
	*w = watch{}
	s.spare = append(s.spare, w)
}

// unwatch drops the stream's watches.
func (s *stream) unwatch() {
	for _, w := range s.watches {
		if w.rec != nil {
			w.rec.refs--
			w.rec.watches = slices.DeleteFunc(w.rec.watches, func(x *watch) bool { return x == w })
		} else {
			w.fence.watches = slices.DeleteFunc(w.fence.watches, func(x *watch) bool { return x == w })
		}
		s.m.unref(&w.op)
	}
	s.watches, s.spare = nil, nil
}
