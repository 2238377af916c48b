package offload_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/transfer"
)

// storedBlocks is how many blocks each tier has.
func (r *rig) storedBlocks() string {
	text := ""
	for _, s := range r.tiers.Stats() {
		text += fmt.Sprintf("%s %d ", s.Medium, s.Evictable)
	}
	return text
}

// TestDurability: what is stored in a backed tier is in the next one, too; in a lossy one
// only what it refuses.
func TestDurability(t *testing.T) {
	for _, c := range []struct {
		peer, cpu offload.Durability
		blocks    int // of the peer tier
		want      string
	}{
		{"", "", 10, "PEER_GPU 6 CPU 6 FILE 6 "},
		{offload.Lossy, offload.Backed, 10, "PEER_GPU 6 CPU 0 FILE 0 "},
		{offload.Backed, offload.Lossy, 10, "PEER_GPU 6 CPU 6 FILE 0 "},
		{offload.Lossy, offload.Lossy, 3, "PEER_GPU 3 CPU 3 FILE 0 "},
		{offload.Lossy, offload.Backed, 3, "PEER_GPU 3 CPU 3 FILE 3 "},
	} {
		o := rigOptions{harvest: peers(), config: offload.Config{
			GPUBlocks: c.blocks, CPUBlocks: 10, FileBlocks: 10, Directory: t.TempDir(),
			Durability: map[string]offload.Durability{offload.PeerGPU: c.peer, offload.CPU: c.cpu},
		}}
		if c.peer == "" {
			o.config.Durability = nil
		}
		r := newRig(t, o)
		s := r.sequence(1, "a", 6)
		r.fill(s, 0, 6)
		r.store(s, 0, 6)
		if got := r.storedBlocks(); got != c.want {
			t.Errorf("%s, %s: %s, want %s", c.peer, c.cpu, got, c.want)
		}
		// Each block comes from the fastest tier that has it.
		if p := r.tiers.Locate(s.keys[0]); p.Medium != offload.PeerGPU || p.String() != "PEER_GPU gpu1" {
			t.Errorf("the first block is in %v", p)
		}
		s.table.Release(false)
		r.overwrite()
		r.reserve(s)
		if n, l := r.load(s, 0); n != 6 || l.Blocks != 6 || !r.right(s, 0, 6) {
			t.Errorf("found %d, loaded %+v", n, l)
		}
		if got := int(r.stats(offload.PeerGPU).Loaded); got != min(6, c.blocks) {
			t.Errorf("%d blocks from the peer", got)
		}
		r.close()
	}
}

// TestPeersFull: where the peers have no memory blocks go to host memory, and nothing is
// logged.
func TestPeersFull(t *testing.T) {
	h := peers()
	h.Peers, h.HeadroomBytes = h.Peers[:1], 1<<40
	r := newRig(t, rigOptions{harvest: h, config: offload.Config{
		GPUBlocks: 10, CPUBlocks: 10, Durability: map[string]offload.Durability{offload.PeerGPU: offload.Lossy},
	}})
	s := r.sequence(1, "a", 6)
	r.fill(s, 0, 6)
	r.store(s, 0, 6)
	if got := r.storedBlocks(); got != "PEER_GPU 0 CPU 6 " {
		t.Error(got)
	}
	if p := r.stats(offload.PeerGPU); p.RefusedBlocks != 6 {
		t.Errorf("%+v", p)
	}
	if s := r.logged(); s != "" {
		t.Error(s)
	}
}

// TestSmallTier: of more blocks than a tier has the first are stored; of more than stores may
// hold, too.
func TestSmallTier(t *testing.T) {
	r := newRig(t, rigOptions{config: offload.Config{CPUBlocks: 10}, limit: 12})
	s := r.sequence(1, "a", 24)
	r.fill(s, 0, 24)
	r.store(s, 0, 24)
	if n, _ := r.tiers.Lookup(s.keys, 0, 100); n != 6 { // 12 do not fit, half of them do
		t.Errorf("found %d", n)
	}
	r.store(s, 0, 9)
	if n, _ := r.tiers.Lookup(s.keys, 0, 100); n != 9 {
		t.Errorf("found %d", n)
	}
	// What comes later evicts the end of what was released before.
	r.tiers.Store(s.keys, 0, s.table.Blocks()[:9], offload.Released)
	x := r.sequence(2, "x", 4)
	r.fill(x, 0, 4)
	r.store(x, 0, 4)
	if n, _ := r.tiers.Lookup(s.keys, 0, 100); n != 6 {
		t.Errorf("found %d", n)
	}
	limited := newRig(t, rigOptions{config: offload.Config{CPUBlocks: 40}, limit: 5})
	s = limited.sequence(1, "a", 24)
	limited.fill(s, 0, 24)
	limited.store(s, 0, 24)
	if got := limited.stats(offload.CPU); got.Stored != 5 || got.RefusedBlocks != 19 {
		t.Errorf("%+v", got)
	}
}

