package engine_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/transfer"
)

// onDevice is a drawing whose words lie in a pool of a device's memory: a step copies the blocks of
// its sequences to the host, and those that it has written back.
type onDevice struct {
	*drawing
	pool   *kvcache.Pool
	stream device.Stream
	host   device.Memory // of a block
}

// A word is a hash and flags.
const wordBytes = 16

func (d *onDevice) read(ctx context.Context, id int32) error {
	r := d.host.Range(0, d.host.Bytes())
	if err := errors.Join(d.stream.Copy(r, d.pool.Region(id).Range), d.stream.Synchronize(ctx)); err != nil {
		return err
	}
	size := d.kv.BlockTokens()
	b := d.host.Read(0, r.Bytes)
	for i := range size {
		flags := binary.LittleEndian.Uint64(b[i*wordBytes+8:])
		d.memory[int(id)*size+i] = word{binary.LittleEndian.Uint64(b[i*wordBytes:]), flags&1 != 0, flags&2 != 0}
	}
	return nil
}

func (d *onDevice) write(ctx context.Context, id int32) error {
	size := d.kv.BlockTokens()
	b := d.host.Write(0, d.host.Bytes())
	for i, w := range d.memory[int(id)*size : int(id+1)*size] {
		flags := uint64(0)
		if w.written {
			flags |= 1
		}
		if w.long {
			flags |= 2
		}
		binary.LittleEndian.PutUint64(b[i*wordBytes:], w.hash)
		binary.LittleEndian.PutUint64(b[i*wordBytes+8:], flags)
	}
	return errors.Join(d.stream.Copy(d.pool.Region(id).Range, d.host.Range(0, d.host.Bytes())), d.stream.Synchronize(ctx))
}

func (d *onDevice) Step(ctx context.Context, s *pipeline.Step) (pipeline.Result, error) {
	size := d.kv.BlockTokens()
	var reads, writes []int32
	for _, c := range s.Copies {
		reads, writes = append(reads, c.Src), append(writes, c.Dst)
	}
	for i := range s.Sequences {
		q := &s.Sequences[i]
		blocks := q.Table.Blocks()[:(q.Start+len(q.Tokens)+size-1)/size]
		reads, writes = append(reads, blocks...), append(writes, blocks[q.Start/size:]...)
	}
	for _, id := range reads {
		if err := d.read(ctx, id); err != nil {
			return pipeline.Result{}, err
		}
	}
	r, err := d.drawing.Step(ctx, s)
	for _, id := range writes {
		err = errors.Join(err, d.write(ctx, id))
	}
	return r, err
}

// tierRig is tiers of KV blocks with a tier in files, and the step whose blocks they keep.
type tierRig struct {
	machine *emulated.Machine
	copies  *transfer.Engine
	pool    *kvcache.Pool
	kv      *kvcache.Manager
	tiers   *offload.Tiers
	step    *onDevice
}

// openTiers opens them on one emulated GPU, with blocks of so many tokens, and files in a directory of the test.
func openTiers(t *testing.T, tokens, blocks int, o emulated.Options, c offload.Config) *tierRig {
	t.Helper()
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	r := &tierRig{}
	var err error
	o.Check, o.GPUs = true, []emulated.GPU{{MemoryBytes: 1 << 20}}
	r.machine, err = emulated.New(o)
	ok(err)
	r.copies, err = transfer.New(transfer.Options{Machine: r.machine})
	ok(err)
	shape := kvcache.Shape{Layers: 1, KVHeads: 1, HeadDim: 2, DType: kernels.F32, BlockTokens: tokens}
	r.pool, err = kvcache.NewPool(kvcache.PoolOptions{Machine: r.machine, Space: device.HBM(0), Shape: shape, Blocks: blocks})
	ok(err)
	r.kv = smallBlocks(t, blocks)
	c.Directory = t.TempDir()
	r.tiers, err = offload.New(offload.Options{Machine: r.machine, Space: device.HBM(0), Pool: r.pool, Blocks: r.kv, Transfer: r.copies, Config: c})
	ok(err)
	r.step = &onDevice{drawing: newDrawing(t, r.kv), pool: r.pool}
	r.step.stream, err = r.machine.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
	ok(err)
	r.step.host, err = r.machine.Alloc(device.Host, int64(tokens)*wordBytes, "words")
	ok(err)
	for id := range int32(blocks) {
		ok(r.step.write(t.Context(), id))
	}
	return r
}

// close releases all but the tiers, which are closed before.
func (r *tierRig) close() error {
	return errors.Join(r.step.stream.Close(), r.step.host.Free(), r.pool.Close(), r.copies.Close(), r.machine.Close())
}

