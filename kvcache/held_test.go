package kvcache

import "testing"

// A block that is matched while a store still reads it was never free: it is no cold hit.
func TestHeldHitIsNotCold(t *testing.T) {
	m, err := NewManager(ManagerOptions{Blocks: 8, BlockTokens: 1})
	if err != nil {
		t.Fatal(err)
	}
	keys := func(name string, n int) (ks []Key) {
		k := RootKey([]byte(name))
		for i := range n {
			k = k.Next([]int32{int32(i)})
			ks = append(ks, k)
		}
		return ks
	}
	use := func(x *Table, name string, n int) {
		x.Identify(keys(name, n))
		x.Match(n)
		if !x.Reserve(n) {
			t.Fatal("no room")
		}
		x.SetFilled(n)
	}
	x := m.NewTable()
	for _, name := range []string{"a", "b", "c", "d", "e", "f"} { // evicts, so that span > 0
		use(x, name, 4)
		x.Release(true)
	}
	for i := range 3 { // a conversation whose blocks are always being stored when its next turn comes
		use(x, "hot", 4)
		for range 2 { // others, which let the clock go on
			y := m.NewTable()
			use(y, string(rune('p'+i)), 4)
			y.Release(true)
		}
		held := append([]int32(nil), x.Blocks()...)
		m.Hold(held)
		x.Release(true)
		before := m.Reuse()
		use(x, "hot", 4)
		after := m.Reuse()
		if after.Hits != before.Hits || after.ColdHits != before.ColdHits {
			t.Errorf("round %d: %d hits of free blocks, %d of them cold", i, after.Hits-before.Hits, after.ColdHits-before.ColdHits)
		}
		m.Unhold(held)
		x.Release(true)
	}
}
