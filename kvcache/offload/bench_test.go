package offload_test

import (
	"fmt"
	"testing"
	"time"

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

// BenchmarkStore is what the engine's goroutine does to store 1,024 blocks in a tier that is full, so that
// each evicts another: Store, and Poll after the copies. The peer's slabs are of 16 blocks, as a server's.
func BenchmarkStore(b *testing.B) {
	const n, total = 1024, 4 << 10
	for _, medium := range []string{offload.CPU, offload.PeerGPU} {
		b.Run("tier="+medium, func(b *testing.B) {
			o := rigOptions{blocks: n, limit: n, headBytes: 64, unchecked: true, config: offload.Config{CPUBlocks: total}}
			if medium == offload.PeerGPU {
				h := peers()
				h.Clients[offload.HarvestClient] = slabs(16 << 10)
				o.config, o.harvest = offload.Config{GPUBlocks: total}, h
			}
			r := newRig(b, o)
			s := r.sequence(1, "a", n)
			r.fill(s, 0, n)
			number, host := 0, time.Duration(0)
			next := func() {
				number++
				k := kvcache.RootKey(fmt.Append(nil, number))
				for i := range s.keys {
					k[0], k[1] = byte(i), byte(i>>8)
					s.keys[i] = k
				}
				began := time.Now()
				r.tiers.Store(s.keys, 0, s.table.Blocks(), offload.Filled)
				host += time.Since(began)
				r.ok(r.tiers.Wait(b.Context()))
				began = time.Now()
				r.tiers.Poll()
				host += time.Since(began)
				r.tiers.TakeEvents()
			}
			for range total / n {
				next()
			}
			host = 0
			b.ReportAllocs()
			for b.Loop() {
				next()
			}
			b.ReportMetric(float64(host.Nanoseconds())/float64(b.N*n), "ns/block")
			for _, s := range r.tiers.Stats() {
				if s.Stored != int64(number*n) {
					b.Errorf("%d blocks were stored of %d", s.Stored, number*n)
				}
			}
		})
	}
}
