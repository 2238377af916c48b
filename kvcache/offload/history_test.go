package offload_test

import (
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
)

// history is a random run of sequences over tiers.
type history struct {
	*rig
	rng       *rand.Rand
	directory string
	// alike is the number of blocks in which all sequences of one prefix are alike. Those behind them may part within
	// a tier's block.
	alike int
	// running sequences by id; filled is the number of their blocks that are computed or
	// loaded, -1 during a load.
	running map[int64]*sequence
	filled  map[int64]int
	from    map[int64]int    // first block of a load
	stored  map[string]int64 // blocks by medium, by events
	// chains are the keys of the GPU's blocks in each tier block that a sequence had.
	chains map[kvcache.Key][]kvcache.Key
	next   int64
	loaded int // blocks
}

// TestHistories: whatever is stored, loaded, revoked, lost, damaged, aborted, reset and fails,
// over any tiers, what is loaded has the bytes that were stored; and nothing is left at the
// end.
func TestHistories(t *testing.T) {
	total := 0
	rapid.Check(t, func(rt *rapid.T) {
		o := rigOptions{blocks: 48, limit: rapid.SampledFrom([]int{0, 8, 48}).Draw(rt, "store limit")}
		c := offload.Config{
			EvictionPolicy: rapid.SampledFrom([]string{"lru", "arc"}).Draw(rt, "policy"),
			BlockFactor:    rapid.SampledFrom([]int{1, 2, 3}).Draw(rt, "factor"),
		}
		size := rapid.IntRange(3, 24)
		tiers := rapid.IntRange(1, 7).Draw(rt, "tiers")
		if tiers&1 != 0 {
			c.GPUBlocks, o.harvest = size.Draw(rt, "peer blocks"), peers()
		}
		if tiers&2 != 0 {
			c.CPUBlocks = size.Draw(rt, "cpu blocks")
		}
		directory := ""
		if tiers&4 != 0 {
			directory = t.TempDir()
			c.FileBlocks, c.Directory = size.Draw(rt, "file blocks"), directory
		}
		c.StorePolicy = rapid.SampledFrom([]string{"", "", offload.StoreReleased, offload.StoreReused}).Draw(rt, "store policy")
		c.LoadPolicy = rapid.SampledFrom([]string{"", "", offload.LoadAlways}).Draw(rt, "load policy")
		c.Durability = map[string]offload.Durability{}
		for _, m := range []string{offload.PeerGPU, offload.CPU} {
			c.Durability[m] = rapid.SampledFrom([]offload.Durability{offload.Backed, offload.Lossy}).Draw(rt, "durability of "+m)
		}
		o.config = c
		o.patience = rapid.SampledFrom([]time.Duration{time.Nanosecond, 20 * time.Millisecond}).Draw(rt, "patience")
		o.wall = rapid.SampledFrom([]bool{false, false, false, true}).Draw(rt, "wall clock")
		schedule := emulated.Eager
		if !o.wall {
			schedule = emulated.Schedule(rapid.IntRange(0, 2).Draw(rt, "schedule"))
		}
		o.machine = emulated.Options{
			LikeCUDA: rapid.Bool().Draw(rt, "like CUDA"), Schedule: schedule, Seed: rapid.Uint64Range(1, 1<<20).Draw(rt, "seed"),
			HostLink: emulated.Link{BytesPerSecond: 1e6}, PeerLink: emulated.Link{BytesPerSecond: 1e7},
			FenceStart: rapid.SampledFrom([]uint32{0, 1<<32 - 20}).Draw(rt, "fence start"),
		}
		if rapid.Bool().Draw(rt, "small peers") {
			o.machine.GPUs = []emulated.GPU{{}, {MemoryBytes: 12 << 10}, {MemoryBytes: 9 << 10}}
		}
		steps, alike := rapid.IntRange(20, 120).Draw(rt, "steps"), rapid.IntRange(1, 8).Draw(rt, "alike")
		if !t.Run("", func(t *testing.T) {
			h := &history{
				rig: newRig(t, o), rng: rand.New(rand.NewPCG(o.machine.Seed, 1)), directory: directory,
				running: map[int64]*sequence{}, filled: map[int64]int{}, from: map[int64]int{}, stored: map[string]int64{},
				chains: map[kvcache.Key][]kvcache.Key{}, alike: alike,
			}
			for range steps {
				h.act()
			}
			h.finish()
			total += h.loaded
		}) {
			rt.FailNow()
		}
	})
	if total == 0 {
		t.Error("nothing was ever loaded")
	}
}

