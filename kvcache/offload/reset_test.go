package offload_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kvcache/offload"
)

// resets runs a test for every tier and schedule, with slow links.
func resets(t *testing.T, test func(t *testing.T, r *rig, c tierCase)) {
	for _, c := range everyTier(t) {
		t.Run(c.name, func(t *testing.T) {
			for schedule := range emulated.Schedule(3) {
				o := c.options
				o.limit = 64
				o.machine.Schedule, o.machine.Seed = schedule, 3
				o.machine.HostLink, o.machine.PeerLink = emulated.Link{BytesPerSecond: 1e6}, emulated.Link{BytesPerSecond: 1e6}
				r := newRig(t, o)
				test(t, r, c)
				r.close()
			}
		})
	}
}

// failOf has all copies fail that read or write these blocks of the GPU.
func (r *rig) failOf(blocks []int32) {
	at := map[device.Addr]bool{}
	for _, b := range blocks {
		at[r.pool.Region(b).Addr] = true
	}
	r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: -1, Match: func(p emulated.Point) bool {
		return p.Stream != "compute" && (at[p.Src.Addr] || at[p.Dst.Addr])
	}})
}

// TestResetDuringLoad: a load that is under way at a reset ends as usual. Then no file is left.
func TestResetDuringLoad(t *testing.T) {
	resets(t, func(t *testing.T, r *rig, c tierCase) {
		s := r.sequence(1, "a", 6)
		r.fill(s, 0, 6)
		r.store(s, 0, 6)
		s.table.Release(false)
		r.overwrite()
		r.reserve(s)
		r.ok(r.tiers.Load(1, s.keys, 0, s.table.Blocks()))
		r.tiers.Reset()
		if l := r.settle(); len(l) != 1 || l[0].Blocks != 6 || l[0].Err != nil || !r.right(s, 0, 6) {
			t.Errorf("loaded %+v", l)
		}
		x := r.sequence(2, "x", 1)
		r.fill(x, 0, 1)
		for range 8 { // the files are removed meanwhile
			r.store(x, 0, 1)
			r.tiers.Drop(x.keys)
		}
		files, err := filepath.Glob(filepath.Join(r.o.config.Directory, "moeserve-kv-*", "*-[1-6]"))
		if c.medium == offload.File && (err != nil || len(files) > 0) {
			t.Errorf("left: %v, %v", files, err)
		}
	})
}

// TestResetDuringStore: of a store that is under way at a reset nothing is left, not even memory.
func TestResetDuringStore(t *testing.T) {
	resets(t, func(t *testing.T, r *rig, c tierCase) {
		s := r.sequence(1, "a", 6)
		r.fill(s, 0, 6)
		r.tiers.Store(s.keys, 0, s.table.Blocks(), offload.Filled)
		r.tiers.Reset()
		r.settle()
		if got := r.stats(c.medium); got.Free != got.Capacity || got.Stored != 0 || r.blocks.Held() > 0 {
			t.Errorf("%+v", got)
		}
		if n, wait := r.tiers.Lookup(s.keys, 0, 100); n != 0 || wait {
			t.Errorf("found %d, wait %t", n, wait)
		}
		x := r.sequence(2, "x", 1)
		r.fill(x, 0, 1)
		for range 8 { // files are removed meanwhile, and peers' memory is released
			r.store(x, 0, 1)
			r.tiers.Drop(x.keys)
		}
		switch c.medium {
		case offload.PeerGPU:
			_, err := r.harvest.Tick(r.m.Now())
			r.ok(err)
			for _, p := range r.harvest.State().Peers {
				if p.Used != 0 {
					t.Errorf("%d bytes of %v are used", p.Used, p.Space)
				}
			}
		case offload.File:
			if files, err := filepath.Glob(filepath.Join(r.o.config.Directory, "moeserve-kv-*", "*-[1-6]")); err != nil || len(files) > 0 {
				t.Errorf("left: %v, %v", files, err)
			}
		}
	})
}

