package experts

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/transfer"
)

// lend gives the rig a harvest over its peers.
func (r *rig) lend(change ...func(*harvest.Options)) {
	r.Helper()
	o := harvest.Options{
		Machine: r.m, Peers: []device.Space{device.HBM(1), device.HBM(2)},
		SlabBytes: 4 * r.model.layout.Size, HeadroomBytes: -1, Cooldown: -1,
	}
	for _, c := range change {
		c(&o)
	}
	h, err := harvest.New(o)
	if err != nil {
		r.Fatal(err)
	}
	r.harvest = h
}

func (r *rig) ok(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// promote brings the experts to peers' memory and waits until they are there.
func (r *rig) promote(s *Store, ids ...ID) {
	r.Helper()
	for _, id := range ids {
		r.ok(s.Promote(id, PromoteOptions{}))
	}
	r.ok(s.WaitMoves(r.Context()))
}

// offloaded lists the store's offloaded experts.
func offloaded(s *Store) (ids []ID) {
	for i, homes := range s.Placed() {
		for e, h := range homes {
			if h.Tier != Resident {
				ids = append(ids, ID{i, e})
			}
		}
	}
	return ids
}

// letters shows a tier per expert, by its first letter.
func letters(where [][]Tier) string {
	var b strings.Builder
	for _, l := range where {
		for _, tier := range l {
			b.WriteByte(tier.String()[0])
		}
		b.WriteByte(' ')
	}
	return strings.TrimSpace(b.String())
}

// TestPeerTier: what lies in peers' memory is fetched from there, and from the host
// again when it was revoked.
func TestPeerTier(t *testing.T) {
	for n := range uint64(4) {
		r := newRig(t, small(rowMajor), machine(n), 200)
		r.lend()
		s := r.open(Config{Placement: r.placed(0.5), CacheSlots: 4})
		r.fill(s, 11)
		all := offloaded(s)
		if got, want := letters(s.Residency()), "rhrhrh rhrhrh rhrhrh rhrhrh rhrhrh"; got != want {
			t.Fatalf("%s, want %s", got, want)
		}
		r.promote(s, all[:10]...)
		if got, want := letters(s.Residency()), "rprprp rprprp rprprp rprhrh rhrhrh"; got != want {
			t.Fatalf("%s, want %s", got, want)
		}
		size := r.model.layout.Size
		for round, want := range []struct{ peer, host int64 }{{10, 5}, {10, 5}, {0, 15}} {
			if round == 2 {
				for _, p := range []device.Space{device.HBM(1), device.HBM(2)} {
					c, err := reclaimMore(r.harvest, p, 1<<20, time.Minute)
					r.ok(err)
					r.ok(c.Wait(t.Context()))
				}
				if got := letters(s.Residency()); strings.Contains(got, "p") {
					t.Fatalf("after a revocation: %s", got)
				}
			}
			before := s.Stats()
			r.steps(s, 1, false)
			after := s.Stats()
			peer, host := (after.Fetched[Peer]-before.Fetched[Peer])/size, (after.Fetched[Host]-before.Fetched[Host])/size
			hits := after.Uses[Peer] - before.Uses[Peer]
			if peer != want.peer || host != want.host || hits != want.peer {
				t.Errorf("round %d: %d experts from peers (%d hits), %d from the host; want %d and %d", round, peer, hits, host, want.peer, want.host)
			}
		}
		st := s.Stats()
		if st.Promoted != 10 || st.Revoked != 10 || st.Demoted != 0 || st.MigratedBytes != 10*size {
			t.Errorf("%+v", st)
		}
		// There is room again.
		r.promote(s, all...)
		r.ok(s.Demote(all[0]))
		r.ok(s.Demote(all[0]))
		r.steps(s, 2, true)
		if st := s.Stats(); st.Demoted != 1 || st.Failed != 0 {
			t.Errorf("%+v", st)
		}
	}
}

// TestSlabsSideBySide: where two slabs lie side by side, experts at
// their ends are not copied together. A machine that checks keeps allocations apart, so
// this one does not.
func TestSlabsSideBySide(t *testing.T) {
	m := small(rowMajor)
	m.layout.Size = int64(os.Getpagesize())
	neighbors := 0
	for _, backwards := range []bool{false, true} {
		r := newBareRig(t, m, emulated.Options{Virtual: true}, 1<<20)
		r.lend(func(o *harvest.Options) { o.Peers, o.SlabBytes = o.Peers[:1], m.layout.Size })
		s := r.open(Config{Placement: r.placed(1), CacheSlots: 6})
		r.fill(s, 11)
		ids := offloaded(s)
		if backwards {
			slices.Reverse(ids)
		}
		r.promote(s, ids...)
		for _, id := range ids {
			if next := (ID{id.Layer, id.Expert + 1}); next.Expert < m.experts {
				a, b := s.peers.Find(id), s.peers.Find(next)
				if a.Region().End() == b.Region().Addr && a.Slab() != b.Slab() {
					neighbors++
				}
			}
		}
		r.steps(s, 2, false)
	}
	if neighbors == 0 {
		t.Skip("the system puts no two pieces of memory side by side")
	}
}

// TestPromoteRefused: what cannot be promoted says why.
func TestPromoteRefused(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true, GPUs: []emulated.GPU{{}, {MemoryBytes: 1 << 20}, {MemoryBytes: 1 << 20}}}, 200)
	r.lend(func(o *harvest.Options) { o.Peers = o.Peers[:1]; o.HeadroomBytes = 1<<20 - 3*512 })
	s := r.open(Config{Placement: r.placed(0.5)})
	wants := func(err, is error, text string) {
		t.Helper()
		if !errors.Is(err, is) || !strings.Contains(err.Error(), text) {
			t.Errorf("got %v, want %v with %q", err, is, text)
		}
	}
	if err := s.Promote(ID{0, 1}, PromoteOptions{}); err == nil || !strings.Contains(err.Error(), "not sealed") {
		t.Errorf("got %v", err)
	}
	r.fill(s, 11)
	wants(s.Promote(ID{0, 0}, PromoteOptions{}), ErrBusy, "layer 0 expert 0: the expert is resident")
	r.promote(s, ID{0, 1})
	wants(s.Promote(ID{0, 1}, PromoteOptions{}), ErrBusy, "promote layer 0 expert 1")
	wants(s.Promote(ID{0, 3}, PromoteOptions{Peers: []device.Space{device.HBM(2)}}), harvest.ErrNoCapacity, "gpu1 is not among")
	r.promote(s, ID{0, 3}, ID{0, 5})
	wants(s.Promote(ID{1, 1}, PromoteOptions{}), harvest.ErrNoCapacity, "layer 1 expert 1")
	if err := s.Promote(ID{5, 0}, PromoteOptions{}); err == nil || !strings.Contains(err.Error(), "5 layers of 6 experts") {
		t.Errorf("got %v", err)
	}
	without := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 200)
	s = without.open(Config{Placement: without.placed(1)})
	without.fill(s, 11)
	wants(s.Promote(ID{0, 0}, PromoteOptions{}), harvest.ErrNoCapacity, "no peer memory is configured")
	r.ok(s.Demote(ID{0, 0}))
}

