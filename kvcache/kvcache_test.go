package kvcache_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
)

// TestAllocatorMachine compares an allocator with the obvious model.
func TestAllocatorMachine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		total := rapid.IntRange(0, 12).Draw(t, "blocks")
		a := kvcache.NewAllocator(total)
		refs := make([]int, total)
		free := 0 // LIFO of freed ids, then fresh ones ascending
		var freed []int32
		fresh := 0
		used := func(t *rapid.T) int32 {
			var ids []int32
			for id, n := range refs {
				if n > 0 {
					ids = append(ids, int32(id))
				}
			}
			if len(ids) == 0 {
				t.Skip("no block in use")
			}
			return rapid.SampledFrom(ids).Draw(t, "id")
		}
		t.Repeat(map[string]func(*rapid.T){
			"alloc": func(t *rapid.T) {
				n := rapid.IntRange(0, total+1).Draw(t, "n")
				before := []int32{-7}
				got, err := a.Alloc(before, n)
				if n > free {
					if !errors.Is(err, kvcache.ErrNoBlocks) || !slices.Equal(got, before) {
						t.Fatalf("%d of %d: %v, %v", n, free, got, err)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				want := before
				for range n {
					if k := len(freed) - 1; k >= 0 {
						want, freed = append(want, freed[k]), freed[:k]
					} else {
						want, fresh = append(want, int32(fresh)), fresh+1
					}
					refs[want[len(want)-1]] = 1
				}
				if !slices.Equal(got, want) {
					t.Fatalf("got blocks %v, want %v", got, want)
				}
			},
			"retain": func(t *rapid.T) {
				id := used(t)
				a.Retain(id)
				refs[id]++
			},
			"release": func(t *rapid.T) {
				id := used(t)
				a.Release(id)
				if refs[id]--; refs[id] == 0 {
					freed = append(freed, id)
				}
			},
			"misuse": func(t *rapid.T) {
				id := rapid.Int32Range(-1, int32(total)).Draw(t, "id")
				if id >= 0 && int(id) < total && refs[id] > 0 {
					t.Skip("in use")
				}
				mustPanic(t, func() { a.Release(id) })
				mustPanic(t, func() { a.Retain(id) })
			},
			"": func(t *rapid.T) {
				free = 0
				for id, n := range refs {
					if n == 0 {
						free++
					}
					if a.References(int32(id)) != n {
						t.Fatalf("block %d has %d references, want %d", id, a.References(int32(id)), n)
					}
				}
				if a.Free() != free || a.Blocks() != total {
					t.Fatalf("%d of %d free, want %d of %d", a.Free(), a.Blocks(), free, total)
				}
			},
		})
	})
}

func mustPanic(t interface{ Fatalf(string, ...any) }, f func()) {
	defer func() {
		if r := recover(); r == nil || !strings.Contains(r.(string), "while it is free") {
			t.Fatalf("panic %v", r)
		}
	}()
	f()
}

// TestTablesMachine: tables grow and go in any order; no slot belongs to two
// positions.
func TestTablesMachine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		block := rapid.IntRange(1, 4).Draw(t, "block tokens")
		a := kvcache.NewAllocator(rapid.IntRange(1, 10).Draw(t, "blocks"))
		tables := make([]*kvcache.Table, 3)
		room := make([]int, len(tables)) // in blocks
		for i := range tables {
			tables[i] = kvcache.NewTable(a, block)
		}
		t.Repeat(map[string]func(*rapid.T){
			"grow": func(t *rapid.T) {
				i, tokens := rapid.IntRange(0, 2).Draw(t, "table"), rapid.IntRange(0, 30).Draw(t, "tokens")
				need := max((tokens+block-1)/block, room[i])
				fits := need-room[i] <= a.Free()
				if err := tables[i].Grow(tokens); (err == nil) != fits || err != nil && !errors.Is(err, kvcache.ErrNoBlocks) {
					t.Fatalf("grow to %d tokens: %v", tokens, err)
				}
				if fits {
					room[i] = need
				}
			},
			"free": func(t *rapid.T) {
				i := rapid.IntRange(0, 2).Draw(t, "table")
				before := slices.Clone(tables[i].Blocks())
				tables[i].Free()
				room[i] = 0
				// Who comes next gets the same blocks in the same order.
				again, err := a.Alloc(nil, len(before))
				if err != nil || !slices.Equal(again, before) {
					t.Fatalf("freed %v, then got %v, %v", before, again, err)
				}
				for _, id := range slices.Backward(again) {
					a.Release(id)
				}
			},
			"": func(t *rapid.T) {
				slots, taken := map[int32]bool{}, 0
				for i, table := range tables {
					if len(table.Blocks()) != room[i] || table.Capacity() != room[i]*block {
						t.Fatalf("table %d has %d blocks, room for %d, want %d blocks", i, len(table.Blocks()), table.Capacity(), room[i])
					}
					taken += room[i]
					for p := range table.Capacity() {
						s := table.Slot(p)
						if slots[s] || s < 0 || int(s) >= a.Blocks()*block || s/int32(block) != table.Blocks()[p/block] || int(s)%block != p%block {
							t.Fatalf("table %d position %d has slot %d of blocks %v", i, p, s, table.Blocks())
						}
						slots[s] = true
					}
				}
				if a.Free()+taken != a.Blocks() {
					t.Fatalf("%d free and %d taken of %d", a.Free(), taken, a.Blocks())
				}
			},
		})
	})
}

