package offload_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/kvcache/tier"
)

// TestMembers: the events of a tier, applied in order, give the GPU's blocks that are in its ready blocks, each stored and
// removed once, whatever blocks have in common, and however many events are taken at a time. No more are remembered.
func TestMembers(t *testing.T) {
	shared := 0
	rapid.Check(t, func(t *rapid.T) {
		factor := rapid.IntRange(1, 4).Draw(t, "factor")
		capacity := rapid.IntRange(1, 6).Draw(t, "blocks")
		account, err := tier.New(tier.Options{Blocks: capacity, Medium: offload.CPU})
		if err != nil {
			t.Fatal(err)
		}
		members := offload.NewMembers(factor)
		// Tier blocks at two positions: those at one differ in their last bits, some in the last member only.
		chains := map[kvcache.Key][]kvcache.Key{}
		for first := range 2 {
			for path := range 1 << factor {
				k := kvcache.RootKey([]byte{byte(first)})
				var chain []kvcache.Key
				for i := range factor {
					k = k.Next([]int32{int32(path >> i & 1)})
					chain = append(chain, k)
				}
				chains[k] = chain
			}
		}
		all := slices.SortedFunc(maps.Keys(chains), func(a, b kvcache.Key) int { return slices.Compare(a[:], b[:]) })
		held := map[kvcache.Key]bool{}
		var stores []tier.Store
		check := func() {
			for _, e := range members.Take(account.TakeEvents(), chains) {
				if e.Medium != offload.CPU || (len(e.Stored) > 0) == (len(e.Removed) > 0) || len(e.Tokens) > 0 || e.Parent != (kvcache.Key{}) {
					t.Fatalf("%+v", e)
				}
				for _, k := range e.Stored {
					if held[k] {
						t.Fatalf("%x is stored twice", k[:4])
					}
					held[k] = true
				}
				for _, k := range e.Removed {
					if !held[k] {
						t.Fatalf("%x is removed, and was not stored", k[:4])
					}
					delete(held, k)
				}
			}
			want, blocks := map[kvcache.Key]bool{}, 0
			for k, chain := range chains {
				if account.Lookup(k) == tier.Hit {
					blocks++
					for _, k := range chain {
						want[k] = true
					}
				}
			}
			if !maps.Equal(held, want) || members.Len() != len(want) {
				t.Fatalf("by the events %d blocks are there, %d are; %d are remembered", len(held), len(want), members.Len())
			}
			if len(want) < factor*blocks {
				shared++
			}
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.IntRange(0, 9).Draw(t, "what") {
			case 0, 1, 2:
				keys := rapid.SliceOfN(rapid.SampledFrom(all), 1, 4).Draw(t, "keys")
				if s, ok := account.PrepareStore(keys); ok && len(s.Keys) > 0 {
					stores = append(stores, s)
				}
			case 3, 4, 5:
				if n := len(stores); n > 0 {
					i := rapid.IntRange(0, n-1).Draw(t, "store")
					account.CompleteStore(stores[i], rapid.IntRange(0, 4).Draw(t, "ok") > 0)
					stores = slices.Delete(stores, i, i+1)
				}
			case 6:
				account.Lose(rapid.SampledFrom(all).Draw(t, "lost"))
			case 7:
				if rapid.IntRange(0, 3).Draw(t, "reset") == 0 {
					account.Reset()
				}
			default:
				check()
			}
		}
		check()
		account.Reset()
		check()
		if len(held) > 0 || members.Len() > 0 {
			t.Fatalf("%d blocks are left, %d are remembered", len(held), members.Len())
		}
	})
	if shared == 0 {
		t.Error("no two blocks had anything in common")
	}
}

// TestLargeBlockEvents: events of tiers whose blocks are larger than the GPU's name the GPU's blocks.
func TestLargeBlockEvents(t *testing.T) {
	for _, c := range everyTier(t) {
		t.Run(c.name, func(t *testing.T) {
			o := c.options
			o.config.BlockFactor, o.limit = 3, 64
			r := newRig(t, o)
			a := r.sequence(1, "a", 7) // of which two blocks are stored, of three each
			b := &sequence{id: 2, table: r.blocks.NewTable(), keys: slices.Clone(a.keys[:6])}
			b.keys[5] = b.keys[4].Next([]int32{-1}) // has two blocks of the second one
			r.reserve(b)
			r.fill(a, 0, 7)
			r.fill(b, 0, 6)
			check := func(what string, stored, removed []kvcache.Key) {
				t.Helper()
				var gotStored, gotRemoved []kvcache.Key
				for _, e := range r.tiers.TakeEvents() {
					if e.Medium != c.medium {
						t.Errorf("%s: an event of %s", what, e.Medium)
					}
					gotStored, gotRemoved = append(gotStored, e.Stored...), append(gotRemoved, e.Removed...)
				}
				compare := func(a, b kvcache.Key) int { return slices.Compare(a[:], b[:]) }
				if !slices.Equal(gotStored, stored) { // successive blocks
					t.Errorf("%s: stored %v, want %v", what, short(gotStored), short(stored))
				}
				slices.SortFunc(gotRemoved, compare)
				if !slices.Equal(gotRemoved, slices.SortedFunc(slices.Values(removed), compare)) {
					t.Errorf("%s: removed %v, want %v", what, short(gotRemoved), short(removed))
				}
				if n := r.tiers.MemberCount(c.medium); n > r.stats(c.medium).Capacity*3 {
					t.Errorf("%s: %d blocks are remembered", what, n)
				}
			}
			r.store(a, 0, 7)
			check("the first", a.keys[:6], nil)
			r.store(b, 0, 6)
			check("one that parts from it", b.keys[5:], nil)
			r.store(a, 0, 7)
			check("again", nil, nil)
			r.tiers.Drop(a.keys[:6])
			// The first block, which b has, too, is dropped with it.
			check("the first dropped", nil, []kvcache.Key{a.keys[0], a.keys[1], a.keys[2], a.keys[5]})
			r.store(a, 0, 7)
			check("and stored again", []kvcache.Key{a.keys[0], a.keys[1], a.keys[2], a.keys[5]}, nil)
			x := r.sequence(3, "x", 3)
			r.fill(x, 0, 3)
			r.failOf(x.table.Blocks())
			r.store(x, 0, 3)
			check("a store that fails", nil, nil)
			r.tiers.Store(x.keys, 0, x.table.Blocks(), offload.Filled)
			r.tiers.Reset()
			r.settle()
			check("reset", nil, slices.Concat(a.keys[:6], b.keys[5:]))
			if n := r.tiers.MemberCount(c.medium); n != 0 {
				t.Errorf("after the reset %d blocks are remembered", n)
			}
		})
	}
}

func short(keys []kvcache.Key) (all []string) {
	for _, k := range keys {
		all = append(all, fmt.Sprintf("%x", k[:3]))
	}
	return all
}
