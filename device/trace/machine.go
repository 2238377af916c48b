package trace

import (
	"context"
	"errors"
	"sync"

	"github.com/moeserve/moeserve/device"
)

// Machine is a device.Machine whose streams are traced.
type Machine struct {
	device.Machine
	w *Writer

	mu      sync.Mutex
	streams map[*Stream]struct{}
}

// Wrap traces the streams that are made through the result. Close the result, and with it m,
// before the Writer.
func Wrap(m device.Machine, w *Writer) *Machine {
	return &Machine{Machine: m, w: w, streams: map[*Stream]struct{}{}}
}

// NewStream implements device.Machine.
func (m *Machine) NewStream(space device.Space, o device.StreamOptions) (device.Stream, error) {
	inner, err := m.Machine.NewStream(space, o)
	if err != nil {
		return nil, err
	}
	if x, ok := inner.(device.Watcher); ok && space == device.Host {
		return &hostStream{Watcher: x, m: m}, nil
	}
	s := &Stream{Stream: inner, m: m}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.streams[s] = struct{}{}
	return s, nil
}

// Close writes the operations that have ended, and closes the machine.
func (m *Machine) Close() error {
	m.mu.Lock()
	var open []*Stream
	for s := range m.streams {
		open = append(open, s)
	}
	m.mu.Unlock()
	var errs []error
	for _, s := range open {
		errs = append(errs, s.closeEvents())
	}
	return errors.Join(append(errs, m.Machine.Close())...)
}

// Stream is a traced stream of a device.
type Stream struct {
	device.Stream
	m *Machine

	// pending are the operations not yet written, in order; spare are events for reuse.
	pending []pending
	spare   []device.Event
	note    *Note
}

// pending is an operation between two events.
type pending struct {
	span     Span
	from, to device.Event
}

// Unwrap returns the stream that runs the operations.
func (s *Stream) Unwrap() device.Stream { return s.Stream }

// Annotate implements device.Annotator.
func (s *Stream) Annotate(note any) (before any) { return swapNote(&s.note, note) }

// swapNote replaces a stream's note, and returns the previous one.
func swapNote(at **Note, note any) (before any) {
	if *at != nil {
		before = *at
	}
	*at, _ = note.(*Note)
	return before
}

// Span traces the operations that do enqueues on the stream that Unwrap returns.
func (s *Stream) Span(op Op, name string, bytes int64, do func() error) error {
	if err := s.writeEnded(); err != nil {
		return err
	}
	p := pending{span: Span{Space: s.Space(), Stream: s.Name(), Op: op, Name: name, Bytes: bytes, Note: s.note}}
	var err error
	if p.from, err = s.recordEvent(); err != nil {
		return err
	}
	if err := do(); err != nil {
		s.spare = append(s.spare, p.from)
		return err
	}
	if p.to, err = s.recordEvent(); err != nil {
		s.spare = append(s.spare, p.from)
		return err
	}
	s.pending = append(s.pending, p)
	return nil
}

// recordEvent records an event on the stream.
func (s *Stream) recordEvent() (ev device.Event, err error) {
	if n := len(s.spare); n > 0 {
		ev, s.spare = s.spare[n-1], s.spare[:n-1]
	} else if ev, err = s.m.NewEvent(); err != nil {
		return nil, err
	}
	if err := s.Stream.Record(ev); err != nil {
		s.spare = append(s.spare, ev)
		return nil, err
	}
	return ev, nil
}

// writeEnded writes the operations that have ended.
func (s *Stream) writeEnded() error {
	n := 0
	for ; n < len(s.pending); n++ {
		p := &s.pending[n]
		over, err := p.to.Query()
		if !over {
			if err != nil {
				return err
			}
			break
		}
		p.span.Err = err
		// A failed operation has no times.
		if p.span.Start, err = p.from.Time(); err == nil {
			if p.span.End, err = p.to.Time(); err == nil {
				s.m.w.Add(p.span)
			}
		}
		s.spare = append(s.spare, p.from, p.to)
	}
	s.pending = append(s.pending[:0], s.pending[n:]...)
	return nil
}

// Copy implements device.Stream.
func (s *Stream) Copy(dst, src device.Range) error {
	return s.Span(Copied, "", dst.Bytes, func() error { return s.Stream.Copy(dst, src) })
}

// CopyBatch implements device.BatchCopier. The error wraps device.ErrNoBatches where the traced
// stream is none.
func (s *Stream) CopyBatch(dst, src []device.Range) error {
	b, ok := s.Stream.(device.BatchCopier)
	if !ok {
		return &device.Error{Op: "copy", Space: s.Space(), Detail: s.Name(), Err: device.ErrNoBatches}
	}
	var bytes int64
	for _, r := range dst {
		bytes += r.Bytes
	}
	return s.Span(Copied, "", bytes, func() error { return b.CopyBatch(dst, src) })
}

// Wait implements device.Stream.
func (s *Stream) Wait(ev device.Event) error {
	return s.Span(Wait, "", 0, func() error { return s.Stream.Wait(ev) })
}

// WaitFence implements device.Stream.
func (s *Stream) WaitFence(f device.Fence, value uint32) error {
	return s.Span(Wait, "", 0, func() error { return s.Stream.WaitFence(f, value) })
}

// Synchronize implements device.Stream.
func (s *Stream) Synchronize(ctx context.Context) error {
	err := s.Stream.Synchronize(ctx)
	return errors.Join(err, s.writeEnded())
}

// Close implements device.Stream.
func (s *Stream) Close() error {
	s.m.mu.Lock()
	delete(s.m.streams, s)
	s.m.mu.Unlock()
	// Synchronize has reported the stream's own error before.
	_ = s.Stream.Synchronize(context.Background())
	return errors.Join(s.closeEvents(), s.Stream.Close())
}

// closeEvents writes the operations that have ended, and closes the events.
func (s *Stream) closeEvents() error {
	errs := []error{s.writeEnded()}
	for _, p := range s.pending {
		s.spare = append(s.spare, p.from, p.to)
	}
	for _, ev := range s.spare {
		errs = append(errs, ev.Close())
	}
	s.pending, s.spare = nil, nil
	return errors.Join(errs...)
}

// hostStream is a traced stream of the host.
type hostStream struct {
	device.Watcher
	m    *Machine
	note *Note
}

// Annotate implements device.Annotator.
func (s *hostStream) Annotate(note any) (before any) { return swapNote(&s.note, note) }

// Execute implements device.Executor.
func (s *hostStream) Execute(w device.Work) error { return s.Watcher.Execute(s.traced(w, s.note)) }

// Watch implements device.Watcher.
func (s *hostStream) Watch(p device.Point, w device.Work) (bool, error) {
	return s.Watcher.Watch(p, s.traced(w, nil))
}

// WatchEvent implements device.Watcher.
func (s *hostStream) WatchEvent(ev device.Event, w device.Work) (bool, error) {
	return s.Watcher.WatchEvent(ev, s.traced(w, nil))
}

// traced returns work that writes its own span.
func (s *hostStream) traced(w device.Work, note *Note) device.Work {
	run, name, op := w.Run, w.Name, Launch
	if run == nil {
		return w
	}
	if w.Host {
		op = Callback
	}
	w.Run = func(a device.Access) error {
		start := s.m.Now()
		err := run(a)
		s.m.w.Add(Span{Space: device.Host, Stream: s.Name(), Op: op, Name: name, Note: note, Start: start, End: s.m.Now(), Err: err})
		return err
	}
	return w
}
