package experts

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/moeserve/moeserve/device/emulated"
)

// TestDropWaitsWithoutTheLock: while a step that is dropped waits for its copies, others can
// ask the store.
func TestDropWaitsWithoutTheLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, small(rowMajor), emulated.Options{}, 200)
		s := r.open(Config{Placement: r.placed(1), CacheSlots: 2 * r.model.experts})
		r.fill(s, 11)
		stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Times: -1})
		st, err := s.BeginStep(t.Context(), r.compute)
		r.ok(err)
		r.ok(st.Prefetch(r.model.layers[1]))
		dropped := make(chan error, 1)
		go func() { dropped <- st.Drop(context.Background()) }()
		synctest.Wait() // for the copies
		if s.mu.TryLock() {
			s.mu.Unlock()
		} else {
			t.Error("the store is locked")
		}
		stall.Release()
		r.ok(<-dropped)
	})
}
