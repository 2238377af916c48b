package offload_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kvcache/offload"
)

// watched runs a race over all schedules, with its rule and without, and expects the check or
// wrong bytes to show the difference: race reports whether bytes were wrong.
func watched(t *testing.T, o rigOptions, race func(r *rig, rule bool) (wrong bool)) {
	t.Helper()
	watchedWith(t, o, race, true, false)
}

// watchedWith is watched with the rule, without it, or both.
func watchedWith(t *testing.T, o rigOptions, race func(r *rig, rule bool) (wrong bool), rules ...bool) {
	t.Helper()
	for _, rule := range rules {
		found := false
		for schedule := range emulated.Schedule(3) {
			o := o
			o.elsewhere = o.elsewhere && !rule
			o.machine.Schedule, o.machine.Seed = schedule, 3
			o.machine.HostLink, o.machine.PeerLink = emulated.Link{BytesPerSecond: 1e6}, emulated.Link{BytesPerSecond: 1e6}
			o.machine.Report = func(f emulated.Finding) {
				if found = true; rule {
					t.Errorf("%v schedule: %v", schedule, f)
				}
			}
			r := newRig(t, o)
			if race(r, rule) {
				if found = true; rule {
					t.Errorf("%v schedule: wrong bytes", schedule)
				}
			}
			r.tiers.Poll()
			r.close()
		}
		if !rule && !found {
			t.Error("nothing shows that the rule is broken")
		}
	}
}

// eachTier runs a race for every tier.
func eachTier(t *testing.T, race func(r *rig, rule bool) bool, change ...func(*rigOptions)) {
	for _, c := range everyTier(t) {
		t.Run(c.name, func(t *testing.T) {
			for _, f := range change {
				f(&c.options)
			}
			watched(t, c.options, race)
		})
	}
}

// point has the compute stream signal that it has done what was enqueued.
func (r *rig) point() device.Point {
	r.Helper()
	f, err := r.m.NewFence("computed")
	r.ok(err)
	p := device.Point{Fence: f, Value: f.Value() + 1}
	r.ok(r.compute.SignalFence(f, p.Value))
	r.Cleanup(func() { _ = f.Close() })
	return p
}

// TestStoreBehindCompute (race 1): a store waits for the compute that fills its blocks.
func TestStoreBehindCompute(t *testing.T) {
	eachTier(t, func(r *rig, rule bool) bool {
		s := r.sequence(1, "a", 3)
		r.fill(s, 0, 2)
		copy(r.host.Write(0, r.n), r.content(s.keys[2]))
		r.ok(r.compute.Copy(r.pool.Region(s.table.Blocks()[2]).Range, r.host.Range(0, r.n)))
		s.table.SetFilled(3 * blockTokens)
		if rule {
			r.tiers.Behind(r.point())
		}
		r.tiers.Store(s.keys, 0, s.table.Blocks(), offload.Filled)
		r.settle()
		r.ok(r.compute.Synchronize(r.Context()))
		s.table.Release(false)
		r.overwrite()
		r.reserve(s)
		n, l := r.load(s, 0)
		return n != 3 || l.Blocks != 3 || !r.right(s, 0, 3)
	})
}

// TestLoadBehindReaders (race 2): a load waits for what still reads the place that it fills.
func TestLoadBehindReaders(t *testing.T) {
	eachTier(t, func(r *rig, rule bool) bool {
		s := r.sequence(1, "a", 3)
		r.fill(s, 0, 3)
		r.store(s, 0, 3)
		s.table.Release(false)
		x := r.sequence(2, "x", 3)
		r.fill(x, 0, 3)
		want := r.content(x.keys[1])
		r.ok(r.compute.Copy(r.host.Range(0, r.n), r.pool.Region(x.table.Blocks()[1]).Range)) // still to run
		if rule {
			r.tiers.Behind(r.point())
		}
		x.table.Release(false)
		r.reserve(s)
		n, l := r.load(s, 0)
		r.ok(r.compute.Synchronize(r.Context()))
		got := bytes.Clone(r.host.Read(0, r.n))
		return n != 3 || l.Blocks != 3 || !bytes.Equal(got, want) || !r.right(s, 0, 3)
	})
}

// TestDependentCopies (race 4): what a store still reads is not the destination of a load of
// the same turn.
func TestDependentCopies(t *testing.T) {
	eachTier(t, func(r *rig, rule bool) bool {
		old := r.sequence(1, "old", 4)
		r.fill(old, 0, 4)
		r.store(old, 0, 4)
		old.table.Release(false)
		s := r.sequence(2, "a", 4)
		r.fill(s, 0, 4)
		r.tiers.Store(s.keys, 0, s.table.Blocks(), offload.Preempted)
		s.table.Release(false)
		r.reserve(old) // with the rule other blocks
		if n, wait := r.tiers.Lookup(old.keys, 0, 4*blockTokens); n != 4 || wait {
			r.Fatalf("found %d, wait: %t", n, wait)
		}
		r.ok(r.tiers.Load(old.id, old.keys, 0, old.table.Blocks()))
		r.settle()
		wrong := !r.right(old, 0, 4)
		old.table.Release(false)
		r.overwrite()
		r.reserve(s)
		n, l := r.load(s, 0)
		return wrong || n != 4 || l.Blocks != 4 || !r.right(s, 0, 4)
	}, func(o *rigOptions) { o.limit, o.elsewhere = 64, true })
}

