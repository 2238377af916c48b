package offload_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kvcache/offload"
)

// onePeer has the tier in peers' memory on one of them.
func onePeer(o rigOptions) rigOptions {
	if o.config.GPUBlocks > 0 {
		o.config.DestGPUs = []int{2}
	}
	return o
}

// TestFailedLoad: a load whose copy fails twice ends with what has arrived before, and the
// rest is not found there any more.
func TestFailedLoad(t *testing.T) {
	for _, c := range everyTier(t) {
		t.Run(c.name, func(t *testing.T) {
			o := onePeer(c.options)
			o.chunk = 2 << 10 // two blocks
			r := newRig(t, o)
			s := r.sequence(1, "a", 8)
			r.fill(s, 0, 8)
			r.store(s, 0, 8)
			s.table.Release(false)
			r.overwrite()
			r.reserve(s)
			r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Skip: 2, Times: 2, Match: func(p emulated.Point) bool {
				return p.To == device.HBM(0) && p.Stream != "compute"
			}})
			n, l := r.load(s, 0)
			if n != 8 || l.Blocks != 4 || l.Err == nil || !r.right(s, 0, l.Blocks) {
				t.Errorf("found %d, loaded %+v", n, l)
			}
			got := r.stats(c.medium)
			if got.FailedLoads != int64(8-l.Blocks) || got.LostBlocks != got.FailedLoads || got.Loaded != int64(l.Blocks) {
				t.Errorf("%+v", got)
			}
			if m, wait := r.tiers.Lookup(s.keys, 0, 100); m != l.Blocks || wait {
				t.Errorf("found %d, wait %t", m, wait)
			}
			if !strings.Contains(r.logged(), "kv load incomplete") {
				t.Error("nothing is logged")
			}
		})
	}
}

// TestFailedStore: a store whose copy fails leaves nothing behind, and can be made again.
func TestFailedStore(t *testing.T) {
	for _, c := range everyTier(t) {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, onePeer(c.options))
			s := r.sequence(1, "a", 8)
			r.fill(s, 0, 8)
			r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: 2, Match: func(p emulated.Point) bool { return p.From == device.HBM(0) }})
			r.store(s, 0, 8)
			if got := r.stats(c.medium); got.FailedStores != 8 || got.Stored != 0 || got.Free != got.Capacity {
				t.Errorf("%+v", got)
			}
			if e := r.tiers.TakeEvents(); len(e) > 0 {
				t.Errorf("events %+v", e)
			}
			r.store(s, 0, 8)
			s.table.Release(false)
			r.overwrite()
			r.reserve(s)
			if n, l := r.load(s, 0); n != 8 || l.Blocks != 8 || !r.right(s, 0, 8) {
				t.Errorf("found %d, loaded %+v", n, l)
			}
		})
	}
}

// TestLostPeer: a peer that is lost is excluded, and all that was there is found in host
// memory or not at all.
func TestLostPeer(t *testing.T) {
	for _, when := range []string{"idle", "load", "store"} {
		t.Run(when, func(t *testing.T) {
			h := peers()
			h.Peers = h.Peers[:1]
			r := newRig(t, rigOptions{config: offload.Config{GPUBlocks: 20, CPUBlocks: 5}, harvest: h})
			s := r.sequence(1, "a", 8)
			r.fill(s, 0, 8)
			r.tiers.Store(s.keys, 0, s.table.Blocks()[:5], offload.Filled)
			if when == "store" {
				r.ok(r.m.Lose(1))
			}
			r.settle()
			r.tiers.Store(s.keys, 5, s.table.Blocks()[5:], offload.Filled) // evicts the first three from host memory
			r.settle()
			s.table.Release(false)
			r.overwrite()
			r.reserve(s)
			if when == "load" {
				if n, _ := r.tiers.Lookup(s.keys, 0, 100); n != 8 {
					t.Errorf("found %d", n)
				}
				r.ok(r.tiers.Load(1, s.keys, 0, s.table.Blocks()))
			}
			if when != "store" {
				r.ok(r.m.Lose(1))
			}
			if l := r.settle(); when == "load" && (len(l) != 1 || l[0].Blocks > 8 || l[0].Blocks < 8 && l[0].Err == nil || !r.right(s, 0, l[0].Blocks)) {
				t.Errorf("loaded %+v", l)
			}
			_, err := r.harvest.Tick(r.m.Now())
			r.ok(err)
			r.tiers.Poll()
			if p := r.stats(offload.PeerGPU); p.Free != p.Capacity {
				t.Errorf("%+v", p)
			}
			if p := r.harvest.State().Peers[0]; p.Health == nil {
				t.Errorf("%+v", p)
			}
			for i, k := range s.keys {
				if p := r.tiers.Locate(k); p.Medium == offload.PeerGPU {
					t.Errorf("block %d is in %v", i, p)
				}
			}
			r.tiers.Store(s.keys, 0, s.table.Blocks()[:4], offload.Filled)
			r.settle()
			if p := r.stats(offload.PeerGPU); p.Free != p.Capacity {
				t.Errorf("stored on a lost peer: %+v", p)
			}
		})
	}
}