// newRoutedRig has a store of varied sizes, picked by seed, with peer copies of half of its
// offloaded experts.
func newRoutedRig(t *testing.T, seed uint64, o emulated.Options) (*rig, *Store) {
	t.Helper()
	r := newRig(t, small(rowMajor), o, 300)
	r.lend()
	s := r.open(Config{Placement: r.placed([]float64{0.4, 0.7, 1}[seed%3]), CacheSlots: []int{0, 6, 12}[seed%3], Waves: 1 + int(seed)%4})
	r.fill(s, 11)
	all := offloaded(s)
	r.promote(s, all[:len(all)/2]...)
	return r, s
}

// choice is what the tokens of a step are routed to in each layer, and what is predicted of
// it one layer ahead.
type choice struct{ chosen, predicted [][]int32 }

func choices(rng *rand.Rand, m model) choice {
	some := func() (list []int32) {
		for range rng.IntN(m.experts + 2) {
			list = append(list, int32(rng.IntN(m.experts)))
		}
		return list
	}
	var c choice
	for range m.layers {
		c.chosen, c.predicted = append(c.chosen, some()), append(c.predicted, some())
	}
	return c
}

// routedStep runs a step that fetches only what is routed to, which the host learns when
// the stream has come to each layer.
func (r *rig) routedStep(s *Store, c choice, flops int64) ([]map[int]uint32, error) {
	routed, err := r.m.NewEvent()
	if err != nil {
		return nil, err
	}
	defer func() { r.ok(routed.Close()) }()
	st, err := s.BeginStep(r.Context(), r.compute)
	if err != nil {
		return nil, err
	}
	r.last = st
	out := make([]map[int]uint32, len(r.model.layers))
	for i, l := range r.model.layers {
		out[i] = map[int]uint32{}
		open, err := st.LayerUnrouted(r.Context(), l)
		if err != nil {
			return nil, err
		}
		if err := r.compute.Execute(device.Work{Name: "attention", Flops: 4 * flops}); err != nil {
			return nil, err
		}
		if err := r.compute.Record(routed); err != nil {
			return nil, err
		}
		for _, w := range open.Waves {
			if err := r.gemms(open.Slots, w, flops*int64(w.Experts.Shape[0]), out[i]); err != nil {
				return nil, err
			}
		}
		if err := routed.Synchronize(r.Context()); err != nil {
			return nil, err
		}
		use, err := open.FetchChosen(r.Context(), c.chosen[i])
		if err != nil {
			return nil, err
		}
		next := (i + 1) % len(r.model.layers)
		if err := st.PrefetchPredicted(r.model.layers[next], c.predicted[next]); err != nil {
			return nil, err
		}
		for _, w := range use.Waves {
			if err := waitFor(r.compute, w); err != nil {
				return nil, err
			}
			if err := r.gemms(open.Slots, w, flops*int64(w.Experts.Shape[0]), out[i]); err != nil {
				return nil, err
			}
		}
		if err := use.Release(); err != nil {
			return nil, err
		}
	}
	return out, r.end(st)
}

// verifyRouted compares a step's checksums with the model: resident experts and chosen
// ones were computed, and no others.
func (r *rig) verifyRouted(s *Store, c choice, out []map[int]uint32) {
	r.Helper()
	for i, homes := range s.Placed() {
		for e, h := range homes {
			sum, computed := out[i][e]
			if want := h.Tier == Resident || slices.Contains(c.chosen[i], int32(e)); computed != want {
				r.Errorf("layer %d expert %d: computed %t, want %t", r.model.layers[i], e, computed, want)
			} else if computed && sum != r.model.sum(r.model.layers[i], e) {
				r.Errorf("layer %d expert %d: wrong bytes", r.model.layers[i], e)
			}
		}
	}
}

// TestRouted: only routed experts are fetched, whatever was predicted and wherever they
// lie, also in turn with steps that fetch all.
func TestRouted(t *testing.T) {
	for seed := range uint64(24) {
		o := machine(seed)
		t.Run(fmt.Sprintf("seed=%d/virtual=%t/%s", seed, o.Virtual, o.Schedule), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 0))
			r, s := newRoutedRig(t, seed, o)
			for step := range 6 {
				if step%3 == 2 {
					r.steps(s, 1, true)
					continue
				}
				c := choices(rng, r.model)
				out, err := r.routedStep(s, c, 0)
				r.ok(err)
				r.verifyRouted(s, c, out)
			}
			st := s.Stats()
			used, predicted, syncs := st.PrefetchUsed, st.PrefetchPredicted, st.RouterSyncs
			if used > predicted || used > syncs || predicted == 0 || syncs == 0 {
				t.Errorf("%d of %d predictions were used, with %d router syncs", used, predicted, syncs)
			}
			if st.Uses[Peer]+st.Uses[Host] != st.Misses || st.Prefetched > st.Misses {
				t.Errorf("%+v", st)
			}
		})
	}
}

// TestPredictionsHideCopies: when the prediction is right, the copy runs under the layer
// before; when it is wrong, the needed copy overtakes it.
func TestPredictionsHideCopies(t *testing.T) {
	m := small(rowMajor)
	m.layers = layerNumbers(16)
	took := func(predict bool) time.Duration {
		// A copy takes 512 us, attention 400 us, each expert 100 us.
		r := newRig(t, m, emulated.Options{
			Virtual: true, HostLink: emulated.Link{BytesPerSecond: 1e6}, GPUs: []emulated.GPU{{FlopsPerSecond: 1e6}},
		}, 512)
		s := r.open(Config{Placement: r.placed(1)})
		r.fill(s, 11)
		var c choice
		for i := range m.layers {
			c.chosen = append(c.chosen, []int32{int32(i % 6)})
			c.predicted = append(c.predicted, nil)
			if predict {
				c.predicted[i] = c.chosen[i]
			}
		}
		began := r.m.Now()
		out, err := r.routedStep(s, c, 100)
		r.ok(err)
		r.verifyRouted(s, c, out)
		if st := s.Stats(); predict && st.Prefetched != 15 {
			t.Errorf("%+v", st)
		}
		return r.m.Now() - began
	}
	// 16 times 1012 us at least; with predictions, little more than the copies alone.
	if without, with := took(false), took(true); without < 16*1012*time.Microsecond || with > (1012+15*700)*time.Microsecond {
		t.Errorf("a step takes %v with right predictions and %v without", with, without)
	}
}

// TestWrongPredictions: on a link that is the bottleneck a wrong prediction costs little, since
// its copy is skipped if it has not begun when that is known; see TestWrongPredictionsCut for those that have.
func TestWrongPredictions(t *testing.T) {
	m := small(rowMajor)
	m.layers, m.experts = layerNumbers(12), 64
	took := func(right int) (step time.Duration, fetched int64) {
		// A copy takes 171 us, attention 40 us, an expert 10 us.
		r := newRig(t, m, emulated.Options{
			Virtual: true, HostLink: emulated.Link{BytesPerSecond: 3e6}, GPUs: []emulated.GPU{{FlopsPerSecond: 1e6}},
		}, 512)
		s := r.open(Config{Placement: r.placed(1)})
		r.fill(s, 11)
		rng := rand.New(rand.NewPCG(1, 1))
		var c choice
		for range m.layers {
			var chosen, predicted []int32
			for _, e := range rng.Perm(m.experts)[:8] {
				chosen = append(chosen, int32(e))
				if rng.IntN(100) < right {
					predicted = append(predicted, int32(e))
				} else {
					predicted = append(predicted, int32(rng.IntN(m.experts)))
				}
			}
			c.chosen, c.predicted = append(c.chosen, chosen), append(c.predicted, predicted)
		}
		began := r.m.Now()
		out, err := r.routedStep(s, c, 10)
		r.ok(err)
		r.verifyRouted(s, c, out)
		var fetches int64
		for _, layer := range s.Fetches() {
			for _, n := range layer {
				fetches += n
			}
		}
		if st := s.Stats(); st.Fetched[Host] != fetches*m.layout.Size || st.Failed != 0 {
			t.Errorf("%+v, %d fetches", st, fetches)
		}
		return r.m.Now() - began, fetches
	}
	all, _ := took(100)
	half, fetched := took(50)
	if half > all*118/100 || fetched > 12*8*125/100 {
		t.Errorf("a step takes %v and %d fetches with half of the predictions right, %v with all", half, fetched, all)
	}
}

