package offload_test

import (
	"fmt"
	"testing"

	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
)

// BenchmarkLookup looks up a sequence of many blocks, which are all there, or none of them.
func BenchmarkLookup(b *testing.B) {
	for _, hit := range []bool{true, false} {
		b.Run(fmt.Sprintf("blocks=1000/hit=%t", hit), func(b *testing.B) {
			r := newRig(b, rigOptions{blocks: 1024, limit: 1024, headBytes: 32, config: offload.Config{CPUBlocks: 2000, GPUBlocks: 2000}, harvest: peers()})
			s := r.sequence(1, "a", 1000)
			if hit {
				r.fill(s, 0, 1000)
				r.store(s, 0, 1000)
			}
			for b.Loop() {
				r.tiers.Lookup(s.keys, 0, 1000*blockTokens)
			}
		})
	}
}

// BenchmarkRoundTrip stores and loads blocks of a sequence in host memory.
func BenchmarkRoundTrip(b *testing.B) {
	for _, n := range []int{1, 100} {
		b.Run(fmt.Sprintf("blocks=%d", n), func(b *testing.B) {
			r := newRig(b, rigOptions{blocks: 1024, limit: 1024, headBytes: 32, config: offload.Config{CPUBlocks: 2000}, unchecked: true})
			s := r.sequence(1, "a", n)
			r.fill(s, 0, n)
			for b.Loop() {
				r.store(s, 0, n)
				r.load(s, 0)
				r.tiers.Reset()
			}
		})
	}
}

// BenchmarkPeerStore stores blocks in a large tier in peers' memory that is full: each evicts
// another.
func BenchmarkPeerStore(b *testing.B) {
	const n, total = 512, 16 << 10
	h := peers()
	h.Clients[offload.HarvestClient] = slabs(128 << 10) // of 128 blocks
	r := newRig(b, rigOptions{blocks: n, limit: n, headBytes: 64, config: offload.Config{GPUBlocks: total}, harvest: h, unchecked: true})
	s := r.sequence(1, "a", n)
	r.fill(s, 0, n)
	number := 0
	next := func() {
		number++
		k := kvcache.RootKey(fmt.Append(nil, number))
		for i := range s.keys {
			k[0], k[1], k[2] = byte(i), byte(i>>8), byte(number)
			s.keys[i] = k
		}
		r.store(s, 0, n)
	}
	for range total / n {
		next()
	}
	for b.Loop() {
		next()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/block")
}