// TestLostBetween: what is lost between lookup and load ends the load before it, at once.
func TestLostBetween(t *testing.T) {
	r := newRig(t, rigOptions{config: offload.Config{CPUBlocks: 20}})
	s := r.sequence(1, "a", 4)
	r.fill(s, 0, 4)
	r.store(s, 0, 4)
	if n, _ := r.tiers.Lookup(s.keys, 0, 100); n != 4 {
		t.Errorf("found %d", n)
	}
	r.tiers.Reset()
	r.ok(r.tiers.Load(1, s.keys, 0, s.table.Blocks()))
	if r.tiers.Pending() != 1 {
		t.Error("the load is not pending")
	}
	r.ok(r.tiers.Wait(t.Context()))
	if l := r.tiers.Poll(); len(l) != 1 || l[0].Seq != 1 || l[0].Blocks != 0 || l[0].Err == nil {
		t.Errorf("loaded %+v", l)
	}
	r.ok(r.tiers.Wait(t.Context())) // nothing is under way
}

// TestRefusedCopy: where a copy cannot even be started, what the tier has stays there, and is loaded
// the next time. Of a store nothing is left.
func TestRefusedCopy(t *testing.T) {
	for _, c := range everyTier(t) {
		if c.medium == offload.PeerGPU {
			continue // a failure counts for the peer: what it has is lost
		}
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, c.options)
			s := r.sequence(1, "a", 8)
			r.fill(s, 0, 8)
			f, err := r.m.NewFence("closed")
			r.ok(err)
			r.ok(f.Close())
			closed := device.Point{Fence: f, Value: 1 << 20}
			r.tiers.Behind(closed)
			r.store(s, 0, 8)
			if got := r.stats(c.medium); got.Stored != 0 || got.Free != got.Capacity || r.blocks.Held() > 0 {
				t.Errorf("%+v", got)
			}
			r.tiers.Behind()
			r.store(s, 0, 8)
			s.table.Release(false)
			r.overwrite()
			r.reserve(s)
			r.logged()
			r.tiers.Behind(closed)
			if n, l := r.load(s, 0); n != 8 || l.Blocks != 0 || l.Err == nil {
				t.Errorf("found %d, loaded %+v", n, l)
			}
			if got := r.stats(c.medium); got.LostBlocks != 0 || got.Evictable != 8 {
				t.Errorf("%+v", got)
			}
			if log := r.logged(); !strings.Contains(log, "kv load incomplete") || strings.Contains(log, "has lost") {
				t.Errorf("log: %s", log)
			}
			r.tiers.Behind()
			if n, l := r.load(s, 0); n != 8 || l.Blocks != 8 || !r.right(s, 0, 8) {
				t.Errorf("found %d, loaded %+v", n, l)
			}
		})
	}
}

// TestDamagedFile: a block whose file is changed, cut or gone is lost, and no wrong byte is
// loaded.
func TestDamagedFile(t *testing.T) {
	for name, damage := range map[string]func(string) error{
		"gone":  os.Remove,
		"cut":   func(f string) error { return os.Truncate(f, 100) },
		"empty": func(f string) error { return os.Truncate(f, 0) },
		"changed": func(f string) error {
			b, err := os.ReadFile(f)
			if err == nil {
				b[len(b)-1] ^= 1
				err = os.WriteFile(f, b, 0o600)
			}
			return err
		},
		"another": func(f string) error {
			others, err := filepath.Glob(filepath.Join(filepath.Dir(f), "*-1"))
			if err == nil {
				err = os.Rename(others[0], f)
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			folder := t.TempDir()
			r := newRig(t, rigOptions{config: offload.Config{FileBlocks: 20, Directory: folder}})
			s := r.sequence(1, "a", 6)
			r.fill(s, 0, 6)
			r.store(s, 0, 6)
			s.table.Release(false)
			r.overwrite()
			r.reserve(s)
			files, err := filepath.Glob(filepath.Join(folder, "*", "*-4"))
			if err != nil || len(files) != 1 {
				t.Fatalf("%v: %v", files, err)
			}
			r.ok(damage(files[0]))
			want := 3
			if name == "another" {
				want = 0
			}
			n, l := r.load(s, 0)
			if n != 6 || l.Blocks != want || l.Err == nil || !r.right(s, 0, want) {
				t.Errorf("found %d, loaded %+v", n, l)
			}
			if n, _ := r.tiers.Lookup(s.keys, 0, 100); n != want {
				t.Errorf("found %d", n)
			}
			r.fill(s, want, 6)
			r.store(s, 0, 6)
			s.table.Release(false)
			r.overwrite()
			r.reserve(s)
			if n, l := r.load(s, 0); n != 6 || l.Blocks != 6 || !r.right(s, 0, 6) {
				t.Errorf("found %d, loaded %+v", n, l)
			}
		})
	}
}

