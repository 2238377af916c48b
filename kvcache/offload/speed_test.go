package offload_test

import (
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kvcache/offload"
)

// TestScatteredLoad: one load of scattered blocks runs at 90 % or more of the rate that
// the same copies have on a stream of their own.
func TestScatteredLoad(t *testing.T) {
	for _, c := range everyTier(t)[:2] {
		t.Run(c.name, func(t *testing.T) {
			const n = 32
			o := onePeer(c.options)
			o.headBytes = 16 << 10 // blocks of 256 KiB
			o.machine.HostLink = emulated.Link{BytesPerSecond: 50e9, Latency: 2 * time.Microsecond}
			o.machine.PeerLink = emulated.Link{BytesPerSecond: 400e9, Latency: 2 * time.Microsecond}
			if o.harvest != nil {
				o.harvest.Clients[offload.HarvestClient] = slabs(8 * 256 << 10)
			}
			r := newRig(t, o)
			s := r.sequence(1, "a", n)
			blocks := s.table.Blocks()
			for i := range n / 2 { // no two are adjacent
				blocks[i], blocks[(i*7+5)%n] = blocks[(i*7+5)%n], blocks[i]
			}
			r.fill(s, 0, n)
			r.store(s, 0, n)
			from := device.Host
			if c.medium == offload.PeerGPU {
				from = device.HBM(2)
			}
			raw := r.raw(from, n)
			began := r.m.Now()
			r.ok(r.tiers.Load(1, s.keys, 0, blocks))
			r.settle()
			took := r.m.Now() - began
			if took > raw*10/9 {
				t.Errorf("%d blocks of %d bytes take %v, as raw copies %v", n, r.n, took, raw)
			}
			if !r.right(s, 0, n) {
				t.Error("wrong bytes")
			}
		})
	}
}

// raw is the time that n copies of a block from a memory take on a stream.
func (r *rig) raw(from device.Space, n int) time.Duration {
	r.Helper()
	src, err := r.m.Alloc(from, r.n, "raw")
	r.ok(err)
	dst, err := r.m.Alloc(device.HBM(0), int64(n)*r.n, "raw")
	r.ok(err)
	defer func() {
		r.ok(dst.Free())
		r.ok(src.Free())
	}()
	if from == device.Host {
		clear(src.Write(0, r.n))
	} else {
		r.ok(r.compute.Copy(src.Range(0, r.n), r.pool.Region(0).Range))
		r.ok(r.compute.Synchronize(r.Context()))
	}
	began := r.m.Now()
	for i := range n {
		r.ok(r.compute.Copy(dst.Range(int64(i)*r.n, r.n), src.Range(0, r.n)))
	}
	r.ok(r.compute.Synchronize(r.Context()))
	return r.m.Now() - began
}

// TestSideBySide: a short load that starts behind a long one shares the link with it, and
// does not wait for its end.
func TestSideBySide(t *testing.T) {
	for _, c := range everyTier(t)[:2] {
		t.Run(c.name, func(t *testing.T) {
			o := onePeer(c.options)
			o.headBytes, o.chunk = 4<<10, 128<<10 // blocks of 64 KiB
			o.blocks = 80
			o.machine.HostLink = emulated.Link{BytesPerSecond: 1e9}
			o.machine.PeerLink = emulated.Link{BytesPerSecond: 1e9}
			if o.harvest != nil {
				o.harvest.Clients[offload.HarvestClient] = slabs(8 * 64 << 10)
			}
			r := newRig(t, o)
			long, short := r.sequence(1, "long", 32), r.sequence(2, "short", 4)
			r.fill(long, 0, 32)
			r.fill(short, 0, 4)
			r.store(long, 0, 20) // within the limit of stores
			r.store(long, 20, 32)
			r.store(short, 0, 4)
			began := r.m.Now()
			r.ok(r.tiers.Load(1, long.keys, 0, long.table.Blocks()))
			r.ok(r.tiers.Load(2, short.keys, 0, short.table.Blocks()))
			took := map[int64]time.Duration{}
			for len(took) < 2 {
				r.ok(r.tiers.Wait(t.Context()))
				for _, l := range r.tiers.Poll() {
					if l.Err != nil {
						t.Fatal(l.Err)
					}
					took[l.Seq] = r.m.Now() - began
				}
			}
			alone := time.Duration(float64(4*r.n) / 1e9 * float64(time.Second))
			// Half of the link, and the chunks of the long one that were under way before.
			if most := 2*alone + 2*128*1100*time.Nanosecond + alone/4; took[2] > most {
				t.Errorf("the short load takes %v, alone %v, want at most %v", took[2], alone, most)
			}
			if all := time.Duration(float64(36*r.n) / 1e9 * float64(time.Second)); took[1] > all*10/9 {
				t.Errorf("both loads take %v, their bytes %v", took[1], all)
			}
			if !r.right(long, 0, 32) || !r.right(short, 0, 4) {
				t.Error("wrong bytes")
			}
		})
	}
}
