package experts

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
)

// inPlace enqueues a step in place; here is called at each point of it.
func (r *rig) inPlace(s *Store, here func()) (Step, []map[int]uint32) {
	r.Helper()
	st := r.begin(s)
	r.last = st
	here()
	st, err := st.ReadInPlace()
	r.ok(err)
	here()
	out := make([]map[int]uint32, len(r.model.layers))
	for i, l := range r.model.layers {
		out[i] = map[int]uint32{}
		u, err := st.Layer(r.Context(), l)
		r.ok(err)
		r.ok(st.Prefetch(s.plan.Next(l)))
		if len(u.Waves) != 1 || len(u.Waves[0].WaitFor) != 0 {
			r.Errorf("layer %d has waves %+v", l, u.Waves)
		}
		r.ok(r.gemms(u.Slots, u.Waves[0], 100, out[i]))
		here()
		r.ok(u.Release())
	}
	return st, out
}

// TestInPlaceRevokedAtEveryPoint: peer copies are revoked before, during and after a step that
// reads them in place: the step reads the right bytes, its end releases them, and the next step
// reads the host's.
func TestInPlaceRevokedAtEveryPoint(t *testing.T) {
	for _, schedule := range []emulated.Schedule{emulated.Eager, emulated.Lazy, emulated.Random} {
		at, during := 0, 0
		for ; ; at++ {
			there, waited := inPlaceRevokedAt(t, schedule, at)
			if !there {
				break
			}
			if waited {
				during++
			}
		}
		if at < 5 || during < 3 {
			t.Errorf("%v: a step has %d points, and at %d of them a revocation waits for it", schedule, at, during)
		}
	}
}

func inPlaceRevokedAt(t *testing.T, schedule emulated.Schedule, at int) (there, waited bool) {
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true, Schedule: schedule, Seed: uint64(at), GPUs: []emulated.GPU{{FlopsPerSecond: 1e6}, {}, {}}}, 200)
	r.lend()
	s := r.open(Config{Placement: r.placed(0.5), InPlace: true})
	r.fill(s, 11)
	r.promote(s, offloaded(s)...)
	point := 0
	var revoked []*harvest.Reclamation
	tick := func() {
		for range 5 {
			_, err := r.harvest.Tick(r.m.Now())
			r.ok(err)
		}
	}
	begun := false
	st, out := r.inPlace(s, func() {
		if point++; point-1 != at {
			begun = true
			return
		}
		for _, p := range []device.Space{device.HBM(1), device.HBM(2)} {
			c, err := reclaimMore(r.harvest, p, 1<<20, time.Minute)
			r.ok(err)
			revoked = append(revoked, c)
		}
		tick()
		for _, c := range revoked {
			waited = waited || !c.Done()
		}
		if begun && at > 0 && !waited {
			t.Errorf("%v: memory that the step reads is released at point %d", schedule, at)
		}
	})
	r.ok(r.end(st))
	r.verify(out)
	for _, c := range revoked {
		r.ok(c.Wait(t.Context()))
	}
	if revoked != nil {
		before := s.Stats().ReadInPlace
		st, out = r.inPlace(s, func() {})
		r.ok(r.end(st))
		r.verify(out)
		r.routed(s, 1)
		if now := s.Stats().ReadInPlace; now[Peer] != before[Peer] || now[Host] == before[Host] || strings.Contains(letters(s.Residency()), "p") {
			t.Errorf("after the revocation: %v bytes read in place, before %v; %s", now, before, letters(s.Residency()))
		}
	}
	return revoked != nil, waited
}

// routed tells the store that every expert got so many tokens more.
func (r *rig) routed(s *Store, more int64) {
	last := r.model.layers[len(r.model.layers)-1]
	counts := make([]int64, (last+1)*r.model.experts)
	for i, l := range r.model.layers {
		for e, n := range s.RoutedTokens()[i] {
			counts[l*r.model.experts+e] = n + more
		}
	}
	s.AddRoutedTokens(counts)
}

// declared stands for GEMMs as rig.gemms does, but only tells the checker what it reads: the
// memory may be gone.
func (r *rig) declared(u Use) error {
	return r.compute.Execute(device.Work{Name: "gemms", Reads: []device.Range{u.Slots.Range()}, Flops: 100, Run: func(a device.Access) error {
		table := at(u.Slots.Addr, u.Slots.Bytes())
		for e := range r.model.experts {
			a.Read(device.Range{Addr: device.Addr(binary.NativeEndian.Uint64(table[8*e:])), Bytes: r.model.layout.Bytes()})
		}
		return nil
	}})
}

