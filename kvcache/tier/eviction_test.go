package tier_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/tier"
)

// fifo is a policy of one's own: what was stored first is evicted first, used or not.
type fifo struct {
	order     []int32 // blocks, in the order of their stores
	evictable []bool
}

func newFIFO(blocks int) tier.Eviction { return &fifo{evictable: make([]bool, blocks)} }

func (f *fifo) Insert(id int32, _ kvcache.Key)        { f.order = append(f.order, id) }
func (f *fifo) SetEvictable(id int32, evictable bool) { f.evictable[id] = evictable }
func (f *fifo) Touch(int32, kvcache.Key, tier.State)  {}

func (f *fifo) Remove(id int32) {
	f.evictable[id] = false
	f.order = slices.DeleteFunc(f.order, func(x int32) bool { return x == id })
}

func (f *fifo) Evict(victims []int32, n int, keep func(int32) bool) ([]int32, bool) {
	for _, id := range f.order {
		if n > 0 && f.evictable[id] && !keep(id) {
			victims = append(victims, id)
			n--
		}
	}
	for _, id := range victims {
		f.Remove(id)
	}
	return victims, true // the Manager has checked that there are n
}

func Example_policy() {
	m, err := tier.New(tier.Options{Blocks: 2, Medium: "CPU", NewEviction: newFIFO})
	if err != nil {
		panic(err)
	}
	block := func(tokens ...int32) []kvcache.Key { return []kvcache.Key{kvcache.RootKey(nil).Next(tokens)} }
	store := func(keys []kvcache.Key) {
		s, ok := m.PrepareStore(keys)
		fmt.Println("ids", s.IDs, "after", len(s.Evicted), "evicted, room:", ok)
		m.CompleteStore(s, true)
	}
	store(block(1))
	store(block(2))
	m.Touch(block(1)) // LRU would now evict the second
	store(block(3))
	fmt.Println(m.Lookup(block(1)[0]), m.Lookup(block(2)[0]), m.Lookup(block(3)[0]))
	// Output:
	// ids [0] after 0 evicted, room: true
	// ids [1] after 0 evicted, room: true
	// ids [0] after 1 evicted, room: true
	// miss hit hit
}

// wilful is LRU, unless it is told what to answer.
type wilful struct {
	*tier.LRU
	asked  int
	answer func(victims []int32) ([]int32, bool)
}

func (w *wilful) Evict(victims []int32, n int, keep func(int32) bool) ([]int32, bool) {
	w.asked++
	if w.answer != nil {
		return w.answer(victims)
	}
	return w.LRU.Evict(victims, n, keep)
}

// full returns a tier of four blocks: a and b are evictable, c is pinned, d is pending.
func full(t *testing.T) (*tier.Manager, *wilful) {
	t.Helper()
	var w *wilful
	m, err := tier.New(tier.Options{Blocks: 4, Medium: "CPU", NewEviction: func(blocks int) tier.Eviction {
		w = &wilful{LRU: tier.NewLRU(blocks)}
		return w
	}})
	if err != nil {
		t.Fatal(err)
	}
	s, _ := m.PrepareStore(keysFor("abcd"))
	s.IDs = s.IDs[:3]
	m.CompleteStore(s, true)
	if _, err := m.PrepareLoad(keysFor("c")); err != nil {
		t.Fatal(err)
	}
	m.TakeEvents()
	return m, w
}

func keysFor(names string) (all []kvcache.Key) {
	for _, r := range names {
		all = append(all, key(string(r)))
	}
	return all
}

// TestRefusal: a policy is not asked for more than there is, may refuse, and neither leaves a
// trace: the same blocks are evicted, and the same ids allocated, as if nobody had asked.
func TestRefusal(t *testing.T) {
	for _, c := range []struct {
		keys    string
		refuses bool
		asked   int
	}{
		{"xyz", false, 0}, // three, of two
		{"axy", false, 0}, // two, of two of which one is to stay
		{"xy", true, 1},
		{"bx", true, 1},
	} {
		m, w := full(t)
		if c.refuses {
			w.answer = func(victims []int32) ([]int32, bool) { return victims, false }
		}
		before := m.Stats()
		s, ok := m.PrepareStore(keysFor(c.keys))
		if ok || len(s.Keys)+len(s.IDs)+len(s.Evicted) > 0 || w.asked != c.asked {
			t.Errorf("%s: %+v, %v, asked %d times", c.keys, s, ok, w.asked)
		}
		if e := m.TakeEvents(); len(e) > 0 || m.Stats() != before {
			t.Errorf("%s: events %v, numbers %+v, before %+v", c.keys, e, m.Stats(), before)
		}
		if err := m.Check(); err != nil {
			t.Errorf("%s: %v", c.keys, err)
		}
		w.answer = nil
		s, ok = m.PrepareStore(keysFor("uv"))
		if !ok || !slices.Equal(s.IDs, []int32{1, 0}) || !slices.Equal(s.Evicted, []tier.Evicted{{Key: key("a"), ID: 0}, {Key: key("b"), ID: 1}}) {
			t.Errorf("%s: then %+v, %v", c.keys, s, ok)
		}
	}
}

