package trace

import (
	"context"
	"errors"
	"sync"

	"github.com/moeserve/moeserve/device"
)

// Machine is a machine whose streams are traced.
type Machine struct {
	device.Machine
	w *Writer

	mu      sync.Mutex
	streams map[*Stream]struct{}
}

// Wrap traces what the streams do that m makes from now on. The machine is closed, and
// with it m, before the Writer.
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

// Close writes what has ended since, and closes the machine.
func (m *Machine) Close() error {
	m.mu.Lock()
	var open []*Stream
	for s := range m.streams {
		open = append(open, s)
	}
	m.mu.Unlock()
	var errs []error
	for _, s := range open {
		errs = append(errs, s.release())
	}
	return errors.Join(append(errs, m.Machine.Close())...)
}

// Stream is a traced stream of a device.
type Stream struct {
	device.Stream
	m *Machine

	// pending have not been written yet, in order; spare are events for more.
	pending []pending
	spare   []device.Event
	note    *Note
}

// pending is a span between two events.
type pending struct {
	span     Span
	from, to device.Event
}

// Unwrap is the stream that runs the operations.
func (s *Stream) Unwrap() device.Stream { return s.Stream }

// Annotate implements device.Annotator.
func (s *Stream) Annotate(note any) (before any) { return swapNote(&s.note, note) }

// swapNote replaces a stream's note, and returns the one before.
func swapNote(at **Note, note any) (before any) {
	if *at != nil {
		before = *at
	}
	*at, _ = note.(*Note)
	return before
}

// Span enqueues by do, on the stream that Unwrap returns, and traces what that was.
func (s *Stream) Span(op Op, name string, bytes int64, do func() error) error {
	if err := s.write(); err != nil {
		return err
	}
	p := pending{span: Span{Space: s.Space(), Stream: s.Name(), Op: op, Name: name, Bytes: bytes, Note: s.note}}
	var err error
	if p.from, err = s.mark(); err != nil {
		return err
	}
	if err := do(); err != nil {
		s.spare = append(s.spare, p.from)
		return err
	}
	if p.to, err = s.mark(); err != nil {
		s.spare = append(s.spare, p.from)
		return err
	}
	s.pending = append(s.pending, p)
	return nil
}

// mark records an event.
func (s *Stream) mark() (ev device.Event, err error) {
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

// write writes the spans that have ended.
func (s *Stream) write() error {
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
		// What failed has no times to tell.
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

// Wait implements device.Stream.
func (s *Stream) Wait(ev device.Event) error {
	return s.Span(Wait, "", 0, func() error { return s.Stream.Wait(ev) })
}

// Await implements device.Stream.
func (s *Stream) Await(f device.Fence, value uint32) error {
	return s.Span(Wait, "", 0, func() error { return s.Stream.Await(f, value) })
}

// Synchronize implements device.Stream.
func (s *Stream) Synchronize(ctx context.Context) error {
	err := s.Stream.Synchronize(ctx)
	return errors.Join(err, s.write())
}

// Close implements device.Stream.
func (s *Stream) Close() error {
	s.m.mu.Lock()
	delete(s.m.streams, s)
	s.m.mu.Unlock()
	// The streams' own error is not this call's to tell.
	_ = s.Stream.Synchronize(context.Background())
	return errors.Join(s.release(), s.Stream.Close())
}

// release writes what has ended and gives the events back.
func (s *Stream) release() error {
	errs := []error{s.write()}
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

// traced is work that notes when it ran.
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