// TestWrongPredictionsCut: of a wrongly predicted expert nothing more is copied, also where its copy has
// begun, and its slot is used again only behind what is in flight.
func TestWrongPredictionsCut(t *testing.T) {
	m := small(rowMajor)
	m.layers, m.experts = layerNumbers(12), 8
	step := func(o emulated.Options, chunk int64, lend bool) (took time.Duration, fetched int64) {
		r := newRig(t, m, o, chunk)
		if lend {
			r.lend()
		}
		s := r.open(Config{Placement: r.placed(1), CacheSlots: 8})
		r.fill(s, 11)
		if lend { // some are copied from a peer, and in part from the host
			for l := range m.layers {
				for e := 0; e < m.experts; e += 2 {
					r.promote(s, ID{l, e})
				}
			}
		}
		rng := rand.New(rand.NewPCG(1, 1))
		var c choice
		for i := range m.layers {
			chosen := int32(rng.IntN(m.experts))
			c.chosen = append(c.chosen, []int32{chosen})
			c.predicted = append(c.predicted, []int32{(chosen + int32(i%2)) % int32(m.experts)}) // every other is wrong
		}
		began := r.m.Now()
		for range 3 {
			out, err := r.routedStep(s, c, 10)
			r.ok(err)
			r.verifyRouted(s, c, out)
		}
		st := s.Stats()
		if st.Failed != 0 {
			t.Errorf("%+v", st)
		}
		return r.m.Now() - began, st.Fetched[Host] + st.Fetched[Peer]
	}
	slow := emulated.Options{Virtual: true, HostLink: emulated.Link{BytesPerSecond: 3e6}, GPUs: []emulated.GPU{{FlopsPerSecond: 1e6}}}
	whole, all := step(slow, 512, false)
	cut, part := step(slow, 32, false)
	if part > all*80/100 || cut > whole*85/100 {
		t.Errorf("in chunks of 32 bytes %d are copied, in %v; in chunks of 512 bytes %d, in %v", part, cut, all, whole)
	}
	for n := range uint64(16) {
		step(machine(n), 32, n%2 == 0)
	}
}

// TestWrongPredictionsOfLargeExperts: steps of 32 layers with half of their 8 experts offloaded, of which a copy
// takes 0.9 ms in six chunks and attention 60 us, where 80 % of two selected experts are predicted. They take
// 39.0 ms if copies that have begun go on.
func TestWrongPredictionsOfLargeExperts(t *testing.T) {
	const steps, right = 5, 80
	m := small(rowMajor)
	m.layers, m.experts = layerNumbers(32), 8
	r := newRig(t, m, emulated.Options{
		Virtual: true, HostLink: emulated.Link{BytesPerSecond: 569e3}, GPUs: []emulated.GPU{{FlopsPerSecond: 1e6}},
	}, 87)
	s := r.open(Config{Placement: r.placed(0.5), CacheSlots: 8})
	r.fill(s, 11)
	rng := rand.New(rand.NewPCG(1, 1))
	began := r.m.Now()
	for range steps {
		var c choice
		for range m.layers {
			var chosen, predicted []int32
			for _, e := range rng.Perm(m.experts)[:2] {
				p := int32(rng.IntN(m.experts))
				if rng.IntN(100) < right {
					p = int32(e)
				}
				chosen, predicted = append(chosen, int32(e)), append(predicted, p)
			}
			c.chosen, c.predicted = append(c.chosen, chosen), append(c.predicted, predicted)
		}
		_, err := r.routedStep(s, c, 15)
		r.ok(err)
	}
	step := (r.m.Now() - began) / steps
	t.Logf("a step takes %v", step)
	if step > 38*time.Millisecond {
		t.Errorf("a step takes %v, want 38 ms at most", step)
	}
}

// cutPrediction is a store of two layers of two experts in host memory, and of one on a peer from which copies
// are stuck, with a step that has predicted that one of layer 0.
func cutPrediction(t *testing.T) (r *rig, s *Store, st Step, stuck *emulated.Fault) {
	m := small(rowMajor)
	m.layers, m.experts = layerNumbers(2), 2
	r = newRig(t, m, emulated.Options{Virtual: true}, 64)
	r.lend()
	s = r.open(Config{Placement: r.placed(1), CacheSlots: 2})
	r.fill(s, 11)
	r.promote(s, ID{0, 1})
	stuck = r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Match: func(p emulated.Point) bool { return p.From == device.HBM(1) && p.To == device.HBM(0) }})
	st = r.begin(s)
	r.ok(st.PrefetchPredicted(0, []int32{1}))
	return r, s, st, stuck
}

// TestSlotOfCutPrediction: what a wrong prediction has in flight from a peer lands before the host copies
// another expert into the slot.
func TestSlotOfCutPrediction(t *testing.T) {
	r, s, st, stuck := cutPrediction(t)
	cut := s.fetch.slot(ID{0, 1})
	for layer := range 2 {
		open, err := st.LayerUnrouted(t.Context(), layer)
		r.ok(err)
		use, err := open.FetchChosen(t.Context(), []int32{0})
		r.ok(err)
		r.ok(use.Release())
	}
	if at := s.fetch.slot(ID{1, 0}); at != cut || s.fetch.has(ID{0, 1}) {
		t.Fatalf("layer 1 expert 0 is in slot %d, want that of the wrong prediction, %d", at, cut)
	}
	next := s.fetch.slotFetch(ID{1, 0}).copies[0].ticket
	for range 100 {
		r.ok(r.m.Yield(t.Context(), 10*time.Microsecond))
	}
	if next.Ended() {
		t.Error("another expert was copied into a slot under the copy of a wrong prediction")
	}
	stuck.Release()
	r.ok(next.Wait(t.Context()))
	r.ok(r.end(st))
}

// TestCutPredictionAndRevocation: memory of which a wrong prediction has read a part is released behind what
// is in flight, and nothing is said.
func TestCutPredictionAndRevocation(t *testing.T) {
	r, s, st, stuck := cutPrediction(t)
	var log bytes.Buffer
	s.fetch.log = slog.New(slog.NewTextHandler(&log, nil))
	open, err := st.LayerUnrouted(t.Context(), 0)
	r.ok(err)
	use, err := open.FetchChosen(t.Context(), []int32{0})
	r.ok(err)
	if got, want := s.Stats().Fetched[Peer], int64(128); got != want {
		t.Errorf("%d bytes are fetched from the peer, want two chunks, %d", got, want)
	}
	c, err := reclaimMore(r.harvest, device.HBM(1), 1<<20, time.Minute)
	r.ok(err)
	for range 20 {
		_, err = r.harvest.Tick(r.m.Now())
		r.ok(err)
		r.ok(r.m.Yield(t.Context(), 10*time.Microsecond))
	}
	if s.peers.Stats().Revoked > 0 {
		t.Error("memory is taken while it is read")
	}
	if log.Len() > 0 {
		t.Errorf("%s", log.String())
	}
	stuck.Release()
	r.ok(c.Wait(t.Context()))
	r.ok(use.Release())
	r.ok(r.end(st))
}

