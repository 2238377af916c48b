package offload_test

import (
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kvcache/offload"
)

// TestRoundTrip: blocks that are stored and whose place is used for others come back as they
// were, from every tier.
func TestRoundTrip(t *testing.T) {
	cases := everyTier(t)
	for _, c := range everyTier(t) { // with attention on the CPU the pool is in host memory
		c.name, c.options.inHost = c.name+", pool in host memory", true
		cases = append(cases, c)
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			for schedule := range emulated.Schedule(3) {
				o := c.options
				o.machine.Schedule, o.machine.Seed = schedule, 1
				r := newRig(t, o)
				a := r.sequence(1, "a", 12)
				r.fill(a, 0, 12)
				r.store(a, 0, 12)
				if s := r.stats(c.medium); s.Stored != 12 || s.Evictable != 12 || s.StoredBytes != 12*r.n {
					t.Errorf("%+v", s)
				}
				a.table.Release(false)
				r.overwrite()
				b := r.sequence(2, "a", 12)
				n, l := r.load(b, 0)
				if n != 12 || l.Blocks != 12 || l.Err != nil || !r.right(b, 0, 12) {
					t.Errorf("found %d, loaded %+v", n, l)
				}
				if s := r.stats(c.medium); s.Loaded != 12 || s.LoadedBytes != 12*r.n || s.Pinned != 0 || s.LoadingBytes != 0 {
					t.Errorf("%+v", s)
				}
				if p := r.tiers.Locate(b.keys[3]); p.Medium != c.medium {
					t.Errorf("block 3 is in %v", p)
				}
				// A part of it, from the middle on.
				b.table.Release(false)
				r.overwrite()
				r.reserve(b)
				if n, l := r.load(b, 5); n != 7 || l.Blocks != 7 || !r.right(b, 5, 12) {
					t.Errorf("found %d, loaded %+v", n, l)
				}
				// What was never stored is not found.
				if n, wait := r.tiers.Lookup(r.sequence(3, "other", 3).keys, 0, 12); n != 0 || wait {
					t.Errorf("found %d, wait %t", n, wait)
				}
				if n, _ := r.tiers.Lookup(b.keys, 0, 11*blockTokens+3); n != 11 {
					t.Errorf("found %d blocks for 47 tokens", n)
				}
				if s := r.logged(); s != "" {
					t.Error(s)
				}
				r.close()
			}
		})
	}
}

type tierCase struct {
	name, medium string
	options      rigOptions
}

// peers are two, with slabs of four blocks for the tier.
func peers() *harvest.Options {
	return &harvest.Options{
		Peers: []device.Space{device.HBM(1), device.HBM(2)}, HeadroomBytes: -1, Cooldown: -1,
		Clients: map[string]harvest.ClientOptions{offload.HarvestClient: slabs(4 << 10)},
	}
}

// slabs are the tier's own, of that size.
func slabs(bytes int64) harvest.ClientOptions { return harvest.ClientOptions{SlabBytes: bytes} }

// everyTier are rigs with one tier each.
func everyTier(t testing.TB) []tierCase {
	return []tierCase{
		{"cpu", offload.CPU, rigOptions{config: offload.Config{CPUBlocks: 40}}},
		{"peer", offload.PeerGPU, rigOptions{config: offload.Config{GPUBlocks: 40}, harvest: peers()}},
		{"files", offload.File, rigOptions{config: offload.Config{FileBlocks: 40, Directory: t.TempDir()}}},
	}
}