func TestSlotOutside(t *testing.T) {
	table := kvcache.NewTable(kvcache.NewAllocator(2), 4)
	if err := table.Grow(5); err != nil {
		t.Fatal(err)
	}
	for _, p := range []int{-1, 8} {
		func() {
			defer func() {
				if r := recover(); r == nil || !strings.Contains(r.(string), "room for 8") {
					t.Errorf("slot of position %d: panic %v", p, r)
				}
			}()
			table.Slot(p)
		}()
	}
}

// TestBlockBytes: the KV bytes per token of the presets, in 16 bit.
func TestBlockBytes(t *testing.T) {
	for name, c := range map[string]struct {
		shape kvcache.Shape
		token int64
	}{
		"mixtral-8x7b":      {kvcache.Shape{Layers: 32, KVHeads: 8, HeadDim: 128, DType: kernels.BF16}, 131072},
		"phi-tiny-moe":      {kvcache.Shape{Layers: 32, KVHeads: 4, HeadDim: 128, DType: kernels.F16}, 65536},
		"qwen1.5-moe-a2.7b": {kvcache.Shape{Layers: 24, KVHeads: 16, HeadDim: 128, DType: kernels.BF16}, 196608},
		"qwen2-57b-a14b":    {kvcache.Shape{Layers: 28, KVHeads: 4, HeadDim: 128, DType: kernels.BF16}, 57344},
		"qwen3-30b-a3b":     {kvcache.Shape{Layers: 48, KVHeads: 4, HeadDim: 128, DType: kernels.BF16}, 98304},
	} {
		s := c.shape
		if s.BlockBytes() != 16*c.token || s.BytesFor(0) != 0 || s.BytesFor(1) != 16*c.token || s.BytesFor(16) != 16*c.token || s.BytesFor(17) != 32*c.token {
			t.Errorf("%s: %d bytes a block, want 16 x %d", name, s.BlockBytes(), c.token)
		}
	}
}

// TestViews: the views of all layers cover every element of every block once, and
// each block's bytes are contiguous.
func TestViews(t *testing.T) {
	m, err := emulated.New(emulated.Options{Virtual: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}()
	shape := kvcache.Shape{Layers: 3, KVHeads: 2, HeadDim: 5, DType: kernels.F32, BlockTokens: 4}
	pool, err := kvcache.New(kvcache.Options{Machine: m, Space: device.HBM(0), Shape: shape, Blocks: 6})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := pool.Close(); err != nil {
			t.Error(err)
		}
	}()
	if pool.Bytes() != 6*shape.BlockBytes() || pool.Allocator().Blocks() != 6 || pool.Shape() != shape {
		t.Errorf("a pool of %d bytes, %d blocks", pool.Bytes(), pool.Allocator().Blocks())
	}
	owner := map[device.Addr]bool{}
	for layer := range shape.Layers {
		k, v := pool.View(layer)
		for _, x := range []kernels.Tensor{k, v} {
			if d := cmp.Diff([]int{6, 4, 2, 5}, x.Shape[:x.Rank]); d != "" {
				t.Error(d)
			}
			for b := range 6 {
				whole := pool.Block(int32(b))
				one := x.Narrow(0, b, b+1)
				if !one.Dense() {
					t.Errorf("layer %d block %d has gaps inside", layer, b)
				}
				if r := one.Range(); r.Addr < whole.Addr || r.End() > whole.End() {
					t.Errorf("layer %d block %d lies at %v, outside of its block %v", layer, b, r, whole)
				}
				for e := range one.Elements() {
					a := one.Addr + device.Addr(4*e)
					if owner[a] {
						t.Fatalf("layer %d block %d element %d is somebody else's, too", layer, b, e)
					}
					owner[a] = true
				}
			}
		}
	}
	if int64(4*len(owner)) != pool.Bytes() {
		t.Errorf("the views have %d bytes, the pool %d", 4*len(owner), pool.Bytes())
	}
	if table := pool.NewTable(); table.Grow(5) != nil || table.Capacity() != 8 {
		t.Errorf("5 positions get room for %d", table.Capacity())
	}
	for _, layer := range []int{-1, 3} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("there is a view of layer %d of 3", layer)
				}
			}()
			pool.View(layer)
		}()
	}
}

func TestNewErrors(t *testing.T) {
	m, err := emulated.New(emulated.Options{Virtual: true, GPUs: []emulated.GPU{{MemoryBytes: 1 << 20}}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}()
	good := kvcache.Options{Machine: m, Space: device.HBM(0), Blocks: 10, Shape: kvcache.Shape{Layers: 2, KVHeads: 2, HeadDim: 4, DType: kernels.F32}}
	for want, change := range map[string]func(*kvcache.Options){
		"Layers is 0":            func(o *kvcache.Options) { o.Shape.Layers = 0 },
		"KVHeads is -1":          func(o *kvcache.Options) { o.Shape.KVHeads = -1 },
		"HeadDim is 0":           func(o *kvcache.Options) { o.Shape.HeadDim = 0 },
		"DType is 0":             func(o *kvcache.Options) { o.Shape.DType = kernels.Invalid },
		"BlockTokens is -1":      func(o *kvcache.Options) { o.Shape.BlockTokens = -1 },
		"at least one block":     func(o *kvcache.Options) { o.Blocks = 0 },
		"allocate 100000 blocks": func(o *kvcache.Options) { o.Blocks = 100_000 },
	} {
		o := good
		change(&o)
		if _, err := kvcache.New(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
	good.Blocks = 100_000
	if _, err := kvcache.New(good); !errors.Is(err, device.ErrOutOfMemory) {
		t.Errorf("got %v, want out of memory", err)
	}
}