// TestGroupGoesOn: a copy of several experts that has begun goes on, though none of them was selected.
func TestGroupGoesOn(t *testing.T) {
	m := small(rowMajor)
	m.layers, m.experts = layerNumbers(2), 3
	r := newRig(t, m, emulated.Options{Virtual: true}, 64)
	s := r.open(Config{Placement: r.placed(1), CacheSlots: 6})
	r.fill(s, 11)
	st := r.begin(s)
	r.ok(st.Prefetch(0)) // one copy
	open, err := st.LayerUnrouted(t.Context(), 0)
	r.ok(err)
	use, err := open.FetchChosen(t.Context(), nil)
	r.ok(err)
	r.ok(use.Release())
	r.ok(r.end(st))
	for e := range m.experts {
		if !s.fetch.has(ID{0, e}) {
			t.Errorf("expert %d is not cached", e)
		}
	}
	if got := s.Stats().Fetched[Host]; got != 3*m.layout.Size {
		t.Errorf("%d bytes are fetched, want %d", got, 3*m.layout.Size)
	}
}

// TestSwap: an offloaded expert becomes resident in place of another between two steps.
func TestSwap(t *testing.T) {
	for n := range uint64(8) {
		tag := []string{rowMajor, "reversed"}[n%2]
		r := newRig(t, small(tag), machine(n), 200)
		r.lend()
		s := r.open(Config{Placement: r.placed(0.5), Dynamic: true})
		r.fill(s, 11)
		r.steps(s, 1, true)
		r.ok(s.Swap(ID{0, 1}, ID{0, 0}))
		r.ok(s.Swap(ID{3, 5}, ID{3, 2}))
		for _, c := range []struct {
			in, out ID
			want    string
		}{
			{ID{1, 1}, ID{1, 0}, "no spare extent"},
			{ID{1, 1}, ID{2, 0}, "of different layers"},
			{ID{1, 1}, ID{1, 3}, "the second is not resident"},
			{ID{1, 0}, ID{1, 2}, "layer 1 expert 2: the expert is resident"},
		} {
			if err := s.Swap(c.in, c.out); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		}
		r.steps(s, 1, true)
		r.ok(s.WaitMoves(t.Context()))
		r.steps(s, 2, true)
		if got, want := letters(tiersOf(s.Placed())), "hrrhrh rhrhrh rhrhrh rhhhrr rhrhrh"; got != want {
			t.Errorf("%s, want %s", got, want)
		}
		c := choices(rand.New(rand.NewPCG(n, 1)), r.model)
		out, err := r.routedStep(s, c, 0)
		r.ok(err)
		r.verifyRouted(s, c, out)
		r.promote(s, ID{0, 0})
		r.steps(s, 2, true)
	}
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 200)
	s := r.open(Config{Placement: r.placed(0.5)})
	r.fill(s, 11)
	if err := s.Swap(ID{0, 1}, ID{0, 0}); err == nil || !strings.Contains(err.Error(), "dynamic residency is off") {
		t.Errorf("got %v", err)
	}
}

// TestSwapOfPrefetched: an expert that becomes resident releases the slot into which it was
// prefetched.
func TestSwapOfPrefetched(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 200)
	s := r.open(Config{Placement: r.placed(0.5), Dynamic: true})
	r.fill(s, 11)
	st := r.begin(s)
	r.ok(st.Prefetch(0))
	r.ok(r.end(st))
	slot := s.fetch.slot(ID{0, 1})
	if slot < 0 || s.fetch.cache.References(slot) != 1 {
		t.Fatalf("the expert is not cached: slot %d", slot)
	}
	r.ok(s.Swap(ID{0, 1}, ID{0, 0}))
	r.ok(s.WaitMoves(t.Context()))
	st = r.begin(s)
	if n := s.fetch.cache.References(slot); n != 0 {
		t.Errorf("%d references on the slot of an expert that is resident", n)
	}
	r.ok(st.End())
	r.steps(s, 1, true)
}

// TestRefusedByLostPeer: the transfer engine knows of a peer's loss, from a copy that the store does not miss
// (as of one that was skipped), and refuses what the store would read there: one retry of the step is enough.
func TestRefusedByLostPeer(t *testing.T) {
	for seed := range uint64(4) {
		r := newRig(t, small(rowMajor), machine(seed), 300)
		r.lend()
		s := r.open(Config{Placement: r.placed(1), CacheSlots: 6})
		r.fill(s, 3)
		r.promote(s, offloaded(s)...)
		fence, err := r.m.NewFence("other")
		r.ok(err)
		dst, err := r.m.Alloc(device.HBM(0), 1, "other")
		r.ok(err)
		src, err := r.m.Alloc(device.HBM(1), 1, "other")
		r.ok(err)
		r.ok(r.m.Lose(1))
		ticket, err := r.engine.Submit(transfer.Request{
			Pieces: []transfer.Piece{{Dst: dst.Region(0, 1), Src: src.Region(0, 1)}}, Done: device.Point{Fence: fence, Value: 1},
		})
		if err == nil {
			err = ticket.Wait(t.Context())
		}
		if !errors.Is(err, device.ErrLost) {
			t.Fatalf("a copy from a lost peer: %v", err)
		}
		if _, err := r.step(s, true, 0); !errors.Is(err, device.ErrLost) {
			t.Fatalf("a step that reads a lost peer: %v", err)
		}
		r.drop()
		out, err := r.step(s, true, 0)
		r.ok(err)
		r.verify(out)
		r.ok(dst.Free())
		r.ok(src.Free())
		r.ok(fence.Close())
	}
}

func tiersOf(homes [][]Placed) [][]Tier {
	where := make([][]Tier, len(homes))
	for i := range homes {
		for _, h := range homes[i] {
			where[i] = append(where[i], h.Tier)
		}
	}
	return where
}

