package experts

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
)

// TestHitsAndMisses: the first use of what a fetch brings is a miss, also where it was
// prefetched, and every later one a hit, until its slot was needed for another expert.
func TestHitsAndMisses(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 200)
	s := r.open(Config{Placement: r.placed(0.5), CacheSlots: 3}) // experts 1, 3 and 5 of layer 0 are offloaded
	r.fill(s, 11)
	type counted struct{ hits, misses, prefetched, predicted, used int64 }
	var before Stats
	for i, c := range []struct {
		what             string
		predicted, chose []int32
		want             counted
	}{
		{"resident", nil, []int32{0}, counted{hits: 1}},
		{"fetched on demand", nil, []int32{1}, counted{misses: 1}},
		{"cached", nil, []int32{1, 1, 0}, counted{hits: 2}},
		{"prefetched and cached", []int32{3, 1}, []int32{3, 1}, counted{hits: 1, misses: 1, prefetched: 1, predicted: 2, used: 2}},
		{"cached since a prefetch", nil, []int32{3}, counted{hits: 1}},
		{"prefetched and not used", []int32{5}, []int32{0}, counted{hits: 1, predicted: 1}},
		{"nothing", nil, nil, counted{}},
	} {
		st := r.begin(s)
		r.ok(st.PrefetchPredicted(0, c.predicted))
		r.ok(r.compute.Synchronize(t.Context()))
		open, err := st.LayerUnrouted(t.Context(), 0)
		r.ok(err)
		use, err := open.FetchChosen(t.Context(), c.chose)
		r.ok(err)
		r.ok(use.Release())
		r.ok(r.end(st))
		now := s.Stats()
		got := counted{
			now.Hits - before.Hits, now.Misses - before.Misses, now.Prefetched - before.Prefetched,
			now.PrefetchPredicted - before.PrefetchPredicted, now.PrefetchUsed - before.PrefetchUsed,
		}
		if got != c.want {
			t.Errorf("step %d, %s: %+v, want %+v", i, c.what, got, c.want)
		}
		before = now
	}
	if want := 6. / 8; before.HitRate != want {
		t.Errorf("hit rate %v, want %v", before.HitRate, want)
	}
}

// TestUsesAreConserved: whatever is fetched from where, prefetched, evicted, or fails and is
// run again, each use is a hit or a miss, is counted for its expert, and no step that is
// not run again is counted other than once.
func TestUsesAreConserved(t *testing.T) {
	for seed := range uint64(16) {
		o := machine(seed)
		t.Run(fmt.Sprintf("seed=%d/virtual=%t/%s", seed, o.Virtual, o.Schedule), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 0))
			r, s := newRoutedRig(t, seed, o)
			failing := seed%2 == 1
			if failing {
				r.m.Inject(&emulated.Fault{
					Kind: emulated.FailCopy, Times: 3, Skip: int(seed) % 5,
					Match: func(p emulated.Point) bool { return p.To == device.HBM(0) && p.From != device.Host },
				})
			}
			var needed int64
			for range 6 {
				c := choices(rng, r.model)
				for try := 0; ; try++ {
					_, err := r.routedStep(s, c, 0)
					if err == nil {
						break
					}
					if try > 8 {
						t.Fatal(err)
					}
					r.drop()
				}
				for _, chosen := range c.chosen {
					slices.Sort(chosen)
					needed += int64(len(slices.Compact(chosen)))
				}
			}
			st := s.Stats()
			counted := total(s.Uses())
			if st.Hits+st.Misses != counted || counted < needed || counted > needed && !failing {
				t.Errorf("%d hits and %d misses, of %d uses counted by expert and %d needed", st.Hits, st.Misses, counted, needed)
			}
			if hits := total(s.ExpertHits()); hits != st.Hits {
				t.Errorf("%d hits counted by expert, of %d", hits, st.Hits)
			}
			if waiting := int64(s.fetch.unusedNow()); !failing && total(s.Fetches()) != st.Misses+total(s.UnusedPrefetches())+waiting {
				t.Errorf("%d fetches for %d misses; %d prefetches were not used, and %d are not yet", total(s.Fetches()), st.Misses, total(s.UnusedPrefetches()), waiting)
			}
			if st.Misses == 0 || st.HitRate != float64(st.Hits)/float64(counted) {
				t.Errorf("hit rate %v of %+v", st.HitRate, st)
			}
			if st.Prefetched > st.Misses || st.PrefetchUsed > st.PrefetchPredicted {
				t.Errorf("%+v", st)
			}
		})
	}
}

// total of counts by layer and expert.
func total(counts [][]int64) (all int64) {
	for _, layer := range counts {
		for _, n := range layer {
			all += n
		}
	}
	return all
}

// unusedNow is how many experts are in the expert cache by a prefetch that no layer has used.
func (f *fetcher) unusedNow() (n int) {
	for at := range f.slots {
		if f.slots[at].unused && f.cache.Expert(at) >= 0 {
			n++
		}
	}
	return n
}

