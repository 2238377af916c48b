//go:build cuda

package kvcache_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
	kernelscuda "github.com/moeserve/moeserve/kernels/cuda"
	"github.com/moeserve/moeserve/kvcache"
)

// -on cpu lets the tests named GPU run on the CPU instead, as a test of themselves.
var on = flag.String("on", "cuda", "device of the tests named GPU: cuda or cpu")

// gpuRig is a machine, its backend and a stream, all released at the test's end.
type gpuRig struct {
	*testing.T
	m       device.Machine
	backend kernels.Backend
	stream  device.Stream
}

func newGPURig(t *testing.T) *gpuRig {
	t.Helper()
	r := &gpuRig{T: t}
	var err error
	if *on == "cpu" {
		r.m, err = emulated.Open(emulated.Options{})
		r.backend = cpu.New(cpu.Options{})
	} else {
		r.m, err = cuda.Open(cuda.Options{})
		if errors.Is(err, cuda.ErrUnavailable) && os.Getenv("MOESERVE_CUDA_TEST") != "gpu" {
			t.Skip(err)
		}
	}
	r.ok(err)
	t.Cleanup(func() { r.gone(r.m.Close()) })
	if r.backend == nil {
		r.backend, err = kernelscuda.New(r.m, device.HBM(0), kernelscuda.Options{BatchInvariant: true})
		r.ok(err)
	}
	t.Cleanup(func() { r.gone(r.backend.Close()) })
	r.stream, err = r.m.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
	r.ok(err)
	t.Cleanup(func() { r.gone(r.stream.Close()) })
	return r
}

func (r *gpuRig) ok(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *gpuRig) gone(err error) {
	if err != nil {
		r.Error(err)
	}
}

func (r *gpuRig) alloc(space device.Space, n int64) device.Memory {
	r.Helper()
	m, err := r.m.Alloc(space, n, r.Name())
	r.ok(err)
	r.Cleanup(func() { r.gone(m.Free()) })
	return m
}

// upload returns a tensor in device memory.
func (r *gpuRig) upload(data []byte, t kernels.DType, shape ...int) kernels.Tensor {
	r.Helper()
	n := int64(len(data))
	host, mem := r.alloc(device.Host, n), r.alloc(device.HBM(0), n)
	copy(host.Write(0, n), data)
	r.ok(r.stream.Copy(mem.Range(0, n), host.Range(0, n)))
	return kernels.New(mem.Range(0, n).Addr, t, shape...)
}

func (r *gpuRig) ints(v []int32, shape ...int) kernels.Tensor {
	r.Helper()
	var data []byte
	for _, x := range v {
		data = binary.NativeEndian.AppendUint32(data, uint32(x))
	}
	return r.upload(data, kernels.I32, shape...)
}

// download returns what lies in device memory once the stream gets there.
func (r *gpuRig) download(ranges ...device.Range) []byte {
	r.Helper()
	var all []byte
	for _, src := range ranges {
		host := r.alloc(device.Host, src.Bytes)
		r.ok(r.stream.Copy(host.Range(0, src.Bytes), src))
		r.ok(r.stream.Synchronize(r.Context()))
		all = append(all, host.Read(0, src.Bytes)...)
	}
	return all
}

