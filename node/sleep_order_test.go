package node_test

import (
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/sleeping"
)

// lentExperts is how many experts are in memory that the KV cache has lent.
func lentExperts(n *node.Node) (lent int) {
	for _, l := range n.Observe().Residency().Experts.Layers {
		for _, x := range l.Experts {
			if x.Lent {
				lent++
			}
		}
	}
	return lent
}

// TestSleepOrder: the KV cache may be woken before the weights are, also where it has experts whose
// host copies a sleep at level 2 has dropped.
func TestSleepOrder(t *testing.T) {
	o := emulated.Options{Check: true, GPUs: linked(emulated.Random).GPUs}
	for _, level := range []sleeping.Level{sleeping.Copy, sleeping.Drop} {
		n := open(t, machine{fraction: 0.5, options: o}, func(s *configs.Settings) { s.KV.ExpertsShare, s.KV.MaxModelLen = configs.AutoShare, 128 })
		want := tokensOf(t, n)
		l := n.KVLender()
		if l == nil {
			t.Fatal("nothing is lent")
		}
		l.Move(2)
		for _, tags := range [][]sleeping.Tag{{sleeping.KVCache}, {sleeping.KVCache, sleeping.Weights}, {sleeping.KVCache}} {
			for begun := time.Now(); lentExperts(n) == 0; { // experts are moved at any time
				if _ = tokensOf(t, n); time.Since(begun) > time.Minute {
					t.Fatal("no expert is in lent memory")
				}
			}
			if _, err := n.Sleep(t.Context(), level, engine.PauseWait); err != nil {
				t.Fatal(err)
			}
			if _, err := n.Wake(t.Context(), tags...); err != nil {
				t.Fatalf("level %d, wake of %v: %v", level, tags, err)
			}
			if _, err := n.Wake(t.Context()); err != nil {
				t.Fatalf("level %d, wake: %v", level, err)
			}
			if got := tokensOf(t, n); got != want {
				t.Errorf("level %d: tokens after a wake of %v first: %s, want %s", level, tags, got, want)
			}
		}
	}
}