// TestPeerFails: a copy from or to a peer fails, or the peer is lost, at any moment: no
// step whose End succeeds has wrong bytes, and the retry goes on without the peer.
func TestPeerFails(t *testing.T) {
	for seed := range uint64(32) {
		o := machine(seed)
		t.Run(fmt.Sprintf("seed=%d/virtual=%t/%s", seed, o.Virtual, o.Schedule), func(t *testing.T) {
			r := newRig(t, small(rowMajor), o, 300)
			r.lend()
			s := r.open(Config{Placement: r.placed(0.6), CacheSlots: 8, Waves: 2})
			r.fill(s, 4)
			all := offloaded(s)
			r.promote(s, all...)
			lose, spaces := seed%4 == 1, []device.Space{device.HBM(1), device.HBM(2)}
			if !lose {
				r.m.Inject(&emulated.Fault{
					Kind: emulated.FailCopy, Times: []int{-1, 3, 4, 5}[seed%4], Skip: int(seed) % 5,
					Match: func(p emulated.Point) bool { return slices.Contains(spaces, p.From) && p.To == device.HBM(0) },
				})
			}
			for step := range 4 {
				if lose && step == 1 {
					r.ok(r.m.Lose(1))
				}
				for attempt := 0; ; attempt++ {
					out, err := r.step(s, true, 0)
					if err == nil {
						r.verify(out)
						break
					}
					if attempt > 8 {
						t.Fatalf("%d attempts fail: %v", attempt, err)
					}
					r.drop()
				}
				_, err := r.harvest.Tick(r.m.Now())
				r.ok(err)
			}
			if lose {
				if err := s.Promote(all[0], PromoteOptions{Peers: spaces[:1]}); !errors.Is(err, harvest.ErrNoCapacity) {
					t.Errorf("promote to a lost peer: %v", err)
				}
			}
			if s.Stats().Failed == 0 && seed%4 < 2 {
				t.Error("nothing failed")
			}
		})
	}
}

// TestFlakyPeers: where copies from peers fail now and then, and so none is excluded,
// one retry of a step is enough: it takes everything from the host. The step after it
// uses peers again.
func TestFlakyPeers(t *testing.T) {
	for seed := range uint64(16) {
		r := newRig(t, small(rowMajor), machine(seed), 300)
		r.lend()
		s := r.open(Config{Placement: r.placed(1), CacheSlots: 6})
		r.fill(s, 11)
		r.promote(s, offloaded(s)...)
		r.m.Inject(&emulated.Fault{
			Kind: emulated.FailCopy, Times: -1, Chance: 0.4,
			Match: func(p emulated.Point) bool { return p.From != device.Host && p.To == device.HBM(0) },
		})
		failed := 0
		for range 8 {
			r.promote(s, r.hostOnly(s)...)
			for try := 0; ; try++ {
				before := s.Stats().Fetched[Peer]
				out, err := r.step(s, try%2 == 0, 0)
				if (s.Stats().Fetched[Peer] == before) != (try > 0) && strings.Contains(letters(s.Residency()), "p") {
					t.Errorf("try %d: %d bytes from peers", try, s.Stats().Fetched[Peer]-before)
				}
				if err == nil {
					r.verify(out)
					break
				}
				if failed++; try > 0 {
					t.Fatalf("seed %d: the second try fails: %v", seed, err)
				}
				r.drop()
			}
			for k := range 2 { // a row of failures may have left one out
				r.ok(r.harvest.Readmit(device.HBM(1 + k)))
			}
		}
		if failed == 0 {
			t.Error("nothing failed")
		}
	}
}

// TestRowsOfFailures: copies from a peer that fail now and then do not exclude it, where one
// in between succeeds.
func TestRowsOfFailures(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 300)
	r.lend(func(o *harvest.Options) { o.Peers = o.Peers[:1] })
	r.events.PeerFailed = func(i PeerInfo) {
		if i.Excluded {
			t.Errorf("%v is excluded: %v", i.Device, i.Err)
		}
	}
	s := r.open(Config{Placement: r.placed(1), CacheSlots: 6})
	r.fill(s, 11)
	r.promote(s, offloaded(s)...)
	for range 4 {
		fault := r.m.Inject(&emulated.Fault{
			Kind: emulated.FailCopy, Times: 2, // the engine tries twice
			Match: func(p emulated.Point) bool { return p.From == device.HBM(1) && p.To == device.HBM(0) },
		})
		if _, err := r.step(s, false, 0); !errors.Is(err, device.ErrCopyFailed) {
			t.Fatalf("the step ends with %v", err)
		}
		fault.Release()
		r.drop()
		r.steps(s, 3, false) // from the host, then from the peer
	}
}

// TestStepsPassMoves: a step goes on while a goroutine that moves experts is blocked, holding the
// lock of moves.
func TestStepsPassMoves(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{}, 300)
	r.lend()
	held, release := make(chan struct{}), make(chan struct{})
	r.events.Demoted = func(i MoveInfo) {
		if i.Reason == "demoted" {
			close(held)
			<-release
		}
	}
	s := r.open(Config{Placement: r.placed(1), CacheSlots: 6})
	r.fill(s, 11)
	r.promote(s, offloaded(s)...)
	moved, done := make(chan error, 1), make(chan error, 1)
	go func() { moved <- s.Demote(ID{1, 1}) }()
	<-held
	go func() {
		var err error
		for range 3 {
			if err == nil {
				_, err = r.step(s, true, 0)
			}
		}
		done <- err
	}()
	select {
	case err := <-done:
		close(release)
		r.ok(err)
	case <-time.After(time.Minute):
		close(release)
		t.Errorf("the steps wait for who moves experts; %v", <-done)
	}
	r.ok(<-moved)
}

// TestOneUpdate: a layer of which only routed experts are fetched has its row of the
// tables updated when they are known, whatever was predicted, and before that only where
// its resident experts have changed.
func TestOneUpdate(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 300)
	s := r.open(Config{Placement: r.placed(0.5), Dynamic: true})
	r.fill(s, 11)
	row := &s.tables.rows[0]
	for _, c := range []struct {
		swap   bool
		chosen int32
		first  bool // LayerUnrouted sends
	}{{false, 1, false}, {false, 3, false}, {true, 3, true}, {false, 5, false}} {
		if c.swap {
			r.ok(s.Swap(ID{0, 1}, ID{0, 0}))
			r.ok(s.WaitMoves(t.Context()))
		}
		st := r.begin(s)
		r.ok(st.PrefetchPredicted(0, []int32{1, 3, 5}))
		open, err := st.LayerUnrouted(t.Context(), 0)
		r.ok(err)
		if sent := row.uploaded >= 0; sent != c.first {
			t.Errorf("%+v: sent when opened: %t", c, sent)
		}
		use, err := open.FetchChosen(t.Context(), []int32{c.chosen})
		r.ok(err)
		if row.uploaded < 0 && !c.first {
			t.Errorf("%+v: not sent when chosen", c)
		}
		r.ok(use.Release())
		r.ok(r.end(st))
	}
}

// hostOnly lists the experts that are in host memory alone.
func (r *rig) hostOnly(s *Store) []ID {
	r.Helper()
	_, err := r.harvest.Tick(r.m.Now())
	r.ok(err)
	var ids []ID
	for i, homes := range s.Placed() {
		for e, h := range homes {
			if h.Tier == Host {
				ids = append(ids, ID{i, e})
			}
		}
	}
	return ids
}

// TestMoveFails: a copy to a peer that fails gives the memory back and leaves the
// expert where it was; after a row of failures the peer is excluded.
func TestMoveFails(t *testing.T) {
	for n := range uint64(4) {
		var reported []PeerInfo
		r := newRig(t, small(rowMajor), machine(n), 300)
		r.lend(func(o *harvest.Options) { o.Peers = o.Peers[:1] })
		r.events.PeerFailed = func(i PeerInfo) { reported = append(reported, i) }
		s := r.open(Config{Placement: r.placed(1)})
		r.fill(s, 11)
		fault := r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: -1, Match: func(p emulated.Point) bool { return p.To == device.HBM(1) && p.From == device.Host }})
		for i := range 3 {
			r.promote(s, ID{0, i})
		}
		fault.Release()
		if n := len(reported); n != 3 || reported[n-1].Excluded != true || reported[0].Excluded {
			t.Errorf("%+v", reported)
		}
		if got := letters(s.Residency()); strings.Contains(got, "p") {
			t.Error(got)
		}
		if err := s.Promote(ID{0, 0}, PromoteOptions{}); !errors.Is(err, harvest.ErrNoCapacity) {
			t.Errorf("got %v", err)
		}
		r.ok(r.harvest.Readmit(device.HBM(1)))
		r.promote(s, ID{0, 0})
		r.steps(s, 1, true)
		if s.Stats().Uses[Peer] != 1 {
			t.Errorf("%+v", s.Stats())
		}
	}
}

