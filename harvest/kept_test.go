package harvest

import (
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
)

// TestKeptBesideFairness: a client that memory is kept for has no account with the policy, also after a
// refused request that others could give way to: their shares stay the same.
func TestKeptBesideFairness(t *testing.T) {
	policy := NewFairness(FairnessOptions{})
	m := newMarket(t.Fatalf, Options{Policy: policy, HeadroomBytes: -1})
	m.c.reserve, m.c.ownSlabBytes["relay"] = map[string]int64{"relay": 4096}, 4096
	alloc := func(hints Hints, bytes int64, now time.Duration) bool {
		req, err := m.c.request(bytes, hints, now)
		if err != nil {
			t.Fatal(err)
		}
		to, err := m.c.choose(req)
		if err != nil {
			return false
		}
		if to.slab == nil {
			to.slab = m.c.slabAllocated(to, device.Region{Space: to.peer.space, Range: device.Range{Addr: 1 << 20, Bytes: to.bytes}})
		}
		m.c.grant(to.slab, to.off, bytes, req, &m.clock)
		m.takeActions()
		return true
	}
	for alloc(Hints{Client: "kv"}, 2048, 0) {
	}
	if alloc(Hints{Client: "relay", Cost: time.Hour}, 4096, time.Hour) {
		t.Fatal("there is room")
	}
	if policy.clients["kv"] == nil || policy.clients["relay"] != nil {
		t.Errorf("accounts of %v", policy.clients)
	}
}
