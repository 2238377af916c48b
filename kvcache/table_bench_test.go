package kvcache_test

import (
	"fmt"
	"testing"

	"github.com/moeserve/moeserve/kvcache"
)

// BenchmarkSetFilled is what the host needs where 300 sequences, which share a long prefix, fill a block each in one
// step, with keys.
func BenchmarkSetFilled(b *testing.B) {
	const sequences, blockTokens = 300, 16
	for _, shared := range []int{100, 8000} {
		b.Run(fmt.Sprintf("blocks=%d", shared), func(b *testing.B) {
			m, err := kvcache.NewManager(kvcache.ManagerOptions{Blocks: shared + 2*sequences, BlockTokens: blockTokens})
			if err != nil {
				b.Fatal(err)
			}
			prefix := make([]kvcache.Key, shared)
			last, tokens := kvcache.RootKey(nil), make([]int32, blockTokens)
			for i := range prefix {
				last = last.Next(tokens)
				prefix[i] = last
			}
			tables := make([]*kvcache.Table, sequences)
			for i := range tables {
				t := m.NewTable()
				tokens[0] = int32(i + 1)
				t.Identify(append(prefix[:shared:shared], last.Next(tokens)))
				if i > 0 {
					t.Match(shared * blockTokens)
				} else if t.Reserve(shared * blockTokens) {
					t.SetFilled(shared * blockTokens)
				}
				tables[i] = t
			}
			fill := func() {
				for _, t := range tables {
					if !t.Reserve((shared + 1) * blockTokens) {
						b.Fatal("no block is free")
					}
					t.SetFilled((shared + 1) * blockTokens)
				}
			}
			fill()
			for b.Loop() {
				b.StopTimer()
				for _, t := range tables {
					t.SetFilled(shared * blockTokens)
				}
				b.StartTimer()
				fill()
			}
		})
	}
}