// TestBothLinks: an expert that lies in peer memory comes over both links where that
// is faster, in the time that both take together.
func TestBothLinks(t *testing.T) {
	for _, c := range []struct {
		peers int // of the 6 experts of each layer
		want  time.Duration
	}{
		// Host 1 MB/s, peers 3 MB/s: 6 experts of 512 bytes.
		{0, 3072 * time.Microsecond},
		{2, 2048 * time.Microsecond}, // the other 4 keep the host's link
		{6, 768 * time.Microsecond},  // 2304 bytes from peers, 768 from the host
	} {
		m := small(rowMajor)
		m.layers = layerNumbers(8)
		r := newRig(t, m, emulated.Options{
			Virtual: true, HostLink: emulated.Link{BytesPerSecond: 1e6}, PeerLink: emulated.Link{BytesPerSecond: 3e6},
		}, 256)
		r.lend(func(o *harvest.Options) { o.Peers = o.Peers[:1] })
		s := r.open(Config{Placement: r.placed(1), CacheSlots: 12, Waves: 1})
		r.fill(s, 11)
		for i := range m.layers {
			for e := range c.peers {
				r.promote(s, ID{i, e})
			}
		}
		r.steps(s, 1, true)
		began := r.m.Now()
		r.steps(s, 1, true)
		// Layer 0 was prefetched by the step before.
		if d, want := r.m.Now()-began, 8*c.want; d < want*95/100 || d > want*110/100 {
			t.Errorf("%d experts of a layer on a peer: a step takes %v, want %v", c.peers, d, want)
		}
	}
}

// TestRates: copies correct what the topology says, and only that.
func TestRates(t *testing.T) {
	m := small(rowMajor)
	m.layout.Size = 32 << 20
	r := newRig(t, m, emulated.Options{
		Virtual: true, NoData: true, HostLink: emulated.Link{BytesPerSecond: 50e9, Latency: 100 * time.Microsecond},
		Report: func(emulated.Finding) {},
	}, 8<<20)
	s := r.open(Config{Placement: r.placed(1), Waves: 1})
	r.fill(s, 11)
	before := s.Links()
	if len(before) != 3 || before[0] != (Link{device.Host, 50e9}) || before[1].BytesPerSecond != 0 {
		t.Fatalf("%v", before)
	}
	for range 4 {
		_, err := r.step(s, true, 0)
		r.ok(err)
	}
	r.ok(r.begin(s).End())
	after := s.Links()
	if got := after[0].BytesPerSecond; got > 45e9 || got < 20e9 {
		t.Errorf("with a latency of 100 us per 8 MiB: %.1f GB/s", got/1e9)
	}
	if after[1].BytesPerSecond != 0 {
		t.Errorf("%v", after)
	}
}

// TestAnything does everything at once, in any order: promotions, revocations, faults,
// swaps and both kinds of steps. Whatever happens, steps whose End succeeds read the
// right bytes, and the checker finds no access that nothing orders.
func TestAnything(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		seed := rapid.Uint64Range(0, 1<<20).Draw(rt, "seed")
		o := emulated.Options{Virtual: true, Schedule: emulated.Schedule(rapid.IntRange(0, 2).Draw(rt, "schedule")), Seed: seed}
		o.CopyErrorsLoseDevice = rapid.Bool().Draw(rt, "copies signal by themselves")
		chunk, fraction := rapid.Int64Range(64, 1024).Draw(rt, "chunk"), rapid.SampledFrom([]float64{0.3, 0.5, 1}).Draw(rt, "fraction")
		c := Config{Dynamic: true, CacheSlots: rapid.IntRange(6, 14).Draw(rt, "cache slots"), Waves: rapid.IntRange(1, 4).Draw(rt, "waves")}
		actions := rapid.SliceOfN(rapid.IntRange(0, 9), 4, 30).Draw(rt, "actions")
		if !t.Run("", func(t *testing.T) {
			r := newRig(t, small(rowMajor), o, chunk)
			r.lend()
			c.Placement = r.placed(fraction)
			s := r.open(c)
			r.fill(s, 11)
			rng := rand.New(rand.NewPCG(seed, 7))
			id := func() ID { return ID{rng.IntN(len(r.model.layers)), rng.IntN(r.model.experts)} }
			for _, action := range actions {
				switch action {
				case 0, 1:
					for range 1 + rng.IntN(8) {
						_ = s.Promote(id(), PromoteOptions{}) // it may be resident, or have a copy
					}
				case 2:
					r.ok(s.Demote(id()))
				case 3:
					a := id()
					_ = s.Swap(a, ID{a.Layer, rng.IntN(r.model.experts)})
				case 4:
					_, err := reclaimMore(r.harvest, device.HBM(1+rng.IntN(2)), int64(1+rng.IntN(8192)), time.Second)
					r.ok(err)
				case 5:
					if !o.CopyErrorsLoseDevice {
						r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: 1 + rng.IntN(3), Skip: rng.IntN(9)})
					}
				case 6:
					r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Skip: rng.IntN(9), For: time.Duration(rng.IntN(1e6))})
				case 7:
					s.Poll()
					_, err := r.harvest.Tick(r.m.Now())
					r.ok(err)
				default:
					r.anyStep(s, rng)
				}
			}
			r.anyStep(s, rng)
		}) {
			rt.FailNow()
		}
	})
}

// anyStep runs a step of either kind until End succeeds.
func (r *rig) anyStep(s *Store, rng *rand.Rand) {
	r.Helper()
	whole, c := rng.IntN(2) == 0, choices(rng, r.model)
	for attempt := 0; ; attempt++ {
		var out []map[int]uint32
		var err error
		if whole {
			out, err = r.step(s, true, 0)
		} else {
			out, err = r.routedStep(s, c, 0)
		}
		if err == nil {
			if whole {
				r.verify(out)
			} else {
				r.verifyRouted(s, c, out)
			}
			return
		}
		if attempt > 20 {
			r.Fatalf("%d attempts fail: %v", attempt, err)
		}
		r.drop()
	}
}