// one is a random running sequence that does not load, or nil.
func (h *history) one() *sequence {
	ids := slices.Sorted(maps.Keys(h.running))
	h.rng.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	for _, id := range ids {
		if h.filled[id] >= 0 {
			return h.running[id]
		}
	}
	return nil
}

func (h *history) act() {
	h.Helper()
	switch h.rng.IntN(16) {
	case 0, 1, 2, 3:
		h.begin()
	case 4, 5:
		h.poll()
	case 6, 7:
		h.poll()
		h.ok(h.tiers.Wait(h.Context()))
	case 8: // compute some more
		if s := h.one(); s != nil {
			h.compute(s, min(len(s.keys), h.filled[s.id]+1+h.rng.IntN(4)))
		}
	case 9, 10: // end
		if s := h.one(); s != nil {
			h.tiers.Store(s.keys, 0, s.table.Blocks()[:h.filled[s.id]], offload.Cause(h.rng.IntN(3)))
			h.release(s.id)
		}
	case 11: // abort, perhaps during a load
		if ids := slices.Sorted(maps.Keys(h.running)); len(ids) > 0 {
			h.release(ids[h.rng.IntN(len(ids))])
		}
	case 12:
		h.fail()
	case 13:
		if h.harvest != nil {
			h.disturbPeers()
		}
	case 14:
		h.disturbFiles()
	case 15:
		if h.rng.IntN(4) == 0 {
			h.tiers.Reset()
		}
		h.tiers.Computed(1+h.rng.IntN(200), h.rng.Float64()*0.02)
	}
}

// begin begins a sequence: of three prefixes, which go on alike or not.
func (h *history) begin() {
	n := 2 + h.rng.IntN(12)
	s := &sequence{id: h.next, table: h.blocks.NewTable()}
	k := kvcache.RootKey([]byte{byte(h.rng.IntN(3))})
	for i := range n {
		more := int32(0)
		if i >= h.alike {
			more = int32(h.rng.IntN(2))
		}
		k = k.Next([]int32{int32(i), more})
		s.keys = append(s.keys, k)
	}
	for c := range slices.Chunk(s.keys, h.tiers.Factor()) {
		if len(c) == h.tiers.Factor() {
			h.chains[c[len(c)-1]] = c
		}
	}
	from := h.rng.IntN(3) // as if the pool had them
	found, wait := h.tiers.Lookup(s.keys, from, n*blockTokens)
	if found > n-from {
		h.Fatalf("found %d blocks of %d from block %d on", found, n, from)
	}
	if wait || !s.table.Reserve(n*blockTokens) {
		return
	}
	h.next++
	h.running[s.id], h.filled[s.id] = s, from
	h.fill(s, 0, from)
	if found > 0 {
		h.filled[s.id], h.from[s.id] = -1, from
		h.ok(h.tiers.Load(s.id, s.keys, from, s.table.Blocks()[from:from+found]))
		return
	}
	h.compute(s, min(n, from+h.rng.IntN(6)))
}

// compute fills blocks and offers them.
func (h *history) compute(s *sequence, to int) {
	from := h.filled[s.id]
	if to <= from {
		return
	}
	h.fill(s, from, to)
	h.filled[s.id] = to
	first := from / h.tiers.Factor() * h.tiers.Factor()
	h.tiers.Store(s.keys, first, s.table.Blocks()[first:to], offload.Filled)
}

func (h *history) release(id int64) {
	s := h.running[id]
	s.table.Release(false)
	delete(h.running, id)
	delete(h.filled, id)
}

// poll checks what has been loaded.
func (h *history) poll() {
	h.Helper()
	for _, l := range h.tiers.Poll() {
		s := h.running[l.Seq]
		if s == nil {
			continue // aborted
		}
		from := h.from[l.Seq]
		if !h.right(s, from, from+l.Blocks) {
			h.Fatalf("wrong bytes in %d blocks from %d on", l.Blocks, from)
		}
		h.filled[l.Seq] = from + l.Blocks
		s.table.SetFilled((from + l.Blocks) * blockTokens)
		h.loaded += l.Blocks
	}
	h.replay()
}

