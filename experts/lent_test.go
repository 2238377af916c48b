package experts

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/transfer"
)

// owner is who lends memory to a store: it uses it itself when the store has none of it.
type owner struct {
	*rig
	s       *Store
	memory  device.Memory
	host    device.Memory
	fence   device.Fence
	value   uint32
	places  []*LentPlace // nil: the owner has the memory
	leaving []bool
}

// newOwner makes one for a store that is opened later, so that it is closed before.
func newOwner(r *rig, extents int) *owner {
	r.Helper()
	o := &owner{rig: r, places: make([]*LentPlace, extents), leaving: make([]bool, extents)}
	size := r.model.layout.Size
	var err error
	o.memory, err = r.m.Alloc(device.HBM(0), int64(extents)*size, "kv")
	r.ok(err)
	o.host, err = r.m.Alloc(device.Host, size, "kv below")
	r.ok(err)
	clear(o.host.Write(0, size))
	o.fence, err = r.m.NewFence("kv")
	r.ok(err)
	o.value = o.fence.Value()
	r.Cleanup(func() {
		r.ok(errors.Join(o.memory.Free(), o.host.Free(), o.fence.Close()))
	})
	return o
}

func (o *owner) region(i int) device.Region {
	return o.memory.Region(int64(i)*o.model.layout.Size, o.model.layout.Size)
}

// lend gives the store an extent, after a last use of it.
func (o *owner) lend(i int) {
	o.Helper()
	o.use(i)
	o.ok(o.compute.Synchronize(o.Context()))
	p, err := o.s.AddPlace(o.region(i))
	o.ok(err)
	o.places[i] = p
}

// use has the compute stream write and read an extent.
func (o *owner) use(i int) {
	o.Helper()
	at := o.region(i).Range
	o.ok(o.compute.Execute(device.Work{Name: "append kv", Writes: []device.Range{at}, Run: func(device.Access) error { return nil }}))
}

// load has a copy stream write an extent, which waits for nothing.
func (o *owner) load(i int) {
	o.Helper()
	o.value++
	ticket, err := o.engine.Submit(transfer.Request{
		Src: o.host.Region(0, o.model.layout.Size), Dst: o.region(i), Priority: transfer.Demand, Label: transfer.Text("load kv"),
		Done: device.Point{Fence: o.fence, Value: o.value},
	})
	o.ok(err)
	if err := ticket.Wait(o.Context()); err != nil && !errors.Is(err, device.ErrCopyFailed) {
		o.Fatal(err)
	}
}

// takeBack asks for an extent, and uses it where the store is gone from it.
func (o *owner) takeBack(i int) {
	o.Helper()
	gone, err := o.s.RemovePlace(o.places[i])
	o.ok(err)
	if o.leaving[i] = !gone; gone {
		o.places[i] = nil
		o.load(i)
	}
}

// act does anything with the extents.
func (o *owner) act(rng *rand.Rand) {
	o.Helper()
	id := ID{rng.IntN(len(o.model.layers)), rng.IntN(o.model.experts)}
	i := rng.IntN(len(o.places))
	switch n := rng.IntN(8); {
	case n < 4:
		_ = o.s.MakeResident(id) // it may be already, or have no room
	case n == 4:
		o.s.Offload(id)
	case o.places[i] == nil:
		o.lend(i)
	default:
		o.takeBack(i)
	}
	for i, leaving := range o.leaving {
		if leaving {
			o.takeBack(i)
		}
	}
}

// conserved: every resident expert is in one place, and no layer has fewer than at first.
func (o *owner) conserved(initial Placement) {
	o.Helper()
	for l, placed := range o.s.Placed() {
		own, lent := 0, 0
		for e, h := range placed {
			if h.Tier != Resident {
				continue
			}
			if !h.Lent {
				own++
				continue
			}
			lent++
			in := 0
			for _, p := range o.places {
				if p != nil {
					if s := o.s.PlaceState(p); s.Occupied && !s.Moving && s.Expert == (ID{l, e}) {
						in++
					}
				}
			}
			if in != 1 {
				o.Errorf("layer %d expert %d is in %d places", l, e, in)
			}
		}
		if want := o.model.experts - len(initial[l]); own != want {
			o.Errorf("layer %d has %d resident experts of its own and %d in lent memory, want %d of its own", l, own, lent, want)
		}
	}
}

