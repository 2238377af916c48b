package offload_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
)

// smallPeer is a rig whose peer lends memory for 16 blocks, to two clients.
func smallPeer(c offload.Config) rigOptions {
	return rigOptions{
		config: c,
		machine: emulated.Options{
			GPUs:     []emulated.GPU{{}, {MemoryBytes: 16 << 10}},
			HostLink: emulated.Link{BytesPerSecond: 1e6}, PeerLink: emulated.Link{BytesPerSecond: 1e7},
		},
		harvest: &harvest.Options{
			Peers: []device.Space{device.HBM(1)}, HeadroomBytes: -1, Cooldown: -1, Residence: time.Millisecond,
			Clients: map[string]harvest.ClientOptions{offload.HarvestClient: slabs(4 << 10), "experts": slabs(4 << 10)},
		},
	}
}

// TestPeersSmall: where the peers have less memory than the tier's size, blocks are evicted
// as if it were full, and the tier grows when there is more.
func TestPeersSmall(t *testing.T) {
	h := peers()
	h.Peers = h.Peers[:1]
	r := newRig(t, rigOptions{harvest: h, config: offload.Config{GPUBlocks: 30}, machine: emulated.Options{
		GPUs: []emulated.GPU{{}, {MemoryBytes: 16 << 10}}, HostLink: emulated.Link{BytesPerSecond: 1e6},
	}})
	r.ok(r.m.Occupy(device.HBM(1), 8<<10))
	tick := func() {
		_, err := r.harvest.Tick(r.m.Now())
		r.ok(err)
	}
	tick()
	stored := func(name string, want int) {
		t.Helper()
		s := r.sequence(1, name, 6)
		r.fill(s, 0, 6)
		r.store(s, 0, 6)
		if n, _ := r.tiers.Lookup(s.keys, 0, 100); n != want {
			t.Errorf("%d blocks of %s, want %d", n, name, want)
		}
		s.table.Release(false)
	}
	found := func(name string) int {
		s := r.sequence(1, name, 6)
		defer s.table.Release(false)
		n, _ := r.tiers.Lookup(s.keys, 0, 100)
		return n
	}
	stored("a", 6)
	stored("b", 6)
	if n := found("a"); n != 2 {
		t.Errorf("%d blocks of a are left, want 2", n)
	}
	stored("c", 6)
	if a, b := found("a"), found("b"); a != 0 || b != 2 {
		t.Errorf("%d blocks of a and %d of b are left", a, b)
	}
	r.ok(r.m.Occupy(device.HBM(1), -8<<10))
	tick()
	for began := r.m.Now(); r.m.Now() < began+time.Second; {
		r.write(0, r.content(kvcache.Key{}))
		r.tiers.Poll()
	}
	stored("d", 6)
	if b, c := found("b"), found("c"); b != 2 || c != 6 {
		t.Errorf("%d blocks of b and %d of c are left where there is room", b, c)
	}
	if st := r.stats(offload.PeerGPU); st.Evicted != 10 || st.RefusedBlocks != 0 {
		t.Errorf("%+v", st)
	}
	if s := r.logged(); s != "" {
		t.Error(s)
	}
}

// TestQuota: so are they where the policy refuses the memory.
func TestQuota(t *testing.T) {
	o := smallPeer(offload.Config{GPUBlocks: 40})
	o.harvest.Policy = harvest.NewFairness(harvest.FairnessOptions{Quota: 6 << 10})
	r := newRig(t, o)
	r.settle()
	for i, name := range []string{"a", "b", "c"} {
		want := []int{6, 4, 4}[i] // stores that are too large are halved
		s := r.sequence(1, name, 16)
		r.fill(s, 0, 8)
		r.store(s, 0, 8)
		if n, _ := r.tiers.Lookup(s.keys, 0, 16*blockTokens); n != want {
			t.Errorf("%s: %d blocks are stored, want %d", name, n, want)
		}
		s.table.Release(false)
	}
	if log := r.logged(); log != "" {
		t.Error(log)
	}
}

