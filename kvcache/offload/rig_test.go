package offload_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/transfer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const blockTokens = 4

// rigOptions describe a rig. Defaults: 64 blocks of 1 KiB, a virtual machine with a check.
type rigOptions struct {
	machine  emulated.Options
	harvest  *harvest.Options
	config   offload.Config
	patience time.Duration
	limit    int
	inHost   bool  // the pool is in host memory
	chunk    int64 // of transfer
	// elsewhere: the tiers hold blocks in another account than that of the sequences, which
	// may use them meanwhile: a negative control.
	elsewhere bool
	blocks    int
	extents   int // of 8 blocks each, which can be withdrawn
	headBytes int // of a block: 2 layers x 2 x 4 tokens x 1 head x headBytes/4 elements of 4 bytes
	wall      bool
	unchecked bool // no check of accesses
}

// rig is a machine with a pool of KV blocks, their tiers, and a stream that computes.
type rig struct {
	testing.TB
	m       *emulated.Machine
	engine  *transfer.Engine
	harvest *harvest.Runtime
	pool    *kvcache.Pool
	blocks  *kvcache.Manager
	tiers   *offload.Tiers
	compute device.Stream
	host    device.Memory // what compute copies from and to, one block
	n       int64         // bytes of a block
	log     bytes.Buffer
	closed  bool
	o       rigOptions
	ready   map[kvcache.Key]map[string]bool // by replayed events
}