// TestLent: an expert is resident in lent memory from the step after its copy until it is
// offloaded, or its place removed.
func TestLent(t *testing.T) {
	for n := range uint64(8) {
		r := newRig(t, small([]string{rowMajor, "reversed"}[n%2]), machine(n), 200)
		r.lend()
		o := newOwner(r, 2)
		s := r.open(Config{Placement: r.placed(0.5)}) // also without dynamic residency
		r.fill(s, 11)
		o.s = s
		r.steps(s, 1, true)
		if err := s.MakeResident(ID{0, 1}); !errors.Is(err, ErrBusy) {
			t.Errorf("without a place: %v", err)
		}
		o.lend(0)
		o.lend(1)
		r.ok(s.MakeResident(ID{0, 1}))
		r.ok(s.MakeResident(ID{3, 5}))
		for _, c := range []struct {
			id   ID
			want string
		}{{ID{1, 1}, "no place is free"}, {ID{0, 0}, "the expert is resident"}, {ID{3, 5}, ""}, {ID{9, 0}, "the model has 5 layers"}} {
			if err := s.MakeResident(c.id); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		}
		r.ok(s.WaitMoves(t.Context()))
		r.steps(s, 2, true)
		if got, want := letters(tiersOf(s.Placed())), "rrrhrh rhrhrh rhrhrh rhrhrr rhrhrh"; got != want {
			t.Errorf("%s, want %s", got, want)
		}
		if st := s.Stats(); st.MadeResident != 2 || st.Offloaded != 0 {
			t.Errorf("%+v", st)
		}
		o.takeBack(0)
		if o.places[0] != nil {
			t.Error("memory is not returned between steps")
		}
		s.Offload(ID{3, 5})
		if s.FreePlaces() != 1 {
			t.Errorf("%d places are free", s.FreePlaces())
		}
		r.ok(s.MakeResident(ID{3, 3}))
		o.takeBack(1) // in the middle of the copy, unless that has ended
		r.steps(s, 2, true)
		if o.takeBackAll(); slices.ContainsFunc(o.places, func(p *LentPlace) bool { return p != nil }) {
			t.Error("memory is not returned when the copy has ended")
		}
		if got, want := letters(tiersOf(s.Placed())), "rhrhrh rhrhrh rhrhrh rhrhrh rhrhrh"; got != want {
			t.Errorf("%s, want %s", got, want)
		}
		c := choices(rand.New(rand.NewPCG(n, 1)), r.model)
		out, err := r.routedStep(s, c, 0)
		r.ok(err)
		r.verifyRouted(s, c, out)
	}
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 200)
	s := r.open(Config{Placement: r.placed(0.5)})
	if _, err := s.AddPlace(place(device.HBM(0), device.Alignment, r.model.layout.Size)); err == nil {
		t.Error("a place before the experts are loaded")
	}
	r.fill(s, 11)
	for _, bad := range []device.Region{
		place(device.Host, device.Alignment, r.model.layout.Size),
		place(device.HBM(0), device.Alignment, r.model.layout.Size-1),
		place(device.HBM(0), 1, r.model.layout.Size),
	} {
		if _, err := s.AddPlace(bad); err == nil {
			t.Errorf("a place at %+v", bad)
		}
	}
}

func place(s device.Space, at device.Addr, bytes int64) device.Region {
	return device.Region{Space: s, Range: device.Range{Addr: at, Bytes: bytes}}
}

// takeBackAll takes back what is not returned yet.
func (o *owner) takeBackAll() {
	o.Helper()
	for i, p := range o.places {
		if p != nil {
			o.takeBack(i)
		}
	}
}

// TestLentAtAnyTime: memory is lent and taken back in any order, in steps and between them, while
// experts come, go and are swapped and copies fail, and fences wrap. Steps compute the same, and
// the owner's use of returned memory is ordered after the last reader's.
func TestLentAtAnyTime(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		seed := rapid.Uint64Range(0, 1<<20).Draw(rt, "seed")
		mo := emulated.Options{Virtual: true, Schedule: emulated.Schedule(rapid.IntRange(0, 2).Draw(rt, "schedule")), Seed: seed, FenceStart: rapid.SampledFrom([]uint32{0, 1<<31 - 20, 1<<32 - 20}).Draw(rt, "fences")}
		fraction := rapid.SampledFrom([]float64{0.3, 0.5, 1}).Draw(rt, "fraction")
		c := Config{Dynamic: rapid.Bool().Draw(rt, "dynamic"), Waves: rapid.IntRange(1, 4).Draw(rt, "waves")}
		steps, faults := rapid.IntRange(2, 12).Draw(rt, "steps"), rapid.Bool().Draw(rt, "faults")
		if !t.Run("", func(t *testing.T) {
			r := newRig(t, small(rowMajor), mo, 200)
			r.lend()
			c.Placement = r.placed(fraction)
			o := newOwner(r, 4)
			s := r.open(c)
			r.fill(s, 11)
			o.s = s
			rng := rand.New(rand.NewPCG(seed, 7))
			for range steps {
				for range rng.IntN(6) {
					o.act(rng)
				}
				if c.Dynamic {
					a := ID{rng.IntN(len(r.model.layers)), rng.IntN(r.model.experts)}
					_ = s.Swap(a, ID{a.Layer, rng.IntN(r.model.experts)})
				}
				if faults && rng.IntN(2) == 0 {
					r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: 1 + rng.IntN(2), Skip: rng.IntN(9)})
				}
				if rng.IntN(3) == 0 {
					o.stepWith(rng)
				} else {
					r.anyStep(s, rng)
				}
				o.conserved(c.Placement)
			}
			for range 3 {
				o.takeBackAll()
				r.anyStep(s, rng)
			}
		}) {
			rt.FailNow()
		}
	})
}

// stepWith is a step while whose layers are computed memory is lent and taken back.
func (o *owner) stepWith(rng *rand.Rand) {
	o.Helper()
	st, err := o.s.BeginStep(o.Context(), o.compute)
	if err == nil {
		o.last = st
		var out []map[int]uint32
		if out, err = o.enqueue(o.s, st, true, 10); err == nil {
			for i, p := range o.places {
				if p == nil {
					continue
				}
				gone, err := o.s.RemovePlace(p)
				o.ok(err)
				if o.leaving[i] = !gone; gone {
					o.places[i] = nil
					o.load(i)
				}
			}
			_ = o.s.MakeResident(ID{rng.IntN(len(o.model.layers)), rng.IntN(o.model.experts)})
			if err = o.end(st); err == nil {
				o.verify(out)
			}
		}
	}
	if err != nil {
		o.drop()
	}
}
