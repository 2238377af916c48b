package lending_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/rebalancer"
	"github.com/moeserve/moeserve/rebalancer/lending"
)

// slowStore is a store that gives places back when release says so.
type slowStore struct {
	places  map[*experts.LentPlace]device.Region
	release func() bool
}

func (s *slowStore) AddPlace(r device.Region) (*experts.LentPlace, error) {
	p := &experts.LentPlace{}
	s.places[p] = r
	return p, nil
}

func (s *slowStore) RemovePlace(p *experts.LentPlace) (gone bool, err error) {
	if gone = s.release(); gone {
		delete(s.places, p)
	}
	return gone, nil
}

func (s *slowStore) PlaceState(*experts.LentPlace) experts.PlaceState { return experts.PlaceState{} }

func (s *slowStore) WaitMoves(context.Context) error {
	s.release = func() bool { return true }
	return nil
}

// clock is set by the test.
type clock time.Duration

func (c *clock) Now() time.Duration { return time.Duration(*c) }

// tester is of package testing or of rapid.
type tester interface {
	Fatal(...any)
	Cleanup(func())
}

func options(t tester, blocks, extents, size int) (lending.Options, *slowStore, *clock) {
	m, err := emulated.New(emulated.Options{Virtual: true, NoData: true})
	if err != nil {
		t.Fatal(err)
	}
	shape := kvcache.Shape{Layers: 1, KVHeads: 1, HeadDim: 24, DType: kernels.F32, BlockTokens: 1} // 192 bytes, which is not aligned
	pool, err := kvcache.NewPool(kvcache.PoolOptions{Machine: m, Space: device.HBM(0), Blocks: blocks, Shape: shape})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := pool.Close(); err != nil {
			t.Fatal(err)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	})
	manager, err := kvcache.NewManager(kvcache.ManagerOptions{Blocks: blocks, BlockTokens: 1, Extents: extents, ExtentBlocks: size})
	if err != nil {
		t.Fatal(err)
	}
	store, now := &slowStore{places: map[*experts.LentPlace]device.Region{}, release: func() bool { return true }}, new(clock)
	none := func() float64 { return 0 }
	return lending.Options{
		Manager: manager, Pool: pool, Store: store, Worth: func() rebalancer.Worth { return rebalancer.Worth{} }, Waited: none, Copied: none, Clock: now,
	}, store, now
}

// TestOneOwner: whatever is lent and returned while sequences come and go, at any time, each
// extent is the store's, or sequences may use it, and never both. At the end all is the KV cache's.
func TestOneOwner(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const extents, size = 4, 3
		o, store, now := options(t, 6+extents*size, extents, size)
		store.release = func() bool { return rapid.Bool().Draw(t, "gone") }
		l, err := lending.New(o)
		if err != nil {
			t.Fatal(err)
		}
		m := o.Manager
		tables := []*kvcache.Table{m.NewTable(), m.NewTable(), m.NewTable()}
		check := func() {
			withdrawn := 0
			for x := range extents {
				if m.Extent(x).Withdrawn {
					withdrawn++
				}
			}
			if s := l.Stats(); s.Lent+s.Returning != len(store.places) || s.Lent+s.Returning+s.Withdrawing != withdrawn || s.ToExperts-s.ToKV != int64(len(store.places)) {
				t.Fatalf("%+v; the store has %d extents, the KV cache has not %d", s, len(store.places), withdrawn)
			}
			for _, r := range store.places {
				if uint64(r.Addr)%device.Alignment != 0 {
					t.Fatalf("a place at %#x", r.Addr)
				}
				for _, x := range tables {
					for _, id := range x.Blocks() {
						if b := o.Pool.Region(id); b.Addr < r.Addr+device.Addr(r.Bytes) && r.Addr < b.Addr+device.Addr(b.Bytes) {
							t.Fatalf("block %d at %v is used, and lent as %v", id, b, r)
						}
					}
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"reserve": func(t *rapid.T) {
				x := rapid.SampledFrom(tables).Draw(t, "table")
				x.Reserve(len(x.Blocks()) + rapid.IntRange(1, 6).Draw(t, "blocks"))
			},
			"release": func(t *rapid.T) { rapid.SampledFrom(tables).Draw(t, "table").Release(true) },
			"target": func(t *rapid.T) {
				if n := rapid.IntRange(-1, extents+1).Draw(t, "target"); n < 0 {
					l.SetTarget(nil)
				} else {
					l.SetTarget(&n)
				}
			},
			"move": func(t *rapid.T) { l.Move(rapid.IntRange(-3, 3).Draw(t, "extents")) },
			"turn": func(t *rapid.T) {
				*now += clock(rapid.IntRange(0, 4000).Draw(t, "ms")) * clock(time.Millisecond)
				l.Turn(rapid.IntRange(0, 1).Draw(t, "lacks")*20, rapid.IntRange(0, 9).Draw(t, "running"))
			},
			"": func(*rapid.T) { check() },
		})
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if check(); len(store.places) > 0 {
			t.Fatalf("%d extents are still lent", len(store.places))
		}
	})
}