// TestGPUBlocks: keys and values that kernels write through tables and views of all
// layers lie where blocks are said to lie, byte by byte, and nothing else is touched;
// and kernels that read through the tables find every one of them.
func TestGPUBlocks(t *testing.T) {
	r := newGPURig(t)
	act := r.backend.ActivationDType()
	shape := kvcache.Shape{Layers: 3, KVHeads: 2, HeadDim: 64, DType: act}.EnsureDefaults()
	const blocks, group = 32, 2
	before, err := r.m.Usage(device.HBM(0))
	r.ok(err)
	pool, err := kvcache.NewPool(kvcache.PoolOptions{Machine: r.m, Space: device.HBM(0), Shape: shape, Blocks: blocks})
	r.ok(err)
	manager, err := kvcache.NewManager(kvcache.ManagerOptions{Blocks: blocks, BlockTokens: shape.BlockTokens})
	r.ok(err)
	t.Cleanup(func() { r.gone(pool.Close()) })
	after, err := r.m.Usage(device.HBM(0))
	r.ok(err)
	if got := after.Allocated - before.Allocated; got < blocks*shape.BlockBytes() || got >= blocks*shape.BlockBytes()+2<<20 {
		t.Errorf("a pool of %d bytes is accounted for with %d", blocks*shape.BlockBytes(), got)
	}

	// Tables that grow by turns have scattered blocks; two release theirs midway, and
	// allocate them again in another order.
	lengths := []int{1, 15, 16, 17, 100, 33}
	tables := make([]*kvcache.Table, len(lengths))
	for i := range tables {
		tables[i] = manager.NewTable()
	}
	for part := 1; part <= 4; part++ {
		for i, n := range lengths {
			if !tables[i].Reserve((n*part + 3) / 4) {
				t.Fatal("too few blocks")
			}
		}
		if part == 2 {
			tables[5].Release(false)
			tables[4].Release(false)
		}
	}
	var slots, starts, lens, table []int32
	longest, most := slices.Max(lengths), 0
	for _, x := range tables {
		most = max(most, len(x.Blocks()))
	}
	scattered := false
	for i, n := range lengths {
		starts, lens = append(starts, int32(len(slots))), append(lens, int32(n))
		for p := range n {
			slots = append(slots, tables[i].Blocks()[p/shape.BlockTokens]*int32(shape.BlockTokens)+int32(p%shape.BlockTokens))
		}
		b := tables[i].Blocks()
		scattered = scattered || !slices.IsSorted(b)
		table = append(table, append(slices.Clone(b), make([]int32, most-len(b))...)...)
	}
	if !scattered {
		t.Fatal("every table's blocks ascend: this test has lost its point")
	}
	starts = append(starts, int32(len(slots)))
	rows := len(slots)

	poison := make([]byte, shape.BlockBytes())
	for i := range poison {
		poison[i] = 0xa5
	}
	source := r.upload(poison, act, len(poison)/act.Size())
	first, _ := pool.View(0)
	var all []device.Range
	for id := range int64(blocks) {
		all = append(all, device.Range{Addr: first.Addr + device.Addr(id*shape.BlockBytes()), Bytes: shape.BlockBytes()})
		r.ok(r.stream.Copy(all[id], source.Range()))
	}
	want := bytes.Repeat(poison, blocks)
	row := shape.KVHeads * shape.HeadDim * act.Size()
	random := rand.New(rand.NewPCG(7, 1))
	numbers := func(n int) []byte {
		f, data := make([]float32, n), make([]byte, n*act.Size())
		for i := range f {
			f[i] = 2*random.Float32() - 1
		}
		kernels.FromFloat32(data, f, act)
		return data
	}
	slotsAt := r.ints(slots, rows)
	values := make([][]byte, shape.Layers)
	for layer := range shape.Layers {
		k, v := numbers(rows*row/act.Size()), numbers(rows*row/act.Size())
		values[layer] = v
		cacheK, cacheV := pool.View(layer)
		r.ok(r.backend.Enqueue(r.stream, &kernels.AppendKV{
			K: r.upload(k, act, rows, shape.KVHeads, shape.HeadDim), V: r.upload(v, act, rows, shape.KVHeads, shape.HeadDim),
			CacheK: cacheK, CacheV: cacheV, Slots: slotsAt,
		}))
		for i, s := range slots {
			block, in := int(s)/shape.BlockTokens, int(s)%shape.BlockTokens
			plane := block*int(shape.BlockBytes()) + 2*layer*shape.BlockTokens*row
			copy(want[plane+in*row:], k[i*row:(i+1)*row])
			copy(want[plane+(shape.BlockTokens+in)*row:], v[i*row:(i+1)*row])
		}
	}
	got := r.download(all...)
	for id := range blocks {
		a, b := got[id*len(poison):(id+1)*len(poison)], want[id*len(poison):(id+1)*len(poison)]
		for at := range a {
			if a[at] != b[at] {
				t.Fatalf("block %d has another byte at %d of %d", id, at, len(a))
			}
		}
	}

	// A query that sees one position, its own, takes exactly the value there.
	heads := group * shape.KVHeads
	startsAt, lensAt, tableAt := r.ints(starts, len(starts)), r.ints(lens, len(lens)), r.ints(table, len(lengths), most)
	for layer := range shape.Layers {
		cacheK, cacheV := pool.View(layer)
		out := kernels.New(r.alloc(device.HBM(0), int64(rows*group*row)).Range(0, 1).Addr, act, rows, heads, shape.HeadDim)
		r.ok(r.backend.Enqueue(r.stream, &kernels.Attention{
			Q: r.upload(numbers(rows*heads*shape.HeadDim), act, rows, heads, shape.HeadDim), CacheK: cacheK, CacheV: cacheV,
			SeqStarts: startsAt, ContextLens: lensAt, BlockTable: tableAt,
			Window: 1, Scale: 0.125, MaxContext: longest, MaxSeqTokens: longest, Out: out,
		}))
		back, head := r.download(out.Range()), shape.HeadDim*act.Size()
		for i := range rows {
			for h := range heads {
				value := values[layer][i*row+h/group*head:][:head]
				if !bytes.Equal(back[(i*heads+h)*head:][:head], value) {
					t.Fatalf("layer %d: row %d, head %d reads something else than its value", layer, i, h)
				}
			}
		}
	}
}

// TestGPUNoRoom: a pool that does not fit is refused, and nothing of it stays.
func TestGPUNoRoom(t *testing.T) {
	r := newGPURig(t)
	before, err := r.m.Usage(device.HBM(0))
	r.ok(err)
	shape := kvcache.Shape{Layers: 32, KVHeads: 8, HeadDim: 128, DType: r.backend.ActivationDType()}
	_, err = kvcache.NewPool(kvcache.PoolOptions{Machine: r.m, Space: device.HBM(0), Shape: shape, Blocks: int(before.Capacity/shape.BlockBytes()) + 1})
	if !errors.Is(err, device.ErrOutOfMemory) {
		t.Errorf("error %v, want out of memory", err)
	}
	after, err := r.m.Usage(device.HBM(0))
	r.ok(err)
	if after.Allocated != before.Allocated {
		t.Errorf("%d bytes stay", after.Allocated-before.Allocated)
	}
}