func newRig(t testing.TB, o rigOptions) *rig {
	t.Helper()
	r, err := openRig(t, o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func openRig(t testing.TB, o rigOptions) (*rig, error) {
	t.Helper()
	if o.blocks == 0 {
		o.blocks = 64
	}
	if o.headBytes == 0 {
		o.headBytes = 64
	}
	r := &rig{TB: t, o: o, ready: map[kvcache.Key]map[string]bool{}}
	mo := o.machine
	mo.Check, mo.Virtual = !o.unchecked, !o.wall
	var err error
	r.m, err = emulated.New(mo)
	r.ok(err)
	r.engine, err = transfer.New(transfer.Options{Machine: r.m, ChunkBytes: o.chunk})
	r.ok(err)
	shape := kvcache.Shape{Layers: 2, KVHeads: 1, HeadDim: o.headBytes / 4, DType: kernels.F32, BlockTokens: blockTokens}
	r.n = shape.BlockBytes()
	space := device.HBM(0)
	if o.inHost {
		space = device.Host
	}
	r.pool, err = kvcache.NewPool(kvcache.PoolOptions{Machine: r.m, Space: space, Shape: shape, Blocks: o.blocks})
	r.ok(err)
	r.blocks, err = kvcache.NewManager(kvcache.ManagerOptions{Blocks: o.blocks, BlockTokens: blockTokens, Extents: o.extents, ExtentBlocks: 8})
	r.ok(err)
	r.compute, err = r.m.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
	r.ok(err)
	r.host, err = r.m.Alloc(device.Host, r.n, "test")
	r.ok(err)
	if o.harvest != nil {
		h := *o.harvest
		h.Machine = r.m
		r.harvest, err = harvest.New(h)
		r.ok(err)
	}
	holds := r.blocks
	if o.elsewhere {
		holds, err = kvcache.NewManager(kvcache.ManagerOptions{Blocks: o.blocks, BlockTokens: blockTokens})
		r.ok(err)
		holds.NewTable().Reserve(o.blocks * blockTokens)
	}
	r.tiers, err = offload.New(offload.Options{
		Machine: r.m, Space: space, Pool: r.pool, Blocks: holds, Transfer: r.engine, Harvest: r.harvest,
		Config: o.config, Patience: o.patience, StoreLimit: o.limit, Events: true, Log: slog.New(slog.NewTextHandler(&r.log, nil)),
	})
	t.Cleanup(r.close)
	return r, err
}

// close closes everything and checks that nothing is left.
func (r *rig) close() {
	if r.closed {
		return
	}
	r.closed = true
	if r.harvest != nil {
		if err := r.harvest.Close(context.Background()); err != nil {
			r.Errorf("close harvest: %v", err)
		}
	}
	if r.tiers != nil {
		if err := r.tiers.Close(); err != nil {
			r.Errorf("close tiers: %v", err)
		}
		if n := r.blocks.Held(); n > 0 {
			r.Errorf("%d blocks are held", n)
		}
	}
	err := errors.Join(r.compute.Close(), r.host.Free(), r.pool.Close(), r.engine.Close())
	if err := errors.Join(err, r.m.Close()); err != nil {
		r.Error(err)
	}
}

func (r *rig) ok(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// sequence is a sequence with the keys of its full blocks and its own blocks of the GPU.
type sequence struct {
	id    int64
	keys  []kvcache.Key
	table *kvcache.Table
}

// sequence makes a sequence of full blocks, which has blocks of the GPU. Sequences
// of the same name begin alike.
func (r *rig) sequence(id int64, name string, blocks int) *sequence {
	r.Helper()
	s := &sequence{id: id, table: r.blocks.NewTable()}
	k := kvcache.RootKey([]byte(name))
	for i := range blocks {
		k = k.Next([]int32{int32(i)})
		s.keys = append(s.keys, k)
	}
	r.reserve(s)
	return s
}

// reserve gives a sequence its blocks of the GPU.
func (r *rig) reserve(s *sequence) {
	r.Helper()
	if !s.table.Reserve(len(s.keys) * blockTokens) {
		r.Fatalf("no room for %d blocks of %d", len(s.keys), r.blocks.Free())
	}
}

// content is what a block of that key holds.
func (r *rig) content(k kvcache.Key) []byte { return bytes.Repeat(k[:], int(r.n)/len(k)) }

// fill computes blocks of a sequence.
func (r *rig) fill(s *sequence, from, to int) {
	r.Helper()
	for i := from; i < to; i++ {
		r.write(s.table.Blocks()[i], r.content(s.keys[i]))
	}
	s.table.SetFilled(to * blockTokens)
}

// write has the compute stream write a block, and waits.
func (r *rig) write(block int32, content []byte) {
	r.Helper()
	copy(r.host.Write(0, r.n), content)
	r.ok(r.compute.Copy(r.pool.Region(block).Range, r.host.Range(0, r.n)))
	r.ok(r.compute.Synchronize(context.Background()))
}

// read has the compute stream read a block, and waits.
func (r *rig) read(block int32) []byte {
	r.Helper()
	r.ok(r.compute.Copy(r.host.Range(0, r.n), r.pool.Region(block).Range))
	r.ok(r.compute.Synchronize(context.Background()))
	return bytes.Clone(r.host.Read(0, r.n))
}

// right compares the sequence's blocks with what they must hold.
func (r *rig) right(s *sequence, from, to int) bool {
	r.Helper()
	for i := from; i < to; i++ {
		if !bytes.Equal(r.read(s.table.Blocks()[i]), r.content(s.keys[i])) {
			return false
		}
	}
	return true
}

// store offers blocks of a sequence and waits until they are stored.
func (r *rig) store(s *sequence, from, to int) {
	r.Helper()
	r.tiers.Store(s.keys, from, s.table.Blocks()[from:to], offload.Filled)
	r.settle()
}

// settle waits until nothing is under way, and returns the loads that have ended.
func (r *rig) settle() (all []offload.Loaded) {
	r.Helper()
	for range 1000 {
		all = append(all, r.tiers.Poll()...)
		if !r.busy() {
			return all
		}
		r.ok(r.tiers.Wait(context.Background()))
	}
	r.Fatal("transfers do not end")
	return nil
}

// busy reports whether transfers are under way.
func (r *rig) busy() bool {
	n := int64(r.tiers.Pending())
	for _, s := range r.tiers.Stats() {
		n += s.StoringBytes + s.LoadingBytes
	}
	return n > 0
}

// load looks a sequence up from a block on, loads what is found and waits for it.
func (r *rig) load(s *sequence, from int) (found int, l offload.Loaded) {
	r.Helper()
	n, wait := r.tiers.Lookup(s.keys, from, len(s.keys)*blockTokens)
	if wait {
		r.Fatal("the tiers ask to wait")
	}
	if n == 0 {
		return 0, offload.Loaded{Seq: s.id}
	}
	r.ok(r.tiers.Load(s.id, s.keys, from, s.table.Blocks()[from:from+n]))
	all := r.settle()
	if len(all) != 1 || all[0].Seq != s.id || r.tiers.Pending() != 0 {
		r.Fatalf("%d loads have ended: %+v", len(all), all)
	}
	return n, all[0]
}

// overwrite fills all free blocks of the GPU with something else.
func (r *rig) overwrite() {
	r.Helper()
	x := r.blocks.NewTable()
	if n := r.blocks.Free(); n > 0 {
		if !x.Reserve(n * blockTokens) {
			r.Fatal("no room")
		}
		for _, b := range x.Blocks() {
			r.write(b, bytes.Repeat([]byte{0xee}, int(r.n)))
		}
		x.Release(false)
	}
}

// stats of a medium.
func (r *rig) stats(medium string) offload.TierStats {
	for _, s := range r.tiers.Stats() {
		if s.Medium == medium {
			return s
		}
	}
	r.Fatalf("no tier %s", medium)
	return offload.TierStats{}
}

// logged returns the log since the last call.
func (r *rig) logged() string {
	defer r.log.Reset()
	return r.log.String()
}

func wantError(t *testing.T, err error, want ...string) {
	t.Helper()
	for _, w := range want {
		if err == nil || !strings.Contains(err.Error(), w) {
			t.Errorf("error %v, want one with %q", err, w)
		}
	}
}