// TestReadUntilTheEnd: a peer's memory is not freed under a copy whose result is no longer
// needed, whatever becomes of the copy that waits for its slot.
func TestReadUntilTheEnd(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{}, 150)
	r.lend()
	s := r.open(Config{Placement: r.placed(0.5), CacheSlots: 3})
	r.fill(s, 11)
	r.promote(s, ID{0, 1})
	stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Match: func(p emulated.Point) bool { return p.From != device.Host && p.To == device.HBM(0) }})
	// Layer 0 is predicted in vain, and layer 1 takes the slot.
	st := r.begin(s)
	r.ok(st.PrefetchPredicted(0, []int32{1}))
	open, err := st.LayerUnrouted(t.Context(), 0)
	r.ok(err)
	use, err := open.FetchChosen(t.Context(), nil)
	r.ok(err)
	r.ok(use.Release())
	r.ok(st.Prefetch(1))
	if got := s.fetch.cache.Expert(s.fetch.slot(ID{0, 1})); got/r.model.experts != 1 {
		t.Fatalf("the slot has expert %d", got)
	}
	later := s.fetch.fetches[len(s.fetch.fetches)-1].ticket
	reset := make(chan error, 1)
	go func() { reset <- st.Drop(context.Background()) }()
	if err := later.Wait(t.Context()); !errors.Is(err, transfer.ErrCanceled) {
		t.Errorf("the copy that waits for the slot: %v", err)
	}
	c, err := reclaimMore(r.harvest, device.HBM(1), 1<<20, time.Minute)
	r.ok(err)
	_, err = r.harvest.Tick(r.m.Now())
	r.ok(err)
	if s.peers.Stats().Revoked > 0 {
		t.Error("memory is taken while it is read")
	}
	stall.Release()
	r.ok(<-reset)
	r.ok(c.Wait(t.Context()))
	r.steps(s, 2, true)
}

// TestReleasedWithinAStep: fetches of a step that wait for earlier layers hold no memory that is
// needed: they read host memory instead, and what is counted is what was copied.
func TestReleasedWithinAStep(t *testing.T) {
	for name, hostRate := range map[string]float64{"peers send all": 55e9, "the host sends parts": 400e9} {
		t.Run(name, func(t *testing.T) { testReleasedWithinAStep(t, hostRate) })
	}
}

func testReleasedWithinAStep(t *testing.T, hostRate float64) {
	r := newRig(t, small(rowMajor), emulated.Options{HostLink: emulated.Link{BytesPerSecond: hostRate}, PeerLink: emulated.Link{BytesPerSecond: 395e9}}, 150)
	r.lend()
	s := r.open(Config{Placement: r.placed(1), CacheSlots: 6, Waves: 2})
	r.fill(s, 11)
	r.promote(s, offloaded(s)...)
	r.steps(s, 1, true)
	gate, err := r.m.NewFence("gate")
	r.ok(err)
	t.Cleanup(func() { _ = gate.Signal(1) }) // whatever fails, the stream ends
	r.ok(r.compute.WaitFence(gate, 1))
	st := r.begin(s)
	out, err := r.enqueue(s, st, true, 0)
	r.ok(err)
	var waiting, parts int
	for _, c := range s.fetch.fetches {
		if !c.ticket.Ended() && c.from != device.Host {
			waiting++
			parts += int(min(1, c.bytes%r.model.layout.Size))
		}
	}
	if waiting < 4 || (parts > 0) != (hostRate > 100e9) {
		t.Fatalf("%d fetches wait, %d of them of a part of an expert", waiting, parts)
	}
	for _, p := range []device.Space{device.HBM(1), device.HBM(2)} {
		c, err := reclaimMore(r.harvest, p, 1<<20, time.Minute)
		r.ok(err)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		if err := c.Wait(ctx); err != nil {
			t.Errorf("the memory is released only when the step has ended: %v", err)
		}
		cancel()
	}
	r.ok(gate.Signal(1))
	r.ok(r.end(st))
	r.verify(out)
	var fetched [2]int64 // from host and peers, by the engine
	for _, link := range r.engine.Stats() {
		switch {
		case link.To != device.HBM(0):
		case link.From == device.Host:
			fetched[0] += link.Bytes
		default:
			fetched[1] += link.Bytes
		}
	}
	counted := s.Stats().Fetched
	// The host also sends tables, which are no fetches.
	if counted[Peer] != fetched[1] || counted[Host] > fetched[0] || counted[Host] < int64(waiting)*r.model.layout.Size/2 {
		t.Errorf("fetched from the host and peers: %d and %d bytes; copied: %d and %d", counted[Host], counted[Peer], fetched[0], fetched[1])
	}
	r.steps(s, 2, true)
	r.ok(gate.Close())
}

// TestBesideSteps: steps of both kinds go on while others move experts, revoke memory and
// look, at any moment of theirs, and copies fail.
func TestBesideSteps(t *testing.T) {
	for seed := range uint64(3) {
		r := newRig(t, small(rowMajor), emulated.Options{Seed: seed}, 150)
		r.lend()
		s := r.open(Config{Placement: r.placed([]float64{0.4, 0.7, 1}[seed]), CacheSlots: 6 + int(seed), Dynamic: seed < 2})
		r.fill(s, 11)
		fault := r.m.Inject(&emulated.Fault{
			Kind: emulated.FailCopy, Times: -1, Chance: 0.05, Match: func(p emulated.Point) bool { return strings.HasPrefix(p.Stream, "copy ") },
		})
		var others sync.WaitGroup
		done := make(chan struct{})
		beside := func(number uint64, act func(rng *rand.Rand, id ID)) {
			rng := rand.New(rand.NewPCG(seed, number))
			others.Go(func() {
				for {
					select {
					case <-done:
						return
					default:
						act(rng, ID{rng.IntN(len(r.model.layers)), rng.IntN(r.model.experts)})
						time.Sleep(time.Duration(rng.IntN(100)) * time.Microsecond)
					}
				}
			})
		}
		beside(1, func(rng *rand.Rand, id ID) {
			switch rng.IntN(4) {
			case 0:
				_ = s.Demote(id) // it may be on its way back already
			case 1:
				_ = s.Swap(id, ID{id.Layer, rng.IntN(r.model.experts)}) // it may be resident, or have a copy
			default:
				_ = s.Promote(id, PromoteOptions{})
			}
			s.Poll()
		})
		beside(2, func(rng *rand.Rand, _ ID) {
			peer := device.HBM(1 + rng.IntN(2))
			if rng.IntN(4) == 0 {
				if _, err := reclaimMore(r.harvest, peer, int64(1+rng.IntN(4096)), time.Second); err != nil {
					t.Error(err)
				}
			}
			_ = r.harvest.Readmit(peer) // it may not have been excluded
			if _, err := r.harvest.Tick(r.m.Now()); err != nil {
				t.Error(err)
			}
		})
		beside(3, func(*rand.Rand, ID) {
			s.Snapshot()
			s.Stats()
			s.LinkTime()
		})
		rng := rand.New(rand.NewPCG(seed, 0))
		for range 60 {
			r.anyStep(s, rng)
		}
		close(done)
		others.Wait()
		fault.Release()
		st := s.Stats()
		t.Logf("%+v", st)
		if st.Failed == 0 || st.Promoted == 0 || st.Revoked == 0 || st.Uses[Peer] == 0 || (st.Swapped > 0) != (seed < 2) {
			t.Errorf("not all has happened: %+v", st)
		}
	}
}