// replay applies the events, which give the GPU's blocks in all ready blocks of each tier.
func (h *history) replay() {
	h.Helper()
	for _, e := range h.tiers.TakeEvents() {
		for _, k := range e.Stored {
			if h.ready[k] == nil {
				h.ready[k] = map[string]bool{}
			}
			if h.ready[k][e.Medium] {
				h.Fatalf("%x is stored twice in %s", k[:4], e.Medium)
			}
			h.ready[k][e.Medium] = true
			h.stored[e.Medium]++
		}
		for _, k := range e.Removed {
			if !h.ready[k][e.Medium] {
				h.Fatalf("%x is removed from %s, where it was not", k[:4], e.Medium)
			}
			delete(h.ready[k], e.Medium)
		}
	}
	count := map[string]int{}
	for _, mediums := range h.ready {
		for m := range mediums {
			count[m]++
		}
	}
	for _, s := range h.tiers.Stats() {
		blocks, has := 0, map[kvcache.Key]bool{}
		for k, chain := range h.chains {
			if !h.tiers.Has(s.Medium, k) {
				continue
			}
			blocks++
			for _, k := range chain {
				has[k] = true
				if !h.ready[k][s.Medium] {
					h.Fatalf("%s has %x, by events it does not", s.Medium, k[:4])
				}
			}
		}
		if len(has) != count[s.Medium] || s.Evictable+s.Pinned != blocks {
			h.Fatalf("%s has %d ready blocks with %d of the GPU's, by events %d: %+v", s.Medium, blocks, len(has), count[s.Medium], s)
		}
		remembered, factor := h.tiers.MemberCount(s.Medium), h.tiers.Factor()
		if factor == 1 && remembered != 0 || factor > 1 && remembered != len(has) {
			h.Fatalf("%d blocks of %s are remembered, which has %d", remembered, s.Medium, len(has))
		}
		if n := h.stored[s.Medium]; n > int64(factor)*s.Stored || factor == 1 && n < s.Stored {
			h.Fatalf("%s has stored %d blocks by events: %+v", s.Medium, n, s)
		}
		if s.Allocated-s.Evicted-s.Freed != int64(s.Capacity-s.Free) {
			h.Fatalf("%+v", s)
		}
	}
}

// fail has some of the tiers' copies fail.
func (h *history) fail() {
	h.m.Inject(&emulated.Fault{
		Kind: emulated.FailCopy, Times: 1 + h.rng.IntN(3), Skip: h.rng.IntN(4),
		Match: func(p emulated.Point) bool { return p.Stream != "compute" },
	})
}

func (h *history) disturbPeers() {
	peer := device.HBM(1 + h.rng.IntN(2))
	switch h.rng.IntN(8) {
	case 0:
		gpu, _ := peer.GPU()
		if gpu == 2 { // the other stays
			h.ok(h.m.Lose(gpu))
		}
	case 1:
		h.ok(h.harvest.Readmit(peer))
	case 2, 3, 4:
		free := int64(0)
		for _, p := range h.harvest.State().Peers {
			if p.Space == peer {
				free = max(p.Free, 0)
			}
		}
		_, err := h.harvest.Reclaim(peer, 1+free+int64(h.rng.IntN(20))*h.n, time.Minute)
		h.ok(err)
	}
	_, err := h.harvest.Tick(h.m.Now())
	h.ok(err)
}

// disturbFiles damages or removes a file.
func (h *history) disturbFiles() {
	files, _ := filepath.Glob(filepath.Join(h.directory, "moeserve-kv-*", "*-*"))
	if len(files) == 0 {
		return
	}
	f := files[h.rng.IntN(len(files))]
	switch h.rng.IntN(3) {
	case 0:
		_ = os.Remove(f)
	case 1:
		_ = os.Truncate(f, int64(h.rng.IntN(1000)))
	default:
		if b, err := os.ReadFile(f); err == nil && len(b) > 0 {
			b[h.rng.IntN(len(b))] ^= 1
			_ = os.WriteFile(f, b, 0o600)
		}
	}
}

// finish ends everything: then nothing is under way, held, or left.
func (h *history) finish() {
	h.Helper()
	for range 10000 {
		h.poll()
		if !h.busy() {
			break
		}
		h.ok(h.tiers.Wait(h.Context()))
	}
	for id := range h.running {
		h.release(id)
	}
	if h.busy() || h.blocks.Held() > 0 || h.blocks.Free() != h.blocks.Blocks() {
		h.Fatalf("%d blocks held, %d free, %+v", h.blocks.Held(), h.blocks.Free(), h.tiers.Stats())
	}
	for _, s := range h.tiers.Stats() {
		if s.Pending+s.Pinned+s.Quarantined > 0 {
			h.Errorf("%+v", s)
		}
	}
	h.close()
	if h.directory != "" {
		if left, _ := os.ReadDir(h.directory); len(left) > 0 {
			h.Errorf("left: %v", left)
		}
	}
}
