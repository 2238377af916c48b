package tier_test

import (
	"cmp"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/tier"
)

// model is a tier as naive as it can be: lists of blocks that are searched from their beginning.
type model struct {
	capacity int
	withheld int
	arc      bool
	epoch    int
	store    int
	fresh    int32
	free     []int32
	all      []*modelBlock // that are not free
	ready    map[kvcache.Key]bool
	stats    tier.Stats // the counters

	order  []*modelBlock // LRU: those that are evictable
	t1, t2 []*modelBlock // ARC
	b1, b2 []kvcache.Key
	p      float64
}

type modelBlock struct {
	key   kvcache.Key
	id    int32
	store int
	refs  int
	lost  bool
}

func newModel(capacity int, arc bool) *model {
	return &model{capacity: capacity, arc: arc, ready: map[kvcache.Key]bool{}}
}

func (m *model) find(k kvcache.Key) *modelBlock {
	for _, b := range m.all {
		if b.key == k && !b.lost {
			return b
		}
	}
	return nil
}

func (m *model) withID(id int32) *modelBlock {
	for _, b := range m.all {
		if b.id == id {
			return b
		}
	}
	return nil
}

func without[T comparable](list []T, x T) []T {
	return slices.DeleteFunc(slices.Clone(list), func(y T) bool { return y == x })
}

func last[T comparable](list []T, x T) []T { return append(without(list, x), x) }

func (m *model) forget(b *modelBlock) {
	m.order, m.t1, m.t2 = without(m.order, b), without(m.t1, b), without(m.t2, b)
}

func (m *model) release(b *modelBlock) {
	m.all = without(m.all, b)
	m.free = append(m.free, b.id)
}

// victims returns n blocks in the order of their eviction, none of them in keys, or false.
func (m *model) victims(n int, keys []kvcache.Key) (all []*modelBlock, ok bool) {
	oldest := func(list []*modelBlock) *modelBlock {
		for _, b := range list {
			if b.refs == 0 && !slices.Contains(keys, b.key) && !slices.Contains(all, b) {
				return b
			}
		}
		return nil
	}
	inT1 := len(m.t1)
	for range n {
		var b *modelBlock
		switch {
		case !m.arc:
			b = oldest(m.order)
		case inT1 >= int(m.p):
			if b = oldest(m.t1); b == nil {
				b = oldest(m.t2)
			}
		default:
			if b = oldest(m.t2); b == nil {
				b = oldest(m.t1)
			}
		}
		if b == nil {
			return nil, false
		}
		if slices.Contains(m.t1, b) {
			inT1--
		}
		all = append(all, b)
	}
	return all, true
}

// prepareStore returns the store's blocks and those evicted.
func (m *model) prepareStore(keys []kvcache.Key) (blocks, evicted []*modelBlock, ok bool) {
	var missing []kvcache.Key
	for _, k := range keys {
		if m.find(k) == nil && !slices.Contains(missing, k) {
			missing = append(missing, k)
		}
	}
	if evicted, ok = m.victims(len(missing)-max(0, m.capacity-len(m.all)-m.withheld), keys); !ok {
		return nil, nil, false
	}
	for _, b := range evicted {
		switch {
		case slices.Contains(m.t1, b):
			m.b1 = append(m.b1, b.key)
		case slices.Contains(m.t2, b):
			m.b2 = append(m.b2, b.key)
		}
		m.forget(b)
		m.release(b)
		delete(m.ready, b.key)
		m.stats.Evicted++
	}
	m.b1, m.b2 = m.b1[max(0, len(m.b1)-m.capacity):], m.b2[max(0, len(m.b2)-m.capacity):]
	m.store++
	for _, k := range missing {
		b := &modelBlock{key: k, refs: -1, store: m.store}
		if int(m.fresh) < m.capacity {
			b.id = m.fresh
			m.fresh++
		} else {
			b.id = m.free[len(m.free)-1]
			m.free = m.free[:len(m.free)-1]
		}
		m.all, m.t1 = append(m.all, b), append(m.t1, b)
		m.b1, m.b2 = without(m.b1, k), without(m.b2, k)
		blocks = append(blocks, b)
		m.stats.Allocated++
	}
	return blocks, evicted, true
}

func (m *model) completeStore(epoch, store int, ids []int32, ok bool) {
	if epoch != m.epoch {
		return
	}
	for _, id := range ids {
		b := m.withID(id)
		if b == nil || b.store != store || b.refs != -1 {
			continue
		}
		if ok && !b.lost {
			b.refs = 0
			m.order = append(m.order, b)
			m.ready[b.key] = true
			m.stats.Stored++
			continue
		}
		m.forget(b)
		m.release(b)
		m.stats.Freed++
	}
}