// TestResetAndStoreAgain: what a load or a store from before a reset reports of its blocks does
// not change what was stored under their keys since.
func TestResetAndStoreAgain(t *testing.T) {
	for _, during := range []string{"load", "store"} {
		t.Run(during, func(t *testing.T) {
			resets(t, func(t *testing.T, r *rig, c tierCase) {
				a, b := r.sequence(1, "a", 6), r.sequence(2, "a", 6)
				r.fill(a, 0, 6)
				r.fill(b, 0, 6)
				if during == "load" {
					r.store(a, 0, 6)
					r.failOf(a.table.Blocks())
					r.ok(r.tiers.Load(1, a.keys, 0, a.table.Blocks()))
				} else {
					r.failOf(a.table.Blocks())
					r.tiers.Store(a.keys, 0, a.table.Blocks(), offload.Filled)
				}
				r.tiers.Reset()
				r.tiers.Store(b.keys, 0, b.table.Blocks(), offload.Filled)
				if l := r.settle(); during == "load" && (len(l) != 1 || l[0].Blocks > 0) {
					t.Errorf("loaded %+v", l)
				}
				x := r.sequence(3, "a", 6)
				if n, l := r.load(x, 0); n != 6 || l.Blocks != 6 || !r.right(x, 0, 6) {
					t.Errorf("found %d, loaded %+v", n, l)
				}
				if got := r.stats(c.medium); got.Evictable != 6 || got.LostBlocks != 0 {
					t.Errorf("%+v", got)
				}
			})
		})
	}
}

// TestFolderIsLocked: the folder of a tier that is open stays when another tier opens in its
// directory, and so does whatever is not a file tier's.
func TestFolderIsLocked(t *testing.T) {
	directory := t.TempDir()
	open := func() *rig {
		return newRig(t, rigOptions{config: offload.Config{FileBlocks: 20, Directory: directory}})
	}
	r := open()
	s := r.sequence(1, "a", 4)
	r.fill(s, 0, 4)
	r.store(s, 0, 4)
	elsewhere := t.TempDir()
	lock, err := os.ReadFile(mustGlob(t, directory, "moeserve-kv-*", "lock"))
	r.ok(err)
	folder := func(name string, files ...string) {
		r.ok(os.Mkdir(filepath.Join(directory, name), 0o700))
		for _, f := range files {
			r.ok(os.WriteFile(filepath.Join(directory, name, f), lock, 0o600))
		}
	}
	folder("moeserve-kv-1", "0123456789abcdef-1")         // no lock
	folder("moeserve-kv-2", "lock", "mine")               // a file of somebody's
	folder("other", "lock", "0123456789abcdef-1")         // no folder of a tier
	folder("moeserve-kv-3", "lock", "0123456789abcdef-1") // abandoned
	r.ok(os.WriteFile(filepath.Join(elsewhere, "lock"), lock, 0o600))
	r.ok(os.Symlink(elsewhere, filepath.Join(directory, "moeserve-kv-4")))
	folder("moeserve-kv-5")
	r.ok(os.Symlink(filepath.Join(elsewhere, "lock"), filepath.Join(directory, "moeserve-kv-5", "lock")))
	folder("moeserve-kv-6", "0123456789abcdef-1")
	r.ok(os.WriteFile(filepath.Join(directory, "moeserve-kv-6", "lock"), []byte("something else"), 0o600))
	r.ok(os.WriteFile(filepath.Join(directory, "moeserve-kv-7"), lock, 0o600))

	x := open()
	x.close()
	for _, name := range []string{"moeserve-kv-1/0123456789abcdef-1", "moeserve-kv-2/mine", "moeserve-kv-2/lock", "other/0123456789abcdef-1", "moeserve-kv-4/lock", "moeserve-kv-5/lock", "moeserve-kv-6/0123456789abcdef-1", "moeserve-kv-7"} {
		if _, err := os.Stat(filepath.Join(directory, name)); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(filepath.Join(directory, "moeserve-kv-3")); err == nil {
		t.Error("an abandoned folder stays")
	}
	s.table.Release(false)
	r.overwrite()
	r.reserve(s)
	if n, l := r.load(s, 0); n != 4 || l.Blocks != 4 || !r.right(s, 0, 4) {
		t.Errorf("found %d, loaded %+v", n, l)
	}
	log := x.logged()
	for _, want := range []string{"killed removed\" folder=" + directory + "/moeserve-kv-3 files=2", "not removed", "moeserve-kv-2", "1 other files"} {
		if !strings.Contains(log, want) {
			t.Errorf("log without %q:\n%s", want, log)
		}
	}
}

func mustGlob(t *testing.T, parts ...string) string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(parts...))
	if err != nil || len(all) != 1 {
		t.Fatalf("%v: %v, %v", parts, all, err)
	}
	return all[0]
}