// TestStoresWhileMemoryIsLent: stores hold a quarter of the blocks that are there, not of those that
// were withdrawn, too, so that three quarters stay for sequences.
func TestStoresWhileMemoryIsLent(t *testing.T) {
	r := newRig(t, rigOptions{config: offload.Config{CPUBlocks: 100}, blocks: 64, extents: 5})
	for _, c := range []struct{ withdrawn, want int }{{0, 16}, {5, 6}, {3, 10}} {
		for x := range r.blocks.Extents() {
			switch withdrawn := r.blocks.Extent(x).Withdrawn; {
			case !withdrawn && x < c.withdrawn:
				r.blocks.Withdraw(x)
			case withdrawn && x >= c.withdrawn:
				r.blocks.Restore(x)
			}
		}
		s := r.sequence(1, fmt.Sprint(c), 24)
		r.fill(s, 0, 24)
		r.store(s, 0, 24)
		s.table.Release(true)
		if n, _ := r.tiers.Lookup(s.keys, 0, 100); n != c.want {
			t.Errorf("%d extents withdrawn: %d blocks were stored at a time, want %d", c.withdrawn, n, c.want)
		}
	}
}

// TestFactor: a tier's block of several of the GPU's is stored whole, and a part of it is
// loaded.
func TestFactor(t *testing.T) {
	for _, c := range everyTier(t) {
		t.Run(c.name, func(t *testing.T) {
			o := c.options
			o.config.BlockTokens = 4 * blockTokens
			r := newRig(t, o)
			if r.tiers.Factor() != 4 {
				t.Fatalf("factor %d", r.tiers.Factor())
			}
			s := r.sequence(1, "a", 11)
			r.fill(s, 0, 11)
			r.store(s, 0, 3) // no whole one
			if got := r.stats(c.medium); got.Stored != 0 {
				t.Errorf("%+v", got)
			}
			r.store(s, 2, 11) // one
			if n, _ := r.tiers.Lookup(s.keys, 0, 100); n != 0 {
				t.Errorf("found %d", n)
			}
			if n, _ := r.tiers.Lookup(s.keys, 4, 100); n != 4 {
				t.Errorf("found %d from the fifth on", n)
			}
			r.store(s, 0, 11)
			if got := r.stats(c.medium); got.Stored != 2 || got.BlockBytes != 4*r.n {
				t.Errorf("%+v", got)
			}
			s.table.Release(false)
			r.overwrite()
			r.reserve(s)
			if n, _ := r.tiers.Lookup(s.keys, 3, 7*blockTokens); n != 4 {
				t.Errorf("found %d of four", n)
			}
			if n, l := r.load(s, 3); n != 5 || l.Blocks != 5 || !r.right(s, 3, 8) {
				t.Errorf("found %d, loaded %+v", n, l)
			}
			if got := r.stats(c.medium); got.Loaded != 2 || got.LoadedBytes != 5*r.n {
				t.Errorf("%+v", got)
			}
		})
	}
}

// TestSmallLoads: what a tier takes is learned from loads of a few KiB, also of files, whose rate
// nobody knows before. Then the choice is made both ways.
func TestSmallLoads(t *testing.T) {
	for _, c := range everyTier(t) {
		for step, want := range map[float64]int{1e-6: 0, 1: 8} {
			o := c.options
			o.machine.HostLink = emulated.Link{BytesPerSecond: 1e6}
			o.machine.PeerLink = o.machine.HostLink
			r := newRig(t, o)
			s := r.sequence(1, "a", 8)
			r.fill(s, 0, 8)
			r.store(s, 0, 8)
			if n, l := r.load(s, 0); n != 8 || l.Blocks != 8 {
				t.Errorf("%s: found %d, loaded %+v", c.name, n, l)
			}
			got := r.stats(c.medium)
			if got.BytesPerSecond < 5e5 || got.BytesPerSecond > 1.1e6 {
				t.Errorf("%s: %g bytes per second", c.name, got.BytesPerSecond)
			}
			for _, x := range []offload.Transfers{got.Stores, got.Loads} { // of 8 KiB
				if x.Seconds < 8e-3 || x.Seconds > 17e-3 || x.Sizes != [11]uint64{1} {
					t.Errorf("%s: %+v", c.name, x)
				}
			}
			r.tiers.Computed(32, step)
			if n, _ := r.tiers.Lookup(s.keys, 0, 100); n != want {
				t.Errorf("%s: %d blocks where a step takes %g s, want %d", c.name, n, step, want)
			}
			r.close()
		}
	}
}