func (m *model) prepareLoad(keys []kvcache.Key) (ids []int32, ok bool) {
	for _, k := range keys {
		b := m.find(k)
		if b == nil || b.refs < 0 {
			return nil, false
		}
		ids = append(ids, b.id)
	}
	for _, id := range ids {
		b := m.withID(id)
		b.refs++
		m.order = without(m.order, b)
	}
	return ids, true
}

func (m *model) completeLoad(epoch int, ids []int32, ok bool) bool {
	if epoch != m.epoch {
		return true
	}
	times := map[int32]int{}
	for _, id := range ids {
		times[id]++
		if b := m.withID(id); b == nil || b.refs < times[id] {
			return false
		}
	}
	for _, id := range ids {
		b := m.withID(id)
		if ok {
			m.stats.Loaded++
		}
		if b.refs--; b.refs > 0 {
			continue
		}
		if b.lost {
			m.release(b)
			m.stats.Freed++
		} else {
			m.order = append(m.order, b)
		}
	}
	return true
}

func (m *model) touch(keys []kvcache.Key) {
	for i := len(keys) - 1; i >= 0; i-- {
		k, b := keys[i], m.find(keys[i])
		switch {
		case b != nil && !m.arc:
			if b.refs == 0 {
				m.order = last(m.order, b)
			}
		case b != nil && b.refs < 0:
			m.t1 = last(m.t1, b)
		case b != nil:
			m.t1, m.t2 = without(m.t1, b), last(m.t2, b)
		case slices.Contains(m.b1, k):
			m.p = min(m.p+max(1, float64(len(m.b2))/float64(len(m.b1))), float64(m.capacity))
			m.b1 = last(m.b1, k)
		case slices.Contains(m.b2, k):
			m.p = max(m.p-max(1, float64(len(m.b1))/float64(len(m.b2))), 0)
			m.b2 = last(m.b2, k)
		}
	}
}

func (m *model) lose(k kvcache.Key) bool {
	b := m.find(k)
	if b == nil {
		return false
	}
	m.forget(b)
	delete(m.ready, k)
	if b.lost = true; b.refs == 0 {
		m.release(b)
		m.stats.Freed++
	}
	return true
}

func (m *model) reset() {
	n := newModel(m.capacity, m.arc)
	n.stats, n.epoch, n.store, n.withheld = m.stats, m.epoch+1, m.store, m.withheld
	n.stats.Freed += int64(len(m.all))
	*m = *n
}

func (m *model) count() tier.Stats {
	s := m.stats
	s.Capacity, s.Free = m.capacity, m.capacity-len(m.all)
	for _, b := range m.all {
		switch {
		case b.lost:
			s.Quarantined++
		case b.refs < 0:
			s.Pending++
		case b.refs > 0:
			s.Pinned++
		default:
			s.Evictable++
		}
	}
	return s
}

func (m *model) arcState() (float64, [4][]kvcache.Key) {
	keys := func(list []*modelBlock) (all []kvcache.Key) {
		for _, b := range list {
			all = append(all, b.key)
		}
		return all
	}
	return m.p, [4][]kvcache.Key{keys(m.t1), keys(m.t2), m.b1, m.b2}
}

func ids(blocks []*modelBlock) (all []int32) {
	for _, b := range blocks {
		all = append(all, b.id)
	}
	return all
}

// TestModel: whatever a tier is asked for, it does as the naive model does, to the id, the
// victim, the counter and the place in ARC's lists; and its events give the set of ready keys.
func TestModel(t *testing.T) {
	for _, policy := range []string{tier.PolicyLRU, tier.PolicyARC} {
		t.Run(policy, func(t *testing.T) { rapid.Check(t, func(t *rapid.T) { runModel(t, policy) }) })
	}
}

