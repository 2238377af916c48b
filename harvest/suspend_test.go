package harvest_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
)

// TestSuspend: everything is released, nothing is borrowed until Resume, and a reader that does not
// end is named; its memory is released later all the same.
func TestSuspend(t *testing.T) {
	m := machine(t, emulated.Options{GPUs: gpus(2, 1<<20)})
	r := open(t, m, harvest.Options{Peers: peers12[:1], SlabBytes: 1024})
	borrow := func() *harvest.Handle {
		t.Helper()
		h, err := r.Alloc(1024, harvest.Hints{})
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	borrowed := func() int64 {
		t.Helper()
		u, err := m.Usage(device.HBM(1))
		if err != nil {
			t.Fatal(err)
		}
		return u.Allocated
	}
	revoked := 0
	h := borrow()
	if err := r.RegisterCallback(h, func(harvest.Revocation) { revoked++ }); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second has nothing to do
		if err := r.Suspend(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if revoked != 1 || borrowed() != 0 {
		t.Errorf("suspended: %d revocations, %d bytes borrowed", revoked, borrowed())
	}
	if _, err := r.Alloc(1024, harvest.Hints{}); !errors.Is(err, harvest.ErrNoCapacity) {
		t.Errorf("Alloc while suspended: %v", err)
	}
	r.Resume()
	h = borrow()
	ref, ok := h.Acquire(harvest.NewOwner("a reader"))
	if !ok {
		t.Fatal("no reference")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := r.Suspend(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Suspend with a reader: %v", err)
	}
	ref.Release()
	if err := r.Suspend(t.Context()); err != nil || borrowed() != 0 {
		t.Errorf("Suspend after the reader's end: %v, %d bytes borrowed", err, borrowed())
	}
	if err := r.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := r.Suspend(t.Context()); !errors.Is(err, harvest.ErrClosed) {
		t.Errorf("Suspend after Close: %v", err)
	}
}