// TestSnapshot: what operators read agrees with the store.
func TestSnapshot(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 300)
	r.lend()
	s := r.open(Config{Placement: r.placed(0.5), CacheSlots: 3})
	r.fill(s, 11)
	r.promote(s, ID{0, 1}, ID{2, 3})
	r.steps(s, 2, true)
	counts := make([]int64, 8*6)
	counts[7*6+5] = 9
	s.AddRoutedTokens(counts)
	snap := s.Snapshot()
	var where [][]Tier
	for _, l := range snap.Layers {
		var tiers []Tier
		for _, e := range l.Experts {
			tiers = append(tiers, e.Tier)
			if e.Uses != 2 {
				t.Errorf("%+v", e)
			}
		}
		where = append(where, tiers)
	}
	if got, want := letters(where), letters(s.Residency()); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if x := snap.Layers[2].Experts[3]; x.Tier != Peer || x.Peer != "gpu1" {
		t.Errorf("%+v", x)
	}
	if x := snap.Layers[4]; x.Layer != 7 || x.Experts[5].RoutedTokens != 9 || x.Experts[4].RoutedTokens != 0 {
		t.Errorf("%+v", x)
	}
	if len(snap.Cache) != 3 || snap.Cache[0].Layer < 0 || len(snap.Links) != 3 {
		t.Errorf("%+v %+v", snap.Cache, snap.Links)
	}
}

// TestSafeguards: without any one of the safeguards the checker, or the bytes, show an error.
func TestSafeguards(t *testing.T) {
	for _, without := range []string{
		"",
		// A revocation in progress does not wait for the copy.
		"reference before copy",
		// The gemms do not wait for the copy.
		"event before use",
		// The next copy into a slot does not wait for the slot's readers.
		"last reader before overwriting",
	} {
		found := false
		for seed := uint64(0); seed < 12 && !found; seed++ {
			found = (&unguarded{seed: seed, without: without}).run(t)
		}
		if found != (without != "") {
			t.Errorf("without %q: a run was found out: %t", without, found)
		}
	}
}

// unguarded is a run of which something may be found out.
type unguarded struct {
	seed    uint64
	without string
	found   bool
}

// run does some steps while experts come to peers and are revoked, and says
// whether anything was wrong.
func (u *unguarded) run(t *testing.T) bool {
	o := emulated.Options{
		Virtual: true, Schedule: emulated.Schedule(u.seed % 3), Seed: u.seed,
		HostLink: emulated.Link{BytesPerSecond: 1e6}, PeerLink: emulated.Link{BytesPerSecond: 1e6},
		GPUs:   []emulated.GPU{{FlopsPerSecond: 1e6}, {}, {}},
		Report: func(emulated.Finding) { u.found = true },
	}
	r := newRig(t, small(rowMajor), o, 100)
	r.lend()
	s := r.open(Config{Placement: r.placed(0.5), CacheSlots: 4})
	r.fill(s, 11)
	r.promote(s, offloaded(s)...)
	if u.without == "reference before copy" {
		s.fetch.source = func(id ID) source {
			src := s.fetch.nearest(id)
			if src.ref.Held() {
				src.ref.Release()
			}
			return src
		}
	}
	rng := rand.New(rand.NewPCG(u.seed, 3))
	for range 6 {
		for _, id := range offloaded(s) {
			if rng.IntN(3) == 0 {
				_ = s.Promote(id, PromoteOptions{}) // it may be there
			}
		}
		s.Poll()
		st := r.begin(s)
		out := u.enqueue(r, s, st)
		for k := range 2 {
			_, err := reclaimMore(r.harvest, device.HBM(1+k), 4096, time.Second)
			r.ok(err)
		}
		for range 3 {
			_, err := r.harvest.Tick(r.m.Now())
			r.ok(err)
		}
		if r.end(st) != nil { // the machine refused something
			u.found = true
			break
		}
		for i, l := range r.model.layers {
			for e, sum := range out[i] {
				u.found = u.found || sum != r.model.sum(l, e)
			}
		}
	}
	return u.found
}

// enqueue is rig.enqueue, but for what is excluded.
func (u *unguarded) enqueue(r *rig, s *Store, st Step) []map[int]uint32 {
	out := make([]map[int]uint32, len(r.model.layers))
	for i, l := range r.model.layers {
		out[i] = map[int]uint32{}
		use, err := st.Layer(r.Context(), l)
		r.ok(err)
		r.ok(st.Prefetch(s.plan.Next(l)))
		for _, w := range use.Waves {
			if u.without != "event before use" {
				r.ok(waitFor(r.compute, w))
			}
			r.ok(r.gemms(use.Slots, w, 100*int64(w.Experts.Shape[0]), out[i]))
		}
		r.ok(use.Release())
		if u.without == "last reader before overwriting" {
			s.fetch.cache.Reset() // as if the readers had been done before
		}
	}
	return out
}

// TestRevokedAtEveryPoint: a revocation begins, and goes on, at each point of a step:
// before a fetch, when it is submitted, while it runs, when it has landed, before and
// after its use. The step reads the right bytes, in the end the memory is freed.
func TestRevokedAtEveryPoint(t *testing.T) {
	for _, c := range []struct {
		schedule emulated.Schedule
		ops      int // how far the machine gets before
	}{{emulated.Eager, 0}, {emulated.Eager, 3}, {emulated.Lazy, 0}, {emulated.Random, 2}, {emulated.Random, 9}} {
		at := 0
		for revokedAt(t, c.schedule, c.ops, at) {
			at++
		}
		if at < 20 {
			t.Errorf("a step has only %d points", at)
		}
	}
}

// revokedAt reports whether a step has such a point.
func revokedAt(t *testing.T, schedule emulated.Schedule, ops, at int) bool {
	m := small(rowMajor)
	m.layers = m.layers[:2]
	r := newRig(t, m, emulated.Options{Virtual: true, Schedule: schedule, Seed: uint64(at)}, 200)
	r.lend()
	s := r.open(Config{Placement: r.placed(0.5), CacheSlots: 5, Waves: 2})
	r.fill(s, 11)
	r.promote(s, offloaded(s)...)
	look, err := r.m.NewFence("look")
	r.ok(err)
	point, revoked := 0, []*harvest.Reclamation(nil)
	here := func() {
		if point++; point-1 != at {
			return
		}
		for range ops { // each look lets the machine go on
			look.Value()
		}
		for _, p := range []device.Space{device.HBM(1), device.HBM(2)} {
			c, err := reclaimMore(r.harvest, p, 1<<20, time.Minute)
			r.ok(err)
			revoked = append(revoked, c)
		}
		_, err := r.harvest.Tick(r.m.Now())
		r.ok(err)
	}
	out := make([]map[int]uint32, len(r.model.layers))
	st := r.begin(s)
	for i, l := range r.model.layers {
		out[i] = map[int]uint32{}
		here()
		u, err := st.Layer(t.Context(), l)
		r.ok(err)
		here()
		r.ok(st.Prefetch(s.plan.Next(l)))
		here()
		for _, w := range u.Waves {
			r.ok(waitFor(r.compute, w))
			here()
			r.ok(r.gemms(u.Slots, w, 0, out[i]))
			here()
		}
		r.ok(u.Release())
		here()
	}
	r.ok(r.end(st))
	r.verify(out)
	for _, c := range revoked {
		r.ok(c.Wait(t.Context()))
	}
	if got := letters(s.Residency()); revoked != nil && strings.Contains(got, "p") {
		t.Error(got)
	}
	r.ok(look.Close())
	return revoked != nil
}

// reclaimMore asks for so many bytes of a peer more than are free or will be.
func reclaimMore(h *harvest.Runtime, s device.Space, bytes int64, within time.Duration) (*harvest.Reclamation, error) {
	for _, p := range h.State().Peers {
		if p.Space == s {
			bytes += max(p.Free+p.Draining, 0)
		}
	}
	return h.Reclaim(s, bytes, within)
}