// TestInPlaceSafeguard: the checker finds nothing wrong with steps in place over copies that are
// revoked, and does with those that hold no reference on them.
func TestInPlaceSafeguard(t *testing.T) {
	for _, held := range []bool{true, false} {
		found := false
		for seed := uint64(0); seed < 6 && !found; seed++ {
			o := emulated.Options{
				Virtual: true, Schedule: emulated.Schedule(seed % 3), Seed: seed, GPUs: []emulated.GPU{{FlopsPerSecond: 1e6}, {}, {}},
				Report: func(emulated.Finding) { found = true },
			}
			r := newRig(t, small(rowMajor), o, 100)
			r.lend()
			s := r.open(Config{Placement: r.placed(0.5), InPlace: true})
			r.fill(s, 11)
			for range 4 {
				for _, id := range offloaded(s) {
					_ = s.Promote(id, PromoteOptions{}) // it may be there
				}
				r.ok(s.WaitMoves(t.Context()))
				st, err := r.begin(s).ReadInPlace()
				r.ok(err)
				for _, l := range r.model.layers {
					u, err := st.Layer(t.Context(), l)
					r.ok(err)
					r.ok(r.declared(u))
					r.ok(u.Release())
				}
				if !held {
					s.steps.endInPlace()
				}
				for k := range 2 {
					_, err := reclaimMore(r.harvest, device.HBM(1+k), 4096, time.Second)
					r.ok(err)
				}
				for range 5 {
					_, err := r.harvest.Tick(r.m.Now())
					r.ok(err)
				}
				if r.end(st) != nil {
					found = true
					break
				}
			}
		}
		if found == held {
			t.Errorf("steps hold what they read: %t; something was found: %t", held, found)
		}
	}
}

// TestInPlaceUploads: the tables are uploaded by one copy, and only if something has moved since
// the step before.
func TestInPlaceUploads(t *testing.T) {
	copies := 0
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true, Trace: func(x emulated.Trace) {
		if x.Stream == "compute" && x.Op == "copy" {
			copies++
		}
	}}, 200)
	r.lend()
	s := r.open(Config{Placement: r.placed(0.5), InPlace: true, Dynamic: true, CacheSlots: 4})
	r.fill(s, 11)
	step := func(what string, want int) {
		t.Helper()
		before := copies
		st, out := r.inPlace(s, func() {})
		r.ok(r.end(st))
		r.verify(out)
		if copies-before != want {
			t.Errorf("%s: %d copies on the compute stream, want %d", what, copies-before, want)
		}
	}
	step("first", 1)
	step("nothing moved", 0)
	id := offloaded(s)[0]
	r.promote(s, id)
	step("promoted", 1)
	step("nothing moved", 0)
	r.ok(s.Demote(id))
	step("demoted", 1)
	r.steps(s, 1, false)
	step("fetched into the expert cache", 1)
	step("nothing moved", 0)
	in := offloaded(s)[0]
	out := ID{in.Layer, 0}
	for !s.places.resident(out) {
		out.Expert++
	}
	r.ok(s.Swap(in, out))
	r.ok(s.WaitMoves(t.Context()))
	step("swapped", 1)
	step("nothing moved", 0)
}

// TestInPlaceUses: a step in place uses the experts that got tokens, from where they lie.
func TestInPlaceUses(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 200)
	r.lend()
	s := r.open(Config{Placement: r.placed(0.5), InPlace: true})
	r.fill(s, 11)
	all := offloaded(s)
	r.promote(s, all[0])
	st, out := r.inPlace(s, func() {})
	r.ok(r.end(st))
	r.verify(out)
	r.routed(s, 3)
	r.routed(s, 3) // of a step that was not in place
	n, size := len(r.model.layers)*r.model.experts, r.model.layout.Size
	want := Stats{Uses: ByTier{Resident: int64(n - len(all)), Peer: 1, Host: int64(len(all) - 1)}, ReadInPlace: FetchedBytes{Peer: size, Host: size * int64(len(all)-1)}}
	if got := s.Stats(); got.Uses != want.Uses || got.ReadInPlace != want.ReadInPlace || got.Fetched != (FetchedBytes{}) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// TestInPlaceUsesDropped: a failed step in place counts no uses, also where the step after it is not
