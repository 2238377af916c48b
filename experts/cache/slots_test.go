package cache

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/lease"
)

// TestSlots compares Slots with a model: random assignments, acquires, releases and failed copies.
func TestSlots(t *testing.T) {
	m, err := emulated.New(emulated.Options{Virtual: true})
	if err != nil {
		t.Fatal(err)
	}
	fence, err := m.NewFence("readers")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	type modelSlot struct {
		holds int
		refs  []lease.Ref
		until []device.Point
	}
	rapid.Check(t, func(t *rapid.T) {
		slots, experts := rapid.IntRange(1, 6).Draw(t, "slots"), rapid.IntRange(1, 12).Draw(t, "experts")
		r, want, next, value := New(slots, experts), make([]modelSlot, slots), 0, uint32(0)
		for i := range want {
			want[i].holds = -1
		}
		where := func(e int) int { return slices.IndexFunc(want, func(s modelSlot) bool { return s.holds == e }) }
		for range rapid.IntRange(0, 60).Draw(t, "actions") {
			e := rapid.IntRange(0, experts-1).Draw(t, "expert")
			at := where(e)
			if r.Has(e) != (at >= 0) || at >= 0 && r.LastSlot(e) != at {
				t.Fatalf("expert %d: has %t in slot %d, want slot %d", e, r.Has(e), r.LastSlot(e), at)
			}
			switch rapid.IntRange(0, 5).Draw(t, "action") {
			case 0, 1:
				if at >= 0 {
					ref, ok := r.Acquire(e)
					if !ok {
						t.Fatalf("expert %d cannot be acquired", e)
					}
					want[at].refs = append(want[at].refs, ref)
					continue
				}
				if _, ok := r.Acquire(e); ok {
					t.Fatalf("expert %d is not cached, and was acquired", e)
				}
				free := -1
				for k := 0; k < slots && free < 0; k++ {
					if i := (next + k) % slots; len(want[i].refs) == 0 {
						free = i
					}
				}
				got, ok := r.NextFree()
				if ok != (free >= 0) || ok && got != free {
					t.Fatalf("slot %d is free (%t), want %d", got, ok, free)
				}
				if !ok {
					continue
				}
				ref, after := r.Assign(free, e, nil)
				if !slices.Equal(after, want[free].until) {
					t.Fatalf("slot %d: until %v, want %v", free, after, want[free].until)
				}
				want[free] = modelSlot{holds: e, refs: []lease.Ref{ref}}
				next = (free + 1) % slots
			case 2, 3:
				at := rapid.IntRange(0, slots-1).Draw(t, "slot")
				s := &want[at]
				if r.References(at) != len(s.refs) || r.Expert(at) != s.holds {
					t.Fatalf("slot %d holds %d with %d references, want %+v", at, r.Expert(at), r.References(at), s)
				}
				if n := len(s.refs); n > 0 {
					value++
					p := device.Point{Fence: fence, Value: value}
					s.refs[n-1].ReleaseAt(p)
					s.refs, s.until = s.refs[:n-1], []device.Point{p}
				}
			case 5:
				for i := range want {
					want[i].until = nil
				}
				r.ForgetReaders()
			case 4:
				for i := range want {
					for k := range want[i].refs {
						want[i].refs[k].Release()
					}
					want[i].refs, want[i].until = nil, nil
				}
				if at >= 0 {
					r.Clear(at)
					want[at].holds = -1
				}
				r.Reset()
			}
		}
	})
	if err := fence.Close(); err != nil {
		t.Fatal(err)
	}
}
