package eval

import (
	"context"
	"errors"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Lane is a stream with events around what is measured on it.
type Lane struct {
	Stream     device.Stream
	Start, End device.Event
}

// OpenLane creates a stream of a space and its events. Whoever opens it closes it.
func OpenLane(m device.Machine, space device.Space, name string) (l *Lane, err error) {
	l = &Lane{}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close())
			l = nil
		}
	}()
	for _, e := range []*device.Event{&l.Start, &l.End} {
		if *e, err = m.NewEvent(); err != nil {
			return l, err
		}
	}
	l.Stream, err = m.NewStream(space, device.StreamOptions{Name: name})
	return l, err
}

// Close releases what was opened.
func (l *Lane) Close() error {
	var errs []error
	if l.Stream != nil {
		errs = append(errs, l.Stream.Close())
	}
	for _, e := range []device.Event{l.Start, l.End} {
		if e != nil {
			errs = append(errs, e.Close())
		}
	}
	return errors.Join(errs...)
}

// Enqueue enqueues n operations on each lane, between its events: first number 0 of each, so
// that none waits for the host to enqueue all of another's.
func Enqueue(lanes []*Lane, n int, operation func(lane, number int) error) error {
	for _, l := range lanes {
		if err := l.Stream.Record(l.Start); err != nil {
			return err
		}
	}
	for number := range n {
		for i := range lanes {
			if err := operation(i, number); err != nil {
				return err
			}
		}
	}
	for _, l := range lanes {
		if err := l.Stream.Record(l.End); err != nil {
			return err
		}
	}
	return nil
}

// Span waits for what was enqueued on lanes, and returns the time from the first one's start
// to the last one's end, at least 1 ns.
func Span(ctx context.Context, lanes []*Lane) (time.Duration, error) {
	var first, last time.Duration
	for i, l := range lanes {
		if err := l.Stream.Synchronize(ctx); err != nil {
			return 0, err
		}
		began, err := l.Start.Time()
		if err != nil {
			return 0, err
		}
		ended, err := l.End.Time()
		if err != nil {
			return 0, err
		}
		if i == 0 || began < first {
			first = began
		}
		last = max(last, ended)
	}
	// The clock may be coarser than a copy is long.
	return max(last-first, 1), nil
}
