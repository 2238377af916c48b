package harvest_test

import (
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
)

// TestStepReader: what is freed or revoked within a step stays until the step has ended, whatever
// steps follow, and is reported where that takes too long; the version changes for the client's
// handles alone.
func TestStepReader(t *testing.T) {
	m := machine(t, emulated.Options{Virtual: true, Check: true, GPUs: gpus(2, 1<<20)})
	var missed []string
	r := open(t, m, harvest.Options{
		Peers: []device.Space{device.HBM(1)}, SlabBytes: 1024, HeadroomBytes: -1, Cooldown: -1, Deadline: time.Millisecond,
		Events: harvest.EventListener{DeadlineMissed: func(i harvest.DeadlineMissInfo) {
			for _, o := range i.Owners {
				missed = append(missed, o.Owner)
			}
		}},
	})
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	alloc := func(client string) *harvest.Handle {
		t.Helper()
		h, err := r.Alloc(512, harvest.Hints{Client: client})
		ok(err)
		return h
	}
	used := func() int64 { return r.State().Peers[0].Used }
	reader := r.NewStepReader("experts", harvest.NewOwner("kernels"))
	a, b, other := alloc("experts"), alloc("experts"), alloc("kv")

	version := reader.Begin()
	if available, _ := a.State(); !available {
		t.Fatal("a handle is not available")
	}
	before := used()
	ok(r.Free(a))
	if available, _ := a.State(); available {
		t.Error("a freed handle is available")
	}
	_, err := r.Tick(m.Now())
	ok(err)
	if used() != before {
		t.Errorf("%d bytes are used after a Free within a step, and %d before", used(), before)
	}
	reader.End()
	// The next step, which does not read it, delays nothing.
	if next := reader.Begin(); next == version {
		t.Error("the version is the same after a Free")
	} else {
		version = next
	}
	_, err = r.Tick(m.Now())
	ok(err)
	if used() != before-512 {
		t.Errorf("%d bytes are used after the step, want %d", used(), before-512)
	}
	ok(r.Free(other))
	reader.End()
	if next := reader.Begin(); next != version {
		t.Error("the version changes for another client's handle")
	}

	// Within this step b's slab is revoked.
	revoke := func(h *harvest.Handle, within, later time.Duration) *harvest.Reclamation {
		t.Helper()
		request, err := r.Reclaim(device.HBM(1), 1<<20, within)
		ok(err)
		for range 5 {
			_, err = r.Tick(m.Now() + later)
			ok(err)
		}
		if available, _ := h.State(); available || request.Done() {
			t.Errorf("the handle is available: %t; its slab is released while a step reads it: %t", available, request.Done())
		}
		return request
	}
	request := revoke(b, time.Minute, 0)
	reader.End()
	if reader.Begin() == version {
		t.Error("the version is the same after a revocation")
	}
	ok(request.Wait(t.Context()))
	if missed != nil {
		t.Errorf("deadlines were missed by %q", missed)
	}
	revoke(alloc("experts"), time.Millisecond, time.Second)
	if strings.Join(missed, " ") != "kernels" {
		t.Errorf("the deadline was missed by %q, want kernels", missed)
	}
	reader.End()
	for _, f := range []func(){reader.End, func() { reader.Begin(); reader.Begin() }} {
		func() {
			defer func() {
				if recover() == nil {
					t.Error("no panic for steps that are not in order")
				}
			}()
			f()
		}()
	}
}
