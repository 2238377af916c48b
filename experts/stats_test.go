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
			var counted int64
			for _, layer := range s.Uses() {
				for _, n := range layer {
					counted += n
				}
			}
			if st.Hits+st.Misses != counted || counted < needed || counted > needed && !failing {
				t.Errorf("%d hits and %d misses, of %d uses counted by expert and %d needed", st.Hits, st.Misses, counted, needed)
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

// The names in JSON are those that scripts read.
func TestStatsJSON(t *testing.T) {
	data, err := json.Marshal(Stats{Uses: ByTier{Cached: 2}, Hits: 2, HitRate: 1, Fetched: FetchedBytes{Peer: 7}, Failed: 3})
	want := strings.Join([]string{
		`{"uses":{"cached":2,"host":0,"peer":0,"resident":0}`, `"hits":2`, `"misses":0`, `"on_cpu":0`, `"hit_rate":1`, `"prefetched":0`, `"failed_fetches":3`,
		`"fetched_bytes":{"host":0,"peer":7}`, `"read_in_place_bytes":{"host":0,"peer":0}`, `"prefetch_predicted":0`, `"prefetch_used":0`,
		`"promoted":0`, `"demoted":0`, `"revoked":0`, `"swapped":0`, `"made_resident":0`, `"offloaded":0`, `"migrated_bytes":0}`,
	}, ",")
	if err != nil || string(data) != want {
		t.Errorf("%v: %s, want %s", err, data, want)
	}
}