// TestBadPolicy: a policy that would have a block read while it is overwritten ends the program.
func TestBadPolicy(t *testing.T) {
	for _, c := range []struct {
		keys    string
		victims []int32
		want    string
	}{
		{"xy", []int32{0, 2}, "block 2, which is not evictable"}, // pinned
		{"xy", []int32{0, 3}, "block 3, which is not evictable"}, // pending
		{"ax", []int32{0}, "block 0, which is not evictable"},    // a key of the store
		{"xy", []int32{1, 1}, "block 1, which is not evictable"}, // free after the first time
		{"xy", []int32{0}, "returned 1 blocks, not 2"},
		{"x", []int32{0, 1}, "returned 2 blocks, not 1"},
	} {
		m, w := full(t)
		w.answer = func(victims []int32) ([]int32, bool) { return append(victims, c.victims...), true }
		func() {
			defer func() {
				if r := fmt.Sprint(recover()); !strings.Contains(r, c.want) {
					t.Errorf("%s for %v: %s, want %s", c.keys, c.victims, r, c.want)
				}
			}()
			m.PrepareStore(keysFor(c.keys))
		}()
	}
}

// TestEvictTooFew: a policy that is asked for more than it has evicts none, and goes on as if it
// had not been asked.
func TestEvictTooFew(t *testing.T) {
	for name, p := range map[string]tier.Eviction{"lru": tier.NewLRU(6), "arc": tier.NewARC(6)} {
		for id := range int32(6) {
			p.Insert(id, key(string('a'+id)))
		}
		for id := range int32(5) {
			p.SetEvictable(id, true)
		}
		for _, id := range []int32{1, 3} { // ARC: in T2
			p.Touch(id, key(string('a'+id)), tier.Hit)
		}
		begun := []int32{7}
		keep := func(id int32) bool { return id == 2 }
		if v, ok := p.Evict(begun, 5, keep); ok || !slices.Equal(v, begun) {
			t.Errorf("%s: %v, %v", name, v, ok)
		}
		v, ok := p.Evict(begun, 4, keep)
		if !ok || !slices.Equal(v, []int32{7, 0, 4, 1, 3}) {
			t.Errorf("%s: %v, %v", name, v, ok)
		}
		if v, ok := p.Evict(nil, 1, func(int32) bool { return false }); !ok || !slices.Equal(v, []int32{2}) {
			t.Errorf("%s: then %v, %v", name, v, ok)
		}
	}
}

// TestARCOrder: whichever blocks are pinned and released, those that stay are evicted in the order
// of their last use.
func TestARCOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const blocks = 40
		p, used := tier.NewARC(blocks), []int32{}
		for id := range int32(blocks) {
			p.Insert(id, key(string('A'+id)))
			used = append(used, id)
		}
		for _, id := range rapid.Permutation(used).Draw(t, "released") {
			p.SetEvictable(id, true)
		}
		pinned := rapid.SliceOfNDistinct(rapid.Int32Range(0, blocks-1), 0, blocks, rapid.ID[int32]).Draw(t, "pinned")
		for _, id := range pinned {
			p.SetEvictable(id, false)
			used = without(used, id)
		}
		if v, ok := p.Evict(nil, len(used), func(int32) bool { return false }); !ok || !slices.Equal(v, used) {
			t.Fatalf("without %v: %v, %v", pinned, v, ok)
		}
	})
}

// TestAllocations: the calls of a step that changes nothing allocate nothing, and a store or load
// only what it returns and reports.
func TestAllocations(t *testing.T) {
	for _, policy := range []string{tier.PolicyLRU, tier.PolicyARC} {
		c := newCycle(t, policy, 64, 8)
		for range 64 { // ghosts and buffers have their size
			c.run()
		}
		keys := c.chunks[0]
		if n := testing.AllocsPerRun(100, func() {
			for _, k := range keys {
				c.m.Lookup(k)
			}
			c.m.Touch(keys)
			c.m.Stats()
		}); n > 0 {
			t.Errorf("%s: %v allocations of a lookup and a touch", policy, n)
		}
		// Keys, ids, victims and two events of the store, the list of events, ids of the load.
		if n := testing.AllocsPerRun(200, c.run); n > 9 {
			t.Errorf("%s: %v allocations of a store and a load", policy, n)
		}
	}
}

// cycle stores and loads chunks of keys in turn, so many that each store evicts.
type cycle struct {
	m      *tier.Manager
	chunks [][]kvcache.Key
	next   int
}

func newCycle(t testing.TB, policy string, blocks, chunk int) *cycle {
	m, err := tier.New(tier.Options{Blocks: blocks, Medium: "CPU", Policy: policy})
	if err != nil {
		t.Fatal(err)
	}
	c := &cycle{m: m}
	k := kvcache.RootKey(nil)
	for range 2 * blocks / chunk {
		var keys []kvcache.Key
		for range chunk {
			k = k.Next(nil)
			keys = append(keys, k)
		}
		c.chunks = append(c.chunks, keys)
	}
	for range c.chunks { // the tier is full, and has evicted as much again
		c.run()
	}
	return c
}

// run stores a chunk and loads it.
func (c *cycle) run() {
	keys := c.chunks[c.next]
	c.next = (c.next + 1) % len(c.chunks)
	c.m.Touch(keys)
	s, ok := c.m.PrepareStore(keys)
	c.m.CompleteStore(s, true)
	l, err := c.m.PrepareLoad(keys)
	if !ok || err != nil || c.m.CompleteLoad(l, true) != nil {
		panic(fmt.Sprint("a cycle failed: ", ok, err))
	}
	c.m.TakeEvents()
}

// BenchmarkCycle touches, stores and loads 64 blocks, for which 64 others are evicted.
func BenchmarkCycle(b *testing.B) {
	for _, policy := range []string{tier.PolicyLRU, tier.PolicyARC} {
		for _, blocks := range []int{10_000, 100_000} {
			b.Run(fmt.Sprintf("policy=%s/blocks=%d", policy, blocks), func(b *testing.B) {
				c := newCycle(b, policy, blocks, 64)
				b.ReportAllocs()
				for b.Loop() {
					c.run()
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/64, "ns/block")
			})
		}
	}
}
