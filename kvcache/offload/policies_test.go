package offload_test

import (
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/kvcache/tier"
)

// chosen stores what was released, in host memory only, and loads one part less than the cost model
// chooses.
type chosen struct {
	offered int
	runs    [][]offload.Part
}

func (c *chosen) Offered(keys []kvcache.Key, _ offload.Cause) { c.offered += len(keys) }

func (c *chosen) Stores(medium string, keys []kvcache.Key, why offload.Cause) int {
	if why == offload.Filled || medium != offload.CPU {
		return -1
	}
	return len(keys) + 1
}

func (c *chosen) Loads(run []offload.Part, costs int) int {
	c.runs = append(c.runs, run)
	return costs - 1
}

func (c *chosen) Waits() bool { return true }

// newest evicts the block first that became evictable last.
type newest struct{ ids []int32 }

func (n *newest) Insert(int32, kvcache.Key) {}

func (n *newest) SetEvictable(id int32, evictable bool) {
	if n.Remove(id); evictable {
		n.ids = append(n.ids, id)
	}
}

func (n *newest) Touch(int32, kvcache.Key, tier.State) {}

func (n *newest) Remove(id int32) {
	n.ids = slices.DeleteFunc(n.ids, func(other int32) bool { return other == id })
}

func (n *newest) Evict(victims []int32, count int, keep func(int32) bool) ([]int32, bool) {
	for i := len(n.ids) - 1; i >= 0 && count > 0; i-- {
		if id := n.ids[i]; !keep(id) {
			victims, n.ids = append(victims, id), slices.Delete(n.ids, i, i+1)
			count--
		}
	}
	return victims, count == 0
}

func parse(t *testing.T, extra string) offload.Config {
	t.Helper()
	c, err := offload.ParseTransferConfig([]byte(`{"kv_connector_extra_config": {` + extra + `}}`))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

var registerNewest = sync.OnceFunc(func() {
	tier.RegisterPolicy("newest", func(int) tier.Eviction { return &newest{} })
})

// TestRegisteredPolicies: what is stored, loaded and evicted is decided by policies that the
// configuration names.
func TestRegisteredPolicies(t *testing.T) {
	p := &chosen{}
	t.Cleanup(func() { offload.Unregister("chosen") })
	offload.RegisterStorePolicy("chosen", func(c offload.Config) (offload.StorePolicy, error) {
		if c.MaxTrackerSize != 7 {
			t.Errorf("made for %+v", c)
		}
		return p, nil
	})
	offload.RegisterLoadPolicy("chosen", func(offload.Config) (offload.LoadPolicy, error) { return p, nil })
	registerNewest()
	r := newRig(t, rigOptions{
		config:  parse(t, `"num_gpu_blocks": 10, "num_cpu_blocks": 4, "store_policy": "chosen", "load_policy": "chosen", "eviction_policy": "newest", "max_tracker_size": 7`),
		harvest: peers(),
	})
	s := r.sequence(1, "a", 6)
	r.fill(s, 0, 6)
	r.store(s, 0, 6)
	r.tiers.Store(s.keys, 0, s.table.Blocks()[:4], offload.Released)
	r.settle()
	if got := r.storedBlocks(); got != "PEER_GPU 0 CPU 4 " || p.offered != 10 {
		t.Errorf("%s, %d offered", got, p.offered)
	}
	if n, wait := r.tiers.Lookup(s.keys, 0, 100); n != 0 || wait || len(p.runs) != 1 || p.runs[0][0].Blocks != 4 {
		t.Errorf("found %d, wait %t, runs %+v", n, wait, p.runs)
	}
	if d := r.tiers.Decisions(); d.Computed != 1 || d.ComputedTokens != 16 {
		t.Errorf("%+v", d)
	}
	// The same sequence, which the scheduler asks about again, and another one that begins alike.
	for i, keys := range [][]kvcache.Key{s.keys, slices.Clone(s.keys)} {
		r.tiers.Lookup(keys, 0, 100)
		if d := r.tiers.Decisions(); d.Computed != int64(i+1) || d.ComputedTokens != int64(16*(i+1)) {
			t.Errorf("asked again, %d: %+v", i, d)
		}
	}
	// The end of a prefix is completed first, so the newest is its beginning.
	x := r.sequence(2, "x", 1)
	r.fill(x, 0, 1)
	r.tiers.Store(x.keys, 0, x.table.Blocks(), offload.Released)
	r.settle()
	if a, b := r.tiers.Locate(s.keys[0]), r.tiers.Locate(s.keys[3]); a.Medium != "" || b.Medium != offload.CPU {
		t.Errorf("the first block is %v, the last %v", a, b)
	}
	for name, again := range map[string]func(){
		"store":    func() { offload.RegisterStorePolicy("chosen", nil) },
		"load":     func() { offload.RegisterLoadPolicy("never", nil) },
		"eviction": func() { tier.RegisterPolicy("newest", nil) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s policy: registered twice", name)
				}
			}()
			again()
		}()
	}
}

