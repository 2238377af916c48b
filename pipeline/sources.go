package pipeline

import (
	"context"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
)

// source is where some of a step's results come from, and whose failure the compute stream
// may not see: where fences report errors to the host alone, the stream has run on over data
// that never arrived. A step checks all of its sources before it returns results.
type source interface {
	// Err returns why the step's results are invalid, or nil. It is called once the compute
	// stream has ended the step.
	Err(ctx context.Context) error
	// Reset waits until nothing of a failed step runs, and cleans up, so that the step can be
	// run again. It returns the source's error, if it knows it, as device.Stream.Recover
	// does.
	Reset(ctx context.Context) error
}

// storeStep is the expert store's part of a step.
type storeStep struct {
	experts.Step
	// continues: the next step is enqueued, and is a part of this one to the store.
	continues bool
}

// Err implements source. Without an error it ends the store's part of the step.
func (s *storeStep) Err(context.Context) error {
	if s.continues {
		return nil
	}
	return s.End()
}

// Reset implements source.
func (s *storeStep) Reset(ctx context.Context) error { return s.Drop(ctx) }

// kvLoads are the points that a step waits for before it reads the KV cache.
type kvLoads []device.Point

// Err implements source.
func (l *kvLoads) Err(ctx context.Context) error {
	for _, p := range *l {
		if err := p.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Reset implements source. Loads belong to their owner, so there is nothing to clean up.
func (l *kvLoads) Reset(context.Context) error { return nil }