// TestCosts: with measured steps a slow tier is not loaded from, and a fast one is.
func TestCosts(t *testing.T) {
	for rate, want := range map[float64]int{1e4: 0, 1e9: 8} {
		r := newRig(t, rigOptions{config: offload.Config{CPUBlocks: 10}, machine: emulated.Options{HostLink: emulated.Link{BytesPerSecond: rate}}})
		s := r.sequence(1, "a", 8)
		r.fill(s, 0, 8)
		r.store(s, 0, 8)
		for n := 1; n < 100; n *= 2 {
			r.tiers.Computed(n, 0.001+float64(n)*0.001)
		}
		if n, _ := r.tiers.Lookup(s.keys, 0, 100); n != want {
			t.Errorf("%d blocks at %g bytes per second, want %d", n, rate, want)
		}
		r.close()
	}
}

// TestPatience: a load that waits for long gets the priority of prefetches, and then of what
// is needed at once.
func TestPatience(t *testing.T) {
	r := newRig(t, rigOptions{config: offload.Config{CPUBlocks: 10}, patience: time.Millisecond, machine: emulated.Options{
		HostLink: emulated.Link{BytesPerSecond: 1e6}, // a block takes a millisecond
	}})
	s := r.sequence(1, "a", 2)
	r.fill(s, 0, 2)
	r.store(s, 0, 2)
	// Others use the link, at a higher priority.
	busy, err := r.m.Alloc(device.Host, 1<<20, "busy")
	r.ok(err)
	to, err := r.m.Alloc(device.HBM(0), 1<<20, "busy")
	r.ok(err)
	f, err := r.m.NewFence("busy")
	r.ok(err)
	clear(busy.Write(0, busy.Bytes()))
	var last *transfer.Ticket
	value := f.Value()
	for i := range int64(200) {
		value++
		last, err = r.engine.Submit(transfer.Request{
			Src: busy.Region(i*1024, 1024), Dst: to.Region(i*1024, 1024), Priority: transfer.Prefetch, Done: device.Point{Fence: f, Value: value},
		})
		r.ok(err)
	}
	r.ok(r.tiers.Load(1, s.keys, 0, s.table.Blocks()))
	var loaded []offload.Loaded
	for at := value - 200; len(loaded) == 0 && at != value; at++ {
		r.ok(device.Point{Fence: f, Value: at + 1}.Wait(t.Context()))
		loaded = r.tiers.Poll()
	}
	if last.Ended() || len(loaded) != 1 || loaded[0].Blocks != 2 || !r.right(s, 0, 2) {
		t.Errorf("loaded %+v, behind all others: %t", loaded, last.Ended())
	}
	if got := r.stats(offload.CPU); got.RaisedLoads != 2 {
		t.Errorf("%+v", got)
	}
	r.ok(last.Wait(t.Context()))
	r.ok(errors.Join(busy.Free(), to.Free(), f.Close()))
}

// TestWaitsForStore: a block that is being stored is waited for, and its store goes before
// others then.
func TestWaitsForStore(t *testing.T) {
	r := newRig(t, rigOptions{config: offload.Config{CPUBlocks: 40}, limit: 64})
	s := r.sequence(1, "a", 4)
	r.fill(s, 0, 4)
	r.store(s, 0, 2)
	r.tiers.Store(s.keys, 0, s.table.Blocks(), offload.Preempted)
	s.table.Release(false)
	if n, wait := r.tiers.Lookup(s.keys, 0, 100); n != 2 || !wait {
		t.Errorf("found %d, wait %t", n, wait)
	}
	r.settle()
	r.reserve(s)
	if n, l := r.load(s, 0); n != 4 || l.Blocks != 4 || !r.right(s, 0, 4) {
		t.Errorf("found %d, loaded %+v", n, l)
	}
}

// neighbor is a medium of its own: the memory of the last GPU, at fixed places.
type neighbor struct {
	env    offload.Env
	memory device.Memory
	fence  device.Fence
	value  uint32
}

func (n *neighbor) Drop([]kvcache.Key)              {}
func (n *neighbor) Lost() []kvcache.Key             { return nil }
func (n *neighbor) Locate(kvcache.Key) device.Space { return n.memory.Space() }
func (n *neighbor) Reset()                          {}
func (n *neighbor) Close() error                    { return errors.Join(n.memory.Free(), n.fence.Close()) }

// neighborHandler copies to it or back.
type neighborHandler struct {
	*neighbor
	store bool
}

