package pipeline

import (
	"context"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
)

// source is something that a step's results come from and whose failure the compute stream
// may not know of: where fences hand errors to the host alone, the stream has run on over
// what never came. A step asks all of its sources before it counts.
type source interface {
	// Err is why the step is not to be believed. It is asked once the compute stream has
	// ended the step.
	Err(ctx context.Context) error
	// Reset waits until nothing of a failed step runs, and clears what that has left,
	// so that the step can be run again. It returns the error that the source was in, if it
	// knows, as device.Stream.Recover does.
	Reset(ctx context.Context) error
}

// storeStep is the part of a step that the store of experts has.
type storeStep struct{ experts.Step }

// Err implements source. Where there is no error, the store's part of the step ends.
func (s *storeStep) Err(context.Context) error { return s.End() }

// Reset implements source.
func (s *storeStep) Reset(ctx context.Context) error { return s.Drop(ctx) }

// loads are the points that a step waits for before it reads keys and values.
type loads []device.Point

// Err implements source.
func (l *loads) Err(ctx context.Context) error {
	for _, p := range *l {
		if err := p.Await(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Reset implements source: a load belongs to whoever began it.
func (l *loads) Reset(context.Context) error { return nil }
