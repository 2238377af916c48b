package kvcache_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
)

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
	pool, err := kvcache.NewPool(kvcache.PoolOptions{Machine: m, Space: device.HBM(0), Shape: shape, Blocks: 6})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := pool.Close(); err != nil {
			t.Error(err)
		}
	}()
	if pool.Shape() != shape {
		t.Errorf("a pool of %+v", pool.Shape())
	}
	first, _ := pool.View(0)
	owner := map[device.Addr]bool{}
	for layer := range shape.Layers {
		k, v := pool.View(layer)
		for _, x := range []kernels.Tensor{k, v} {
			if d := cmp.Diff([]int{6, 4, 2, 5}, x.Shape[:x.Rank]); d != "" {
				t.Error(d)
			}
			for b := range 6 {
				whole := device.Range{Addr: first.Addr + device.Addr(int64(b)*shape.BlockBytes()), Bytes: shape.BlockBytes()}
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
						t.Fatalf("layer %d block %d element %d belongs to another block, too", layer, b, e)
					}
					owner[a] = true
				}
			}
		}
	}
	if int64(4*len(owner)) != 6*shape.BlockBytes() {
		t.Errorf("the views have %d bytes, 6 blocks %d", 4*len(owner), 6*shape.BlockBytes())
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
	good := kvcache.PoolOptions{Machine: m, Space: device.HBM(0), Blocks: 10, Shape: kvcache.Shape{Layers: 2, KVHeads: 2, HeadDim: 4, DType: kernels.F32}}
	for want, change := range map[string]func(*kvcache.PoolOptions){
		"Machine is nil":         func(o *kvcache.PoolOptions) { o.Machine = nil },
		"Layers is 0":            func(o *kvcache.PoolOptions) { o.Shape.Layers = 0 },
		"KVHeads is -1":          func(o *kvcache.PoolOptions) { o.Shape.KVHeads = -1 },
		"HeadDim is 0":           func(o *kvcache.PoolOptions) { o.Shape.HeadDim = 0 },
		"DType is 0":             func(o *kvcache.PoolOptions) { o.Shape.DType = kernels.Invalid },
		"BlockTokens is -1":      func(o *kvcache.PoolOptions) { o.Shape.BlockTokens = -1 },
		"at least one block":     func(o *kvcache.PoolOptions) { o.Blocks = 0 },
		"allocate 100000 blocks": func(o *kvcache.PoolOptions) { o.Blocks = 100_000 },
	} {
		o := good
		change(&o)
		if _, err := kvcache.NewPool(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
	good.Blocks = 100_000
	if _, err := kvcache.NewPool(good); !errors.Is(err, device.ErrOutOfMemory) {
		t.Errorf("got %v, want out of memory", err)
	}
}
