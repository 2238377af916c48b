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

// TestSleepOrder: the KV cache may be woken before the weights are, or after, also where it has experts whose
// host copies a sleep at level 2 has dropped, and with dynamic residency, where all resident experts are
// copied from there.
func TestSleepOrder(t *testing.T) {
	o := emulated.Options{Check: true, GPUs: linked(emulated.Random).GPUs}
	for _, c := range []struct {
		level   sleeping.Level
		dynamic bool
		order   [][]sleeping.Tag
	}{
		{sleeping.Copy, false, [][]sleeping.Tag{{sleeping.KVCache}, {sleeping.KVCache, sleeping.Weights}, {sleeping.KVCache}}},
		{sleeping.Drop, false, [][]sleeping.Tag{{sleeping.KVCache}, {sleeping.KVCache, sleeping.Weights}, {sleeping.KVCache}}},
		{sleeping.Drop, true, [][]sleeping.Tag{nil, {sleeping.KVCache}, {sleeping.Weights}}},
	} {
		n := open(t, machine{fraction: 0.5, options: o}, func(s *configs.Settings) {
			s.KV.ExpertsShare, s.KV.MaxModelLen, s.Offload.DynamicResidency = configs.AutoShare, 128, c.dynamic
		})
		want := tokensOf(t, n)
		l := n.KVLender()
		if l == nil {
			t.Fatal("nothing is lent")
		}
		l.Move(2)
		for _, tags := range c.order {
			for begun := time.Now(); lentExperts(n) == 0; { // experts are moved at any time
				if _ = tokensOf(t, n); time.Since(begun) > time.Minute {
					t.Fatal("no expert is in lent memory")
				}
			}
			if _, err := n.Sleep(t.Context(), c.level, engine.PauseWait); err != nil {
				t.Fatal(err)
			}
			if _, err := n.Wake(t.Context(), tags...); err != nil {
				t.Fatalf("%+v, wake of %v: %v", c, tags, err)
			}
			if _, err := n.Wake(t.Context()); err != nil {
				t.Fatalf("%+v, wake: %v", c, err)
			}
			if got := tokensOf(t, n); got != want {
				t.Errorf("%+v: tokens after a wake of %v first: %s, want %s", c, tags, got, want)
			}
		}
	}
}