// in place.
func TestInPlaceUsesDropped(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 200)
	s := r.open(Config{Placement: r.placed(0.5), InPlace: true})
	r.fill(s, 11)
	r.inPlace(s, func() {})
	r.drop()
	r.steps(s, 1, false)
	want := s.Stats()
	r.routed(s, 1)
	if got := s.Stats(); got.Uses != want.Uses || got.ReadInPlace != (FetchedBytes{}) {
		t.Errorf("uses of a step that copied are %v and %v bytes read in place, want %v and none", got.Uses, got.ReadInPlace, want.Uses)
	}
}

// TestInPlaceRefused: without tables or mapped host memory the store says so; peers that kernels
// cannot read are left out.
func TestInPlaceRefused(t *testing.T) {
	m := small(rowMajor)
	r := newRig(t, m, emulated.Options{Virtual: true}, 200)
	s := r.open(Config{Placement: r.placed(0.5)})
	if err := s.InPlace(); !errors.Is(err, ErrNotInPlace) {
		t.Errorf("without tables: %v", err)
	}
	r.fill(s, 11)
	st := r.begin(s)
	if _, err := st.ReadInPlace(); !errors.Is(err, ErrNotInPlace) {
		t.Errorf("without tables: %v", err)
	}
	r.ok(r.end(st))
	r = newRig(t, m, emulated.Options{Virtual: true, NotMapped: []device.Space{device.Host}}, 200)
	s = r.open(Config{Placement: r.placed(0.5), InPlace: true})
	if err := s.InPlace(); !errors.Is(err, ErrNotInPlace) || !errors.Is(err, device.ErrUnreachable) {
		t.Errorf("host memory that is not mapped: %v", err)
	}
	r = newRig(t, m, emulated.Options{Virtual: true}, 200)
	s = r.open(Config{Placement: r.placed(0), InPlace: true})
	if err := s.InPlace(); !errors.Is(err, ErrNotInPlace) {
		t.Errorf("nothing is offloaded: %v", err)
	}
}

// TestInPlaceAnyHistory mixes steps in place with others, promotions, demotions, revocations,
// swaps and lost peers: every step reads the right bytes.
func TestInPlaceAnyHistory(t *testing.T) {
	for seed := range uint64(24) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 5))
			r := newRig(t, small(rowMajor), emulated.Options{
				Virtual: true, Schedule: emulated.Schedule(seed % 3), Seed: seed, FenceStart: uint32(rng.Uint64()),
				HostLink: emulated.Link{BytesPerSecond: 1e8}, PeerLink: emulated.Link{BytesPerSecond: 1e9}, GPUs: []emulated.GPU{{FlopsPerSecond: 1e9}, {}, {}},
			}, 200)
			r.lend()
			s := r.open(Config{Placement: r.placed([]float64{0.25, 0.5, 1}[rng.IntN(3)]), InPlace: true, Dynamic: true})
			r.fill(s, 11)
			lost, direct := false, 0
			for n := range 40 {
				for range rng.IntN(4) {
					all := offloaded(s)
					id := all[rng.IntN(len(all))]
					switch rng.IntN(7) {
					case 0, 1, 2:
						_ = s.Promote(id, PromoteOptions{})
					case 3:
						r.ok(s.Demote(id))
					case 4:
						_ = s.Swap(id, ID{id.Layer, rng.IntN(r.model.experts)})
					case 5:
						_, err := reclaimMore(r.harvest, device.HBM(1+rng.IntN(2)), int64(rng.IntN(8192)), time.Second)
						r.ok(err)
					}
					s.Poll()
				}
				if n == 25 && seed%4 == 0 {
					r.ok(r.m.Lose(1))
					lost = true
				}
				for try := 0; ; try++ {
					if try == 10 {
						t.Fatalf("step %d fails again and again", n)
					}
					var out []map[int]uint32
					var err error
					if rng.IntN(3) > 0 {
						direct++
						var st Step
						st, out = r.inPlace(s, func() { _, _ = r.harvest.Tick(r.m.Now()) })
						err = r.end(st)
					} else {
						out, err = r.step(s, rng.IntN(2) == 0, 100)
					}
					if err == nil {
						r.verify(out)
						break
					}
					if !lost {
						t.Fatal(err)
					}
					r.drop()
				}
			}
			if direct == 0 {
				t.Error("no step in place")
			}
		})
	}
}