// TestBudget: KV blocks that are loaded from host memory again and again displace experts that
// are worth less from a peer, and give way to experts that are worth more. The memory of a peer
// that may not be used is no room.
func TestBudget(t *testing.T) {
	o := smallPeer(offload.Config{GPUBlocks: 16, CPUBlocks: 40})
	o.machine.GPUs = append(o.machine.GPUs, emulated.GPU{MemoryBytes: 16 << 10})
	o.harvest.Peers = append(o.harvest.Peers, device.HBM(2))
	r := newRig(t, o)
	r.ok(r.harvest.Exclude(device.HBM(2), errors.New("copies fail")))
	for range 4 {
		_, err := r.harvest.Alloc(4<<10, harvest.Hints{Client: "experts", Cost: time.Millisecond})
		r.ok(err)
	}
	s := r.sequence(1, "a", 16)
	r.fill(s, 0, 16)
	r.store(s, 0, 16)
	if n := r.stats(offload.PeerGPU).Stored; n != 0 {
		t.Fatalf("%d blocks are stored where experts have all the memory", n)
	}
	stores := false // nothing is refused then
	turn := func() {
		t.Helper()
		s.table.Release(false)
		r.overwrite()
		r.reserve(s)
		if n, l := r.load(s, 0); n != 16 || l.Blocks != 16 || l.Err != nil || !r.right(s, 0, 16) {
			t.Fatalf("%d blocks found, %+v", n, l)
		}
		if stores {
			r.tiers.Store(s.keys, 0, s.table.Blocks(), offload.Released)
			r.settle()
		}
		_, err := r.harvest.Tick(r.m.Now())
		r.ok(err)
	}
	until := func(what string, done func() bool) {
		t.Helper()
		for range 200 {
			if turn(); done() {
				return
			}
		}
		t.Fatalf("%s: %+v, %+v", what, r.stats(offload.PeerGPU), r.harvest.State().Clients)
	}
	until("KV displaces experts", func() bool { return r.harvest.State().Clients["experts"].Displaced > 0 })
	stores = true
	until("KV has their memory", func() bool { return r.stats(offload.PeerGPU).Evictable == 16 })
	loaded := r.stats(offload.PeerGPU).Loaded
	turn()
	if n := r.stats(offload.PeerGPU).Loaded - loaded; n != 16 {
		t.Errorf("%d blocks are loaded from the peer", n)
	}
	if c := r.harvest.State().Clients; c["experts"].Displaced != 16<<10 || c["kv"].Displaced != 0 {
		t.Errorf("%+v", c)
	}
	until("experts displace KV", func() bool {
		_, err := r.harvest.Alloc(4<<10, harvest.Hints{Client: "experts", Cost: time.Hour})
		if err != nil && !errors.Is(err, harvest.ErrNoCapacity) {
			t.Fatal(err)
		}
		c := r.harvest.State().Clients
		return c["experts"].Bytes == 16<<10 && c["kv"].Bytes == 0
	})
	turn() // from host memory
}

// bounded is a medium with a Budget, and its spec.
type bounded struct {
	offload.Handler
	has, reported int // blocks
	use           harvest.Use
	starts        int
	slower        bool // there is a slower medium, too
}

func (b *bounded) Open(e offload.Env) ([]*offload.Medium, error) {
	all, err := neighborSpec{}.Open(e)
	if err != nil {
		return nil, err
	}
	b.Handler = all[0].Store
	all[0].Store, all[0].Budget = b, b
	if b.slower {
		more, err := neighborSpec{}.Open(e)
		if err != nil {
			return all, err
		}
		more[0].Name = "FAR"
		all = append(all, more...)
	}
	return all, nil
}

// rig opens the medium's tiers.
func (b *bounded) rig(t *testing.T) *rig {
	name := fmt.Sprintf("BoundedSpec %p", b)
	t.Cleanup(func() { offload.Unregister(name) })
	offload.Register(name, func(offload.Config) (offload.Spec, error) { return b, nil })
	return newRig(t, rigOptions{
		config:  offload.Config{SpecName: name},
		machine: emulated.Options{HostLink: emulated.Link{BytesPerSecond: 1e6}, PeerLink: emulated.Link{BytesPerSecond: 1e7}},
	})
}

// pass has a tenth of a second pass, from one report to the next.
func (r *rig) pass() {
	r.Helper()
	for range 100 { // a millisecond each
		r.read(0)
	}
	r.tiers.Poll()
}

func (b *bounded) Report(u harvest.Use) (int, error) {
	b.use = u
	return b.reported, nil
}