func (h neighborHandler) Start(job *offload.Job) (offload.Transfer, []int, error) {
	var pieces []transfer.Piece
	for _, b := range job.Blocks {
		at := h.memory.Region(int64(b.ID)*h.env.BlockBytes, h.env.BlockBytes)
		for _, p := range b.Pieces {
			piece := transfer.Piece{Dst: p.GPU, Src: at.Slice(p.Offset, p.GPU.Bytes)}
			if h.store {
				piece.Dst, piece.Src = piece.Src, piece.Dst
			}
			pieces = append(pieces, piece)
		}
	}
	h.value++
	ticket, err := h.env.Transfer.Submit(transfer.Request{
		Pieces: pieces, Priority: job.Priority, After: job.After, Done: device.Point{Fence: h.fence, Value: h.value}, Label: job.Label,
	})
	if err != nil {
		return nil, nil, err
	}
	return neighborTransfer{ticket, len(job.Blocks)}, nil, nil
}

type neighborTransfer struct {
	*transfer.Ticket
	blocks int
}

func (t neighborTransfer) Ends() []device.Point { return []device.Point{t.End()} }

func (t neighborTransfer) Result() ([]bool, error) {
	arrived := make([]bool, t.blocks)
	for i := range arrived {
		arrived[i] = t.Err() == nil
	}
	return arrived, t.Err()
}

// neighborSpec makes the medium.
type neighborSpec struct{}

func (neighborSpec) Open(e offload.Env) ([]*offload.Medium, error) {
	memory, err := e.Machine.Alloc(device.HBM(2), 16*e.BlockBytes, "neighbor")
	if err != nil {
		return nil, err
	}
	n := &neighbor{env: e, memory: memory}
	if n.fence, err = e.Machine.NewFence("neighbor"); err != nil {
		return nil, errors.Join(err, memory.Free())
	}
	n.value = n.fence.Value()
	return []*offload.Medium{{
		Name: "NEIGHBOR", Blocks: 16, BytesPerSecond: func() float64 { return 0 }, Memory: n,
		Store: neighborHandler{n, true}, Load: neighborHandler{n, false},
	}}, nil
}

var registerNeighbor = sync.OnceFunc(func() {
	offload.Register("NeighborSpec", func(offload.Config) (offload.Spec, error) { return neighborSpec{}, nil })
})

// TestRegister: a medium of others is a tier like any other.
func TestRegister(t *testing.T) {
	registerNeighbor()
	r := newRig(t, rigOptions{config: offload.Config{SpecName: "NeighborSpec"}})
	s := r.sequence(1, "a", 8)
	r.fill(s, 0, 8)
	r.store(s, 0, 8)
	s.table.Release(false)
	r.overwrite()
	r.reserve(s)
	if n, l := r.load(s, 0); n != 8 || l.Blocks != 8 || !r.right(s, 0, 8) {
		t.Errorf("found %d, loaded %+v", n, l)
	}
	if p := r.tiers.Locate(s.keys[0]); p.String() != "NEIGHBOR" {
		t.Errorf("%v", p)
	}
	defer func() {
		if recover() == nil {
			t.Error("registered twice")
		}
	}()
	offload.Register("NeighborSpec", nil)
}

// TestBesideOthers: other goroutines read statistics, places and events, and wait, while the
// engine's uses the tiers.
func TestBesideOthers(t *testing.T) {
	r := newRig(t, rigOptions{
		wall: true, limit: 64, harvest: peers(),
		config: offload.Config{GPUBlocks: 12, CPUBlocks: 16, FileBlocks: 20, Directory: t.TempDir()},
	})
	s := r.sequence(1, "a", 16)
	x := r.sequence(2, "x", 16)
	done := make(chan struct{})
	var others sync.WaitGroup
	for _, f := range []func(){
		func() { r.tiers.Stats() },
		func() { r.tiers.Locate(s.keys[3]) },
		func() { r.tiers.TakeEvents() },
		func() { r.tiers.Decisions() },
		func() {
			if err := r.tiers.Wait(t.Context()); err != nil {
				t.Error(err)
			}
		},
		func() {
			c, err := r.harvest.Reclaim(device.HBM(1), 1<<40, time.Second)
			if err == nil {
				err = c.Wait(t.Context())
			}
			if err != nil {
				t.Error(err)
			}
		},
	} {
		others.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
					f()
				}
			}
		})
	}
	loaded := 0
	for range 4 {
		for _, s := range []*sequence{s, x} {
			r.fill(s, 0, 16)
			r.store(s, 0, 16)
			s.table.Release(false)
			r.overwrite()
			r.reserve(s)
			n, l := r.load(s, 0)
			if !r.right(s, 0, l.Blocks) {
				t.Errorf("found %d, loaded %+v: wrong bytes", n, l)
			}
			loaded += l.Blocks
		}
	}
	close(done)
	others.Wait()
	if loaded == 0 {
		t.Error("nothing was loaded")
	}
}