func runModel(t *rapid.T, policy string) {
	// Mostly so few that everything happens often, at times enough for deep heaps.
	capacity := rapid.SampledFrom([]int{1, 2, 3, 4, 5, 6, 7, 20}).Draw(t, "blocks")
	m, err := tier.New(tier.Options{Blocks: capacity, Medium: "CPU", Policy: policy})
	if err != nil {
		t.Fatal(err)
	}
	want := newModel(capacity, policy == tier.PolicyARC)
	alphabet := make([]kvcache.Key, max(12, 2*capacity))
	for i := range alphabet {
		alphabet[i] = key(string(rune('A' + i)))
	}
	someKeys := func(t *rapid.T) []kvcache.Key {
		return rapid.SliceOfN(rapid.SampledFrom(alphabet), 0, max(5, capacity)).Draw(t, "keys")
	}
	someOf := func(t *rapid.T, keys []kvcache.Key) []kvcache.Key {
		if len(keys) == 0 {
			return nil
		}
		return rapid.SliceOfN(rapid.SampledFrom(keys), 0, 4).Draw(t, "some of the keys")
	}
	type store struct {
		tier.Store
		epoch, number int
	}
	type load struct {
		tier.Load
		epoch int
	}
	var stores []store
	var loads []load
	replayed := map[kvcache.Key]bool{}
	succeeds := func(t *rapid.T) bool { return rapid.SampledFrom([]bool{true, true, false}).Draw(t, "succeeds") }
	// part draws how many of a store's or load's blocks are completed, and whether it stays, to be
	// completed again or in another part.
	part := func(t *rapid.T, n int) (from, to int, stays bool) {
		if rapid.Bool().Draw(t, "whole") {
			return 0, n, rapid.SampledFrom([]bool{false, false, true}).Draw(t, "stays")
		}
		from = rapid.IntRange(0, n).Draw(t, "from")
		return from, rapid.IntRange(from, n).Draw(t, "to"), true
	}
	prepare := func(t *rapid.T, keys []kvcache.Key) {
		asked := keysOf(keys)
		// What no victim may be, by the model as it was before.
		spared := map[int32]bool{}
		for _, b := range want.all {
			spared[b.id] = b.refs != 0 || b.lost || slices.Contains(keys, b.key)
		}
		blocks, evicted, ok := want.prepareStore(keys)
		s, got := m.PrepareStore(keys)
		if got != ok {
			t.Fatalf("store %s: %v, want %v", asked, got, ok)
		}
		for _, v := range s.Evicted {
			if spared[v.ID] {
				t.Fatalf("store %s evicts %s from %d", asked, name(v.Key), v.ID)
			}
		}
		if !slices.Equal(s.IDs, ids(blocks)) || !slices.EqualFunc(s.Keys, blocks, func(k kvcache.Key, b *modelBlock) bool { return k == b.key }) {
			t.Fatalf("store %s: %v in %v, want %v", asked, keysOf(s.Keys), s.IDs, ids(blocks))
		}
		if !slices.EqualFunc(s.Evicted, evicted, func(v tier.Evicted, b *modelBlock) bool { return v.ID == b.id && v.Key == b.key }) {
			t.Fatalf("store %s evicts %v, want %v", asked, s.Evicted, ids(evicted))
		}
		if ok {
			stores = append(stores, store{s, want.epoch, want.store})
		}
	}
	t.Repeat(map[string]func(*rapid.T){
		"store": func(t *rapid.T) { prepare(t, someKeys(t)) },
		// A request's life, at once: so most blocks are ready, and evicted, touched and loaded often.
		"turn": func(t *rapid.T) {
			for range rapid.IntRange(1, 4).Draw(t, "requests") {
				keys := someKeys(t)
				want.touch(keys)
				m.Touch(keys)
				before := len(stores)
				if prepare(t, keys); len(stores) > before {
					s := stores[before]
					stores = stores[:before]
					want.completeStore(s.epoch, s.number, s.IDs, true)
					m.CompleteStore(s.Store, true)
				}
			}
		},
		"stored": func(t *rapid.T) {
			if len(stores) == 0 {
				t.Skip("no store")
			}
			i := rapid.IntRange(0, len(stores)-1).Draw(t, "store")
			s, ok := stores[i], succeeds(t)
			from, to, stays := part(t, len(s.IDs))
			if !stays {
				stores = slices.Delete(stores, i, i+1)
			}
			s.IDs = s.IDs[from:to]
			var failed []kvcache.Key
			for _, id := range s.IDs {
				if b := want.withID(id); !ok && s.epoch == want.epoch && b != nil && b.store == s.number && b.refs < 0 && !b.lost {
					failed = append(failed, b.key)
				}
			}
			want.completeStore(s.epoch, s.number, s.IDs, ok)
			if got := m.CompleteStore(s.Store, ok); !slices.Equal(got, failed) {
				t.Fatalf("the failed store has removed %v, want %v", keysOf(got), keysOf(failed))
			}
		},
		"load": func(t *rapid.T) {
			keys := someOf(t, slices.SortedFunc(maps.Keys(want.ready), func(a, b kvcache.Key) int { return cmp.Compare(name(a), name(b)) }))
			if rapid.SampledFrom([]bool{false, false, false, true}).Draw(t, "any keys") {
				keys = someKeys(t)
			}
			ids, ok := want.prepareLoad(keys)
			l, err := m.PrepareLoad(keys)
			if (err == nil) != ok || !slices.Equal(l.IDs, ids) {
				t.Fatalf("load %v: %v, %v; want %v, %v", keysOf(keys), l.IDs, err, ids, ok)
			}
			if ok {
				loads = append(loads, load{l, want.epoch})
			}
		},
		"loaded": func(t *rapid.T) {
			if len(loads) == 0 {
				t.Skip("no load")
			}
			i := rapid.IntRange(0, len(loads)-1).Draw(t, "load")
			l, ok := loads[i], succeeds(t)
			from, to, stays := part(t, len(l.IDs))
			if !stays {
				loads = slices.Delete(loads, i, i+1)
			}
			l.IDs = l.IDs[from:to]
			accepted := want.completeLoad(l.epoch, l.IDs, ok)
			if err := m.CompleteLoad(l.Load, ok); (err == nil) != accepted {
				t.Fatalf("complete a load of %v: %v, want success %v", l.IDs, err, accepted)
			}
		},
		"lose read": func(t *rapid.T) {
			if len(loads) == 0 {
				t.Skip("no load")
			}
			l := rapid.SampledFrom(loads).Draw(t, "load")
			var lost []kvcache.Key
			for _, id := range l.IDs {
				if b := want.withID(id); l.epoch == want.epoch && b != nil && b.refs > 0 && !b.lost {
					lost = append(lost, b.key)
					want.lose(b.key)
				}
			}
			if got := m.LoseRead(l.Load); !slices.Equal(got, lost) {
				t.Fatalf("lost %v, want %v", keysOf(got), keysOf(lost))
			}
		},
		"touch": func(t *rapid.T) {
			keys := someKeys(t)
			want.touch(keys)
			m.Touch(keys)
		},
		"lose": func(t *rapid.T) {
			k := rapid.SampledFrom(alphabet).Draw(t, "key")
			if there := want.lose(k); m.Lose(k) != there {
				t.Fatalf("lose %s: was there: %v", name(k), !there)
			}
		},
		"withhold": func(t *rapid.T) {
			n := rapid.IntRange(-capacity, capacity).Draw(t, "withheld") // mostly none
			want.withheld = max(n, 0)
			m.Withhold(n)
		},
		"reset": func(t *rapid.T) {
			if rapid.IntRange(0, 4).Draw(t, "really") == 4 {
				want.reset()
				m.Reset()
			}
		},
		"": func(t *rapid.T) {
			if err := m.Check(); err != nil {
				t.Fatal(err)
			}
			if got, want := m.Stats(), want.count(); got != want {
				t.Fatalf("numbers %+v, want %+v", got, want)
			}
			for _, e := range m.TakeEvents() {
				for _, k := range e.Removed {
					if !replayed[k] {
						t.Fatalf("%s is removed, and was not there", name(k))
					}
					delete(replayed, k)
				}
				for _, k := range e.Stored {
					if replayed[k] {
						t.Fatalf("%s is stored, and was there", name(k))
					}
					replayed[k] = true
				}
				if e.Medium != "CPU" || (len(e.Stored) > 0) == (len(e.Removed) > 0) {
					t.Fatalf("event %+v", e)
				}
			}
			for _, k := range alphabet {
				state := tier.Miss
				if b := want.find(k); b != nil {
					if state = tier.Hit; b.refs < 0 {
						state = tier.HitPending
					}
				}
				if got := m.Lookup(k); got != state || replayed[k] != (state == tier.Hit) || want.ready[k] != replayed[k] {
					t.Fatalf("%s is a %v, want %v; by events it is ready: %v", name(k), got, state, replayed[k])
				}
			}
			if p, lists, ok := m.ARCState(); ok {
				wantP, wantLists := want.arcState()
				for i, l := range lists {
					if !slices.Equal(l, wantLists[i]) {
						t.Fatalf("%s is %v, want %v", []string{"T1", "T2", "B1", "B2"}[i], keysOf(l), keysOf(wantLists[i]))
					}
				}
				if p != wantP {
					t.Fatalf("the target of T1 is %v, want %v", p, wantP)
				}
			}
		},
	})
}