// TestFolderGone: stores fail when the folder is gone in mid-run, and nothing else does.
func TestFolderGone(t *testing.T) {
	folder := t.TempDir()
	r := newRig(t, rigOptions{config: offload.Config{FileBlocks: 20, CPUBlocks: 20, Directory: folder}})
	s := r.sequence(1, "a", 6)
	r.fill(s, 0, 6)
	all, err := filepath.Glob(filepath.Join(folder, "moeserve-kv-*"))
	if err != nil || len(all) != 1 {
		t.Fatalf("%v: %v", all, err)
	}
	r.ok(os.RemoveAll(all[0]))
	r.store(s, 0, 6)
	if f := r.stats(offload.File); f.FailedStores != 6 || f.Free != f.Capacity {
		t.Errorf("%+v", f)
	}
	if !strings.Contains(r.logged(), "kv blocks not stored") {
		t.Error("nothing is logged")
	}
	if n, l := r.load(s, 0); n != 6 || l.Blocks != 6 || !r.right(s, 0, 6) {
		t.Errorf("found %d, loaded %+v", n, l)
	}
}

// TestMoreBlocksThanPeersHave: the account of the peer tier is no larger than the peers' memory, however
// many blocks are asked for.
func TestMoreBlocksThanPeersHave(t *testing.T) {
	r := newRig(t, rigOptions{
		config: offload.Config{GPUBlocks: 2e9, DestGPUs: []int{2}}, harvest: peers(),
		machine: emulated.Options{GPUs: slices.Repeat([]emulated.GPU{{MemoryBytes: 1 << 20}}, 3)},
	})
	if got := r.stats(offload.PeerGPU).Capacity; got != 1024 {
		t.Errorf("%d blocks", got)
	}
}

// TestBadOptions: what cannot work is an error of New that names the setting.
func TestBadOptions(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		options rigOptions
		want    []string
	}{
		"host memory":       {rigOptions{config: offload.Config{CPUBlocks: 40}, machine: emulated.Options{Host: emulated.GPU{MemoryBytes: 32 << 10}}}, []string{"num_cpu_blocks", "out of memory"}},
		"less than a block": {rigOptions{config: offload.Config{CPUBytes: 1000}}, []string{"cpu_bytes_to_use) of 1000 bytes", "1024"}},
		"block size":        {rigOptions{config: offload.Config{CPUBlocks: 4, BlockTokens: 6}}, []string{"block_size is 6", "--block-size"}},
		"both sizes":        {rigOptions{config: offload.Config{CPUBlocks: 4, BlockTokens: 8, BlockFactor: 4}}, []string{"block_size", "block_size_factor"}},
		"no tier":           {rigOptions{}, []string{"num_cpu_blocks"}},
		"no peers":          {rigOptions{config: offload.Config{GPUBlocks: 4}}, []string{"num_gpu_blocks", "--peers"}},
		"no such peer":      {rigOptions{config: offload.Config{GPUBlocks: 4, DestGPUs: []int{7}}, harvest: peers()}, []string{"dest_gpu_id is 7", "gpu1"}},
		"the GPU itself":    {rigOptions{config: offload.Config{GPUBlocks: 4, DestGPUs: []int{0}}, harvest: peers()}, []string{"dest_gpu_id is 0"}},
		"no folder":         {rigOptions{config: offload.Config{FileBlocks: 4, Directory: filepath.Join(file, "..", "none")}}, []string{"directory", "none", "no such file"}},
		"not a folder":      {rigOptions{config: offload.Config{FileBlocks: 4, Directory: file}}, []string{"directory", "not a directory"}},
		"more blocks than the directory has room": {rigOptions{config: offload.Config{FileBlocks: 2e9}, headBytes: 1 << 20}, []string{"num_file_blocks is 2000000000, of 16777264 bytes each", "bytes are free in directory", "set it to at most"}},
		"patience":    {rigOptions{config: offload.Config{CPUBlocks: 4}, patience: -1}, []string{"Patience"}},
		"store limit": {rigOptions{config: offload.Config{CPUBlocks: 4}, limit: -1}, []string{"StoreLimit"}},
	} {
		t.Run(name, func(t *testing.T) {
			if c.options.config.FileBlocks > 0 && c.options.config.Directory == "" {
				c.options.config.Directory = t.TempDir()
			}
			r, err := openRig(t, c.options)
			wantError(t, err, c.want...)
			r.close()
		})
	}
}
