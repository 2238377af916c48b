package harvest

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
)

// TestBehind: one of many objects that are allocated in a row, each behind the one before, lies where it
// would if all slabs were looked at for each.
func TestBehind(t *testing.T) {
	for _, policy := range []Policy{BestFit{}, Locality{}, Interference{}, Stability{}} {
		behind := 0
		for seed := range uint64(50) {
			rng := rand.New(rand.NewPCG(seed, 1))
			open := func() *market { return newMarket(t.Fatalf, Options{Policy: policy, HeadroomBytes: -1}) }
			m, all := open(), open()
			var handles, others []*Handle
			alloc := func(m *market, bytes int64, after *Handle) *Handle {
				req, err := m.c.request(bytes, Hints{Client: "kv", After: after}, 0)
				if err != nil {
					t.Fatal(err)
				}
				to, err := m.c.choose(req)
				if err != nil {
					return nil
				}
				if to.slab == nil {
					to.slab = m.c.slabAllocated(to, device.Region{Space: to.peer.space, Range: device.Range{Addr: 1 << 20, Bytes: to.bytes}})
				}
				h := m.c.grant(to.slab, to.off, bytes, req, &m.clock)
				m.takeActions()
				return h
			}
			for range 40 {
				bytes := int64(256 * (1 + rng.IntN(3)))
				var after, otherAfter *Handle
				for range rng.IntN(12) {
					if after != nil && after == m.c.latest {
						behind++
					}
					all.c.latest = nil // it looks at all slabs
					h, other := alloc(m, bytes, after), alloc(all, bytes, otherAfter)
					if (h == nil) != (other == nil) {
						t.Fatalf("%s, seed %d: there is room for one of %v and %v", policy.Name(), seed, h, other)
					}
					if h == nil {
						break
					}
					if a, b := h.account, other.account; a.slab.id != b.slab.id || a.offset != b.offset {
						t.Fatalf("%s, seed %d: behind slab %d, %d: slab %d at %d, want %d at %d", policy.Name(), seed, after.account.slab.id, after.account.offset, a.slab.id, a.offset, b.slab.id, b.offset)
					}
					handles, others = append(handles, h), append(others, other)
					after, otherAfter = h, other
				}
				for range rng.IntN(10) {
					if len(handles) == 0 {
						break
					}
					i := rng.IntN(len(handles))
					m.free(handles[i])
					all.free(others[i])
					handles, others = slices.Delete(handles, i, i+1), slices.Delete(others, i, i+1)
				}
			}
		}
		if behind < 1000 {
			t.Errorf("%s: only %d objects followed another one", policy.Name(), behind)
		}
	}
}

// TestBehindElsewhere: what is allocated behind the latest handle lies on another peer where the policy
// prefers that one: by a new reading, without the hint that limited the peers, or since there is room again.
func TestBehindElsewhere(t *testing.T) {
	busy := func(m *market, now time.Duration) {
		p := m.c.peers[0]
		p.update(Reading{Capacity: marketBytes, Free: p.free, Bandwidth: 1}, now, time.Minute)
	}
	for name, c := range map[string]struct {
		before, between func(*market)
		first           Hints
	}{
		"reading": {between: func(m *market) { busy(m, time.Second) }},
		"peers":   {before: func(m *market) { busy(m, 0) }, first: Hints{Peers: []device.Space{device.HBM(1)}}},
		"room": {
			before:  func(m *market) { busy(m, 0); m.c.peers[1].health = errors.New("unhealthy") },
			between: func(m *market) { m.c.peers[1].health = nil },
		},
	} {
		m := newMarket(t.Fatalf, Options{Policy: Interference{}, HeadroomBytes: -1})
		alloc := func(hints Hints) *Handle {
			hints.Client = "kv"
			req, err := m.c.request(256, hints, 0)
			if err != nil {
				t.Fatal(name, err)
			}
			to, err := m.c.choose(req)
			if err != nil {
				t.Fatal(name, err)
			}
			if to.slab == nil {
				to.slab = m.c.slabAllocated(to, device.Region{Space: to.peer.space, Range: device.Range{Addr: 1 << 20, Bytes: to.bytes}})
			}
			return m.c.grant(to.slab, to.off, 256, req, &m.clock)
		}
		if c.before != nil {
			c.before(m)
		}
		h := alloc(c.first)
		if h.Device() != device.HBM(1) {
			t.Fatalf("%s: the first is on %s", name, h.Device())
		}
		if c.between != nil {
			c.between(m)
		}
		if h := alloc(Hints{After: h}); h.Device() != device.HBM(2) {
			t.Errorf("%s: behind the first, on the busy %s", name, h.Device())
		}
	}
}