// TestTurn: extents go to experts while these are worth more, come back when what was lost is, and
// at once when a request lacks blocks.
func TestTurn(t *testing.T) {
	const extents, size = 6, 20
	o, store, now := options(t, 40+extents*size, extents, size)
	worth, waited := 0.1, 0.0
	o.Worth = func() rebalancer.Worth {
		return rebalancer.Worth{Next: slices.Repeat([]float64{worth}, 8-len(store.places)), Fetch: 0.006}
	}
	o.Waited, o.Copied = func() float64 { return waited }, func() float64 { return 2 * waited }
	l, err := lending.New(o)
	if err != nil {
		t.Fatal(err)
	}
	run := func(d time.Duration, lacking int) {
		for end := *now + clock(d); *now < end; *now += clock(10 * time.Millisecond) {
			waited += 0.001
			l.Turn(lacking, 1)
		}
	}
	run(3*time.Second, 0)
	if len(store.places) != extents || o.Manager.Present() != 40 {
		t.Errorf("%d extents are lent: %+v", len(store.places), l.Stats())
	}
	run(time.Second, 60)
	if n := len(store.places); n != extents-1 || o.Manager.Free() != 60 {
		t.Errorf("a request lacks 20 blocks of 60: %d extents are lent, %d blocks are free", n, o.Manager.Free())
	}
	if s := l.Stats(); s.WorthToExperts != 0.1 || s.ToExperts != extents || s.ToKV != 1 {
		t.Errorf("%+v", s)
	}
	// A prefix that is lost again and again, each time it is computed.
	l.Computed(100, 10) // a tenth of a second each
	keys := make([]kvcache.Key, 80)
	for i := range keys {
		keys[i] = kvcache.RootKey([]byte{byte(i)})
	}
	worth = 0
	for range 40 {
		x := o.Manager.NewTable()
		x.Identify(keys[:60])
		x.Match(60)
		if !x.Reserve(60) {
			t.Fatal("no room")
		}
		x.SetFilled(60)
		x.Release(true)
		y := o.Manager.NewTable()
		y.Reserve(50) // evicts
		y.Release(false)
		run(500*time.Millisecond, 0)
	}
	if n := len(store.places); n > 3 {
		t.Errorf("%d extents are still lent: %+v, %+v", n, l.Stats(), o.Manager.Reuse())
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestSetTarget: from the next turn on extents are lent or come back as far as the target says, one
// that is more than there are being all; without one the worth decides again.
func TestSetTarget(t *testing.T) {
	const extents, size = 6, 20
	o, store, now := options(t, 40+extents*size, extents, size)
	l, err := lending.New(o) // nothing is worth anything to experts
	if err != nil {
		t.Fatal(err)
	}
	turn := func(target, want int) {
		t.Helper()
		if target < 0 {
			l.SetTarget(nil)
		} else {
			l.SetTarget(&target)
		}
		l.Turn(0, 1)
		if s := l.Stats(); len(store.places) != want || (s.Target == nil) != (target < 0) || s.Target != nil && *s.Target != min(target, extents) {
			t.Errorf("target %d: %d extents are lent, want %d: %+v", target, len(store.places), want, s)
		}
	}
	turn(-1, 0)
	turn(4, 4)
	turn(1, 1)
	turn(extents+3, extents)
	for range 100 { // no expert comes to them, and blocks that nobody uses are lacking
		*now += clock(time.Second)
		l.Turn(60, 1)
	}
	if len(store.places) != extents {
		t.Errorf("%d extents are lent: %+v", len(store.places), l.Stats())
	}
	l.Turn(60, 0)
	if l.Turn(0, 1); len(store.places) != extents-1 || o.Manager.Free() != 60 {
		t.Errorf("a request alone lacks 20 blocks of 60: %d extents are lent, %d blocks are free", len(store.places), o.Manager.Free())
	}
	*now += clock(time.Second)
	if l.Turn(0, 1); len(store.places) != extents {
		t.Errorf("when it runs %d extents are lent", len(store.places))
	}
	turn(-1, 1) // lent too lately; no expert has come to the others for long
	*now += clock(time.Minute)
	if l.Turn(0, 1); len(store.places) > 0 {
		t.Errorf("an extent that no expert comes to stays: %+v", l.Stats())
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestOptions(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*lending.Options)
		want   string
	}{
		"no store":     {func(o *lending.Options) { o.Store = nil }, "is not set"},
		"no extents":   {func(o *lending.Options) { o.Manager, _ = kvcache.NewManager(kvcache.ManagerOptions{Blocks: 3}) }, "has no extents"},
		"small factor": {func(o *lending.Options) { o.Core.Factor = 0.5 }, "below 1"},
	} {
		o, _, _ := options(t, 8, 1, 4)
		c.change(&o)
		if _, err := lending.New(o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