// TestAbort (race 6): a sequence that ends during its load or store releases its blocks at
// once; they are used for others when the copies have ended.
func TestAbort(t *testing.T) {
	eachTier(t, func(r *rig, rule bool) bool {
		s := r.sequence(1, "a", 8)
		r.fill(s, 0, 8)
		r.tiers.Store(s.keys, 0, s.table.Blocks(), offload.Filled)
		s.table.Release(false)
		x := r.sequence(2, "x", 56)
		r.fill(x, 0, 56)
		r.settle()
		x.table.Release(false)
		r.reserve(s)
		r.ok(r.tiers.Load(1, s.keys, 0, s.table.Blocks()))
		if n, wait := r.tiers.Lookup(s.keys, 0, 8*blockTokens); n != 0 || !wait {
			r.Errorf("found %d, wait: %t, while another sequence loads it", n, wait)
		}
		s.table.Release(false)
		r.reserve(x)
		r.fill(x, 0, 56)
		r.settle()
		wrong := !r.right(x, 0, 56)
		x.table.Release(false)
		r.overwrite()
		r.reserve(s)
		n, l := r.load(s, 0)
		return wrong || n != 8 || l.Blocks != 8 || !r.right(s, 0, 8)
	}, func(o *rigOptions) { o.limit, o.elsewhere = 64, true })
}

// TestReset: ids of blocks that are still being copied are used again behind those copies.
func TestReset(t *testing.T) {
	watched(t, rigOptions{config: offload.Config{CPUBlocks: 8}, limit: 64}, func(r *rig, rule bool) bool {
		a, b := r.sequence(1, "a", 6), r.sequence(2, "b", 6)
		r.fill(a, 0, 6)
		r.fill(b, 0, 6)
		r.store(a, 0, 6)
		a.table.Release(false)
		r.overwrite()
		r.reserve(a)
		r.ok(r.tiers.Load(1, a.keys, 0, a.table.Blocks()))
		if !rule {
			r.tiers.ForgetTransfers()
		}
		r.tiers.Reset()
		if n, wait := r.tiers.Lookup(b.keys, 0, 6*blockTokens); n != 0 || wait {
			r.Errorf("found %d, wait %t after a reset", n, wait)
		}
		r.tiers.Store(b.keys, 0, b.table.Blocks(), offload.Filled)
		all := r.settle()
		return len(all) != 1 || all[0].Blocks != 6 || !r.right(a, 0, 6)
	})
}

// TestRevoked (race 7): a peer takes its memory back while blocks are there, stored there and
// loaded from there, all of a slab and some. What is loaded is right; what was revoked is not
// found any more, or in host memory.
func TestRevoked(t *testing.T) {
	for _, when := range []string{"idle", "store", "load"} {
		for _, backed := range []bool{false, true} {
			name := when
			o := rigOptions{config: offload.Config{GPUBlocks: 40}, harvest: peers(), limit: 64}
			if backed {
				name += ", backed"
				o.config.CPUBlocks = 40
			}
			t.Run(name, func(t *testing.T) {
				rules := []bool{true}
				if when != "idle" {
					rules = append(rules, false)
				}
				watchedWith(t, o, func(r *rig, rule bool) bool {
					if !rule {
						r.tiers.WithoutReferences(when == "load", when == "store")
					}
					s := r.sequence(1, "a", 8)
					r.fill(s, 0, 8)
					r.tiers.Store(s.keys, 0, s.table.Blocks(), offload.Filled)
					if when == "store" {
						r.revoke()
						if p := r.stats(offload.PeerGPU); p.Stored != 0 {
							r.Errorf("%+v", p)
						}
					}
					r.settle()
					s.table.Release(false)
					r.overwrite()
					r.reserve(s)
					if when == "idle" {
						r.revoke()
					}
					want := 8
					if when != "load" && !backed {
						want = 0
					}
					n, wait := r.tiers.Lookup(s.keys, 0, 8*blockTokens)
					if wait || n != want {
						r.Errorf("found %d, want %d, wait %t", n, want, wait)
					}
					wrong := false
					if n > 0 {
						r.ok(r.tiers.Load(1, s.keys, 0, s.table.Blocks()[:n]))
						if when == "load" {
							r.revoke()
						}
						all := r.settle()
						if len(all) != 1 || rule && all[0].Blocks != n {
							r.Errorf("loaded %+v of %d", all, n)
						}
						wrong = !r.right(s, 0, n)
					}
					r.tiers.Poll()
					p := r.stats(offload.PeerGPU)
					if p.Free != p.Capacity || rule && p.Stored != p.LostBlocks || p.Stored > 0 != (when != "store") {
						r.Errorf("%+v", p)
					}
					if !rule && when == "store" {
						return wrong
					}
					// It can be stored there again, and comes back.
					r.fill(s, 0, 8)
					r.tiers.Store(s.keys, 0, s.table.Blocks(), offload.Filled)
					r.settle()
					s.table.Release(false)
					r.overwrite()
					r.reserve(s)
					m, l := r.load(s, 0)
					return wrong || m != 8 || l.Blocks != 8 || !r.right(s, 0, 8) || r.stats(offload.PeerGPU).Loaded < 8
				}, rules...)
			})
		}
	}
}

// revoke takes the memory of all peers back and waits until that is done.
func (r *rig) revoke() {
	r.Helper()
	var all []*harvest.Reclamation
	for _, p := range []device.Space{device.HBM(1), device.HBM(2)} {
		c, err := r.harvest.Reclaim(p, 1<<40, time.Minute)
		r.ok(err)
		all = append(all, c)
	}
	for _, c := range all {
		r.ok(c.Wait(r.Context()))
	}
}