// TestTiersOfDevices runs requests that begin alike over a tiny pool in device memory, with KV
// tiers in host memory and files, on emulated devices that check that accesses are ordered, where
// some copies of the tiers fail: each draws what it draws alone.
func TestTiersOfDevices(t *testing.T) {
	for _, c := range []struct {
		caching bool
		factor  int
		policy  string
		fails   float64
		// run: the engine's loop runs on a wall clock, with streams that are goroutines.
		run bool
	}{
		{true, 1, "lru", 0, false},
		{true, 2, "arc", 0, false},
		{false, 1, "arc", 0, false},
		{false, 2, "lru", .03, false},
		{true, 1, "lru", .03, false},
		{true, 1, "arc", .03, true},
		{false, 2, "lru", .03, true},
	} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			const size, blocks = 4, 26
			ok := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
			}
			r := openTiers(t, size, blocks, emulated.Options{Virtual: !c.run, Seed: 3, HostLink: emulated.Link{BytesPerSecond: 1e6}},
				offload.Config{CPUBlocks: 24, FileBlocks: 60, BlockFactor: c.factor, EvictionPolicy: c.policy})
			m, kv, tiers, step := r.machine, r.kv, r.tiers, r.step
			if c.fails > 0 {
				m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: -1, Chance: c.fails, Match: func(p emulated.Point) bool { return p.Stream != "compute" }})
			}
			e := newEngine(t, engine.Options{
				Pipeline: step, KV: kv, Offload: tiers, PrefixCaching: c.caching, MaxModelLen: 4 * blocks, MaxNumSeqs: 10, MaxNumBatchedTokens: 40,
				LongAfter: longAfter, Vocab: 256, Clock: m.Now, Pause: m.Yield,
			})
			var rs []engine.Request
			for i := range 60 {
				q := ask(i%7, 3+i*11%60, 1+i*7%40)
				q.Params.Seed, q.Params.N = uint64(i), 1+i%5/4
				rs = append(rs, q)
			}
			var outs []engine.Output
			if c.run {
				outs = runAll(t, e, rs)
			} else {
				var err error
				outs, err = e.Generate(t.Context(), rs, nil)
				ok(err)
			}
			n := 0
			for i, q := range rs {
				for k := range q.Params.N {
					if want := drawn(q, k); !slices.Equal(outs[n].TokenIDs, want) {
						t.Errorf("request %d, sample %d: %v, want %v", i, k, outs[n].TokenIDs, want)
					}
					n++
				}
			}
			s := e.State()
			t.Logf("%+v, tiers %+v", s, tiers.Stats())
			// By a wall clock it may be faster to compute everything.
			if s.Preemptions == 0 || s.ExternalHits == 0 && !c.run {
				t.Errorf("%+v: too little has happened", s)
			}
			ok(tiers.Close())
			if kv.Free() != kv.Blocks() {
				t.Errorf("%d of %d blocks are free", kv.Free(), kv.Blocks())
			}
			ok(r.close())
		})
	}
}

// runAll submits requests to an engine whose loop runs, and returns what their samples draw.
func runAll(t *testing.T, e *engine.Engine, rs []engine.Request) (outs []engine.Output) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- e.Run(ctx) }()
	jobs := make([]*engine.Job, len(rs))
	for i, q := range rs {
		var err error
		if jobs[i], err = e.Submit(t.Context(), q); err != nil {
			t.Fatal(err)
		}
	}
	for _, j := range jobs {
		for _, u := range wait(t, j) {
			outs = append(outs, engine.Output{TokenIDs: ids(u)})
		}
	}
	// Also without another request, blocks are held only until their stores have ended.
	for end := time.Now().Add(20 * time.Second); e.State().KVUsedBlocks > 0; runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("%d blocks are used by an idle engine", e.State().KVUsedBlocks)
		}
	}
	cancel()
	if err := <-ran; err != nil {
		t.Error(err)
	}
	return outs
}

// TestIdleEngineAppliesLosses: when peers' memory is revoked while no request runs, the blocks that lay
// there are gone from the tier's account at once, not with the next request.
func TestIdleEngineAppliesLosses(t *testing.T) {
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	m, err := emulated.New(emulated.Options{Check: true, GPUs: []emulated.GPU{{MemoryBytes: 1 << 20}, {MemoryBytes: 1 << 20}}})
	ok(err)
	copies, err := transfer.New(transfer.Options{Machine: m})
	ok(err)
	shape := kvcache.Shape{Layers: 1, KVHeads: 1, HeadDim: 2, DType: kernels.F32, BlockTokens: 4}
	pool, err := kvcache.NewPool(kvcache.PoolOptions{Machine: m, Space: device.HBM(0), Shape: shape, Blocks: 40})
	ok(err)
	lender, err := harvest.New(harvest.Options{
		Machine: m, Peers: []device.Space{device.HBM(1)}, HeadroomBytes: -1,
		Clients: map[string]harvest.ClientOptions{offload.HarvestClient: {SlabBytes: 4096}},
	})
	ok(err)
	ok(lender.Start())
	kv := smallBlocks(t, 40)
	tiers, err := offload.New(offload.Options{
		Machine: m, Space: device.HBM(0), Pool: pool, Blocks: kv, Transfer: copies, Harvest: lender, Config: offload.Config{GPUBlocks: 40},
	})
	ok(err)
	step := &onDevice{drawing: newDrawing(t, kv), pool: pool}
	step.stream, err = m.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
	ok(err)
	step.host, err = m.Alloc(device.Host, 4*wordBytes, "words")
	ok(err)
	for id := range int32(40) {
		ok(step.write(t.Context(), id))
	}
	e := newEngine(t, engine.Options{Pipeline: step, KV: kv, Offload: tiers, MaxModelLen: 160, MaxNumBatchedTokens: 40, LongAfter: longAfter, Vocab: 256, Clock: m.Now})
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- e.Run(ctx) }()
	j, err := e.Submit(ctx, ask(1, 33, 1))
	ok(err)
	wait(t, j)
	until := func(what string, is func(s offload.TierStats) bool) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); !is(tiers.Stats()[0]); runtime.Gosched() {
			if time.Now().After(end) {
				t.Fatalf("%s: %+v", what, tiers.Stats()[0])
			}
		}
	}
	until("not stored", func(s offload.TierStats) bool { return s.Evictable == 8 && s.StoringBytes == 0 })
	r, err := lender.Reclaim(device.HBM(1), 1<<40, time.Minute)
	ok(err)
	ok(r.Wait(t.Context()))
	until("lost and not noticed", func(s offload.TierStats) bool { return s.LostBlocks == 8 && s.Evictable == 0 })
	cancel()
	ok(<-ran)
	ok(lender.Close(t.Context()))
	ok(tiers.Close())
	ok(errors.Join(step.stream.Close(), step.host.Free(), pool.Close(), copies.Close(), m.Close()))
}