func (b *bounded) Start(job *offload.Job) (offload.Transfer, []int, error) {
	b.starts++
	if b.has < len(job.Blocks) {
		var refused []int
		for i := range job.Blocks {
			refused = append(refused, i)
		}
		return nil, refused, harvest.ErrNoCapacity
	}
	b.has -= len(job.Blocks)
	return b.Handler.Start(job)
}

// TestMediumBudget: a tier has as many blocks as its medium's Budget reports. Where there is
// memory for fewer, blocks are evicted for a store; where that does not help, they are not
// before the next report.
func TestMediumBudget(t *testing.T) {
	b := &bounded{has: 4, reported: 5}
	r := b.rig(t)
	first, second := r.sequence(1, "a", 8), r.sequence(2, "b", 2)
	r.fill(first, 0, 8)
	r.fill(second, 0, 2)
	r.settle()
	check := func(what string, s *sequence, stored, starts, evicted int) {
		t.Helper()
		r.store(s, 0, len(s.keys))
		n, _ := r.tiers.Lookup(s.keys, 0, 100)
		if st := r.stats("NEIGHBOR"); n != stored || b.starts != starts || st.Evicted != int64(evicted) {
			t.Errorf("%s: %d blocks stored, want %d; %d stores, want %d; %+v", what, n, stored, b.starts, starts, st)
		}
	}
	check("half of eight fit into five", first, 4, 1, 0)
	check("one fits, and one is evicted; then two are", second, 0, 3, 3)
	check("before the next report", second, 0, 3, 3)
	b.has, b.reported = 10, 10
	r.pass()
	check("there is room", second, 2, 4, 3)
	if b.use.Wanted != 15*r.n {
		t.Errorf("%+v", b.use)
	}
}

// TestWanted: a tier would have the blocks that only a slower one has, and as many of them as it
// may have.
func TestWanted(t *testing.T) {
	b := &bounded{has: 10, reported: 4, slower: true}
	r := b.rig(t)
	s := r.sequence(1, "a", 14)
	r.fill(s, 0, 14)
	r.settle()
	r.store(s, 0, 14)
	if n := r.stats("NEIGHBOR").Evictable; n != 3 { // stores that are too large are halved
		t.Fatalf("%d blocks are stored", n)
	}
	r.pass()
	if b.use.Wanted != 11*r.n || b.use.WantedPerSecond != 0 {
		t.Errorf("before loads: %+v", b.use)
	}
	for range 3 {
		if n, l := r.load(s, 0); n != 14 || l.Blocks != 14 {
			t.Fatalf("found %d, loaded %+v", n, l)
		}
	}
	r.pass()
	if b.use.Wanted != 11*r.n || b.use.WantedPerSecond <= 0 {
		t.Errorf("after loads: %+v", b.use)
	}
}

// TestWorth: harvest gets how often blocks in peers' memory are loaded and what that
// saves, so that blocks in use cost more than others.
func TestWorth(t *testing.T) {
	worth := func(loads int, o offload.Config) time.Duration {
		o.GPUBlocks = 20
		r := newRig(t, rigOptions{config: o, harvest: peers(), machine: emulated.Options{
			HostLink: emulated.Link{BytesPerSecond: 1e6}, PeerLink: emulated.Link{BytesPerSecond: 1e8},
		}})
		defer r.close()
		s := r.sequence(1, "a", 8)
		r.fill(s, 0, 8)
		r.store(s, 0, 8)
		r.tiers.Computed(100, 0.5)
		// Loads take little of the time: most passes in copies of others.
		for i := range 60 {
			if i < loads {
				if n, l := r.load(s, 0); n != 8 || l.Blocks != 8 {
					t.Fatalf("found %d, loaded %+v", n, l)
				}
			}
			for range 60 {
				r.read(s.table.Blocks()[0])
			}
			r.tiers.Poll()
		}
		var sum time.Duration
		for _, p := range r.harvest.State().Peers {
			for _, s := range p.Slabs {
				for _, g := range s.Segments {
					sum += g.Cost
				}
			}
		}
		return sum
	}
	none, few, many := worth(0, offload.Config{}), worth(10, offload.Config{}), worth(60, offload.Config{})
	backed := worth(60, offload.Config{CPUBlocks: 20})
	if none != 0 || few <= 0 || many <= few || backed <= 0 || backed >= many {
		t.Errorf("cost of eight blocks never used %v, used %v, used much %v, with a copy in host memory %v", none, few, many, backed)
	}
}