// TestUnusedPrefetches: an expert that was prefetched and not selected is marked until a later layer uses
// it, also in place, or another expert gets its slot, which counts. Its first use is a miss, and prefetched, also
// in place. Snapshot has both, and the hits of each.
func TestUnusedPrefetches(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 200)
	s := r.open(Config{Placement: r.placed(0.5), CacheSlots: 3, InPlace: true}) // experts 1, 3 and 5 of layers are offloaded
	r.fill(s, 11)
	routed := make([]int64, r.model.layers[len(r.model.layers)-1]*s.plan.Experts+s.plan.Experts)
	for i, c := range []struct {
		what             string
		layer            int
		predicted, chose []int32
		inPlace          bool
		marked           []int // of layer 0
		unused           int64 // of it, so far
		misses           int64 // of both layers, so far, and those of them that were prefetched
		prefetched       int64
	}{
		{what: "not selected", predicted: []int32{1, 3}, chose: []int32{0}, marked: []int{1, 3}},
		{what: "selected later", chose: []int32{1}, marked: []int{3}, misses: 1, prefetched: 1},
		{what: "used in place later", chose: []int32{3}, inPlace: true, misses: 2, prefetched: 2},
		{what: "used in place again", chose: []int32{3}, inPlace: true, misses: 2, prefetched: 2},
		{what: "not selected again", predicted: []int32{5}, chose: []int32{0}, marked: []int{5}, misses: 2, prefetched: 2},
		{what: "others get the slots", layer: 1, chose: []int32{1, 3, 5}, unused: 1, misses: 5, prefetched: 2},
		{what: "selected at once", predicted: []int32{1}, chose: []int32{1}, unused: 1, misses: 6, prefetched: 3},
		{what: "others get the slots", layer: 1, chose: []int32{1, 3, 5}, unused: 1, misses: 7, prefetched: 3},
	} {
		st := r.begin(s)
		if c.inPlace {
			_, err := st.ReadInPlace()
			r.ok(err)
			r.ok(r.end(st))
			for _, e := range c.chose {
				routed[r.model.layers[c.layer]*s.plan.Experts+int(e)]++
			}
			s.AddRoutedTokens(routed)
		} else {
			number := r.model.layers[c.layer]
			r.ok(st.PrefetchPredicted(number, c.predicted))
			for _, f := range s.fetch.fetches { // those that have not begun are skipped
				r.ok(f.ticket.Wait(t.Context()))
			}
			open, err := st.LayerUnrouted(t.Context(), number)
			r.ok(err)
			use, err := open.FetchChosen(t.Context(), c.chose)
			r.ok(err)
			r.ok(use.Release())
			r.ok(r.end(st))
		}
		var marked []int
		var unused int64
		snap := s.Snapshot()
		for e, x := range snap.Layers[0].Experts {
			if x.Unused {
				marked = append(marked, e)
			}
			unused += x.UnusedPrefetches
		}
		if !slices.Equal(marked, c.marked) || unused != c.unused {
			t.Errorf("step %d, %s: experts %v are marked, %d prefetches were not used; want %v, %d", i, c.what, marked, unused, c.marked, c.unused)
		}
		var hits, uses int64
		for _, l := range snap.Layers {
			for _, x := range l.Experts {
				hits, uses = hits+x.Hits, uses+x.Uses
			}
		}
		if now := s.Stats(); hits != now.Hits || uses != now.Hits+now.Misses {
			t.Errorf("step %d, %s: %d hits of %d uses by expert, %+v in all", i, c.what, hits, uses, now)
		} else if now.Misses != c.misses || now.Prefetched != c.prefetched {
			t.Errorf("step %d, %s: %d misses, %d of them prefetched, want %d and %d", i, c.what, now.Misses, now.Prefetched, c.misses, c.prefetched)
		}
	}
}

// The names in JSON are those that scripts read.
func TestStatsJSON(t *testing.T) {
	data, err := json.Marshal(Stats{Uses: ByTier{Cached: 2}, Hits: 2, HitRate: 1, Fetched: FetchedBytes{Peer: 7}, Failed: 3})
	want := strings.Join([]string{
		`{"uses":{"cached":2,"host":0,"peer":0,"resident":0}`, `"hits":2`, `"misses":0`, `"on_cpu":0`, `"hit_rate":1`, `"prefetched":0`, `"failed_fetches":3`,
		`"fetched_bytes":{"host":0,"peer":7}`, `"read_in_place_bytes":{"host":0,"peer":0}`, `"read_divided_bytes":0`, `"prefetch_predicted":0`, `"prefetch_used":0`,
		`"promoted":0`, `"demoted":0`, `"revoked":0`, `"swapped":0`, `"made_resident":0`, `"offloaded":0`, `"migrated_bytes":0}`,
	}, ",")
	if err != nil || string(data) != want {
		t.Errorf("%v: %s, want %s", err, data, want)
	}
}