// TestStorePolicies: when each of them stores.
func TestStorePolicies(t *testing.T) {
	for config, want := range map[string]string{
		`"store_policy": "filled"`:                             "filled 6, released 6, again 6, released 6, preempted 8",
		`"store_policy": "released"`:                           "filled 0, released 6, again 6, released 6, preempted 8",
		`"store_policy": "preempted"`:                          "filled 0, released 0, again 0, released 0, preempted 2",
		`"store_policy": "reused"`:                             "filled 0, released 0, again 4, released 4, preempted 6",
		`"store_threshold": 2`:                                 "filled 0, released 0, again 4, released 4, preempted 6",
		`"store_threshold": 3`:                                 "filled 0, released 0, again 0, released 0, preempted 2",
		`"store_threshold": 1`:                                 "filled 6, released 6, again 6, released 6, preempted 8",
		`"store_threshold": 0`:                                 "filled 6, released 6, again 6, released 6, preempted 8",
		`"store_policy": "reused", "max_tracker_size": 6`:      "filled 0, released 0, again 4, released 4, preempted 6",
		`"store_policy": "reused", "max_tracker_size": 2`:      "filled 0, released 0, again 0, released 0, preempted 2",
		`"store_policy": "reused", "durability": "lossy"`:      "filled 0, released 0, again 4, released 4, preempted 6",
		`"store_policy": "released", "block_size_factor": 2`:   "filled 0, released 3, again 3, released 3, preempted 4",
		`"store_policy": "reused", "block_size_factor": 2`:     "filled 0, released 0, again 2, released 2, preempted 3",
		`"store_policy": "filled", "eviction_policy": "arc"`:   "filled 6, released 6, again 6, released 6, preempted 8",
		`"store_policy": "released", "eviction_policy": "arc"`: "filled 0, released 6, again 6, released 6, preempted 8",
	} {
		r := newRig(t, rigOptions{config: parse(t, `"num_cpu_blocks": 20, `+config)})
		var got []string
		offer := func(name string, s *sequence, blocks int, why offload.Cause) {
			r.tiers.Store(s.keys, 0, s.table.Blocks()[:blocks], why)
			r.settle()
			got = append(got, name+" "+strings.TrimSuffix(strings.TrimPrefix(r.storedBlocks(), "CPU "), " "))
		}
		s, p := r.sequence(1, "a", 6), r.sequence(2, "p", 2)
		r.fill(s, 0, 6)
		r.fill(p, 0, 2)
		offer("filled", s, 6, offload.Filled)
		offer("released", s, 6, offload.Released)
		offer("again", s, 4, offload.Filled) // another sequence begins alike
		offer("released", s, 4, offload.Released)
		offer("preempted", p, 2, offload.Preempted)
		if got := strings.Join(got, ", "); got != want {
			t.Errorf("%s:\n%s, want\n%s", config, got, want)
		}
		r.close()
	}
}

// TestLoadPolicies: when each of them loads, and waits.
func TestLoadPolicies(t *testing.T) {
	for policy, want := range map[string]struct {
		slow, fast int
		wait       bool
	}{
		offload.LoadCost:   {0, 6, true},
		offload.LoadAlways: {6, 6, true},
		offload.LoadNever:  {0, 0, false},
	} {
		r := newRig(t, rigOptions{config: parse(t, `"num_cpu_blocks": 20, "load_policy": "`+policy+`"`), machine: emulated.Options{HostLink: emulated.Link{BytesPerSecond: 1e6}}})
		s := r.sequence(1, "a", 6)
		r.fill(s, 0, 6)
		r.tiers.Store(s.keys, 0, s.table.Blocks(), offload.Filled)
		if n, wait := r.tiers.Lookup(s.keys, 0, 100); n != 0 || wait != want.wait {
			t.Errorf("%s: found %d, wait %t, while it is stored", policy, n, wait)
		}
		r.settle()
		r.tiers.Computed(1024, 1e-9) // steps that take no time
		if n, _ := r.tiers.Lookup(s.keys, 0, 100); n != want.slow {
			t.Errorf("%s: %d blocks where computing is faster, want %d", policy, n, want.slow)
		}
		for range 300 {
			r.tiers.Computed(1024, 1000)
		}
		if n, _ := r.tiers.Lookup(s.keys, 0, 100); n != want.fast {
			t.Errorf("%s: %d blocks where loading is faster, want %d", policy, n, want.fast)
		}
		r.close()
	}
}
