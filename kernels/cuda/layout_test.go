//go:build cuda

package cuda

import (
	"fmt"
	"math"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/philox"
)

// layoutCase is a decode step's attention over a KV cache.
type layoutCase struct {
	Model       string `json:"model"`
	Layers      int    `json:"layers"`
	Heads       int    `json:"heads"`
	KVHeads     int    `json:"kv_heads"`
	HeadDim     int    `json:"head_dim"`
	Sequences   int    `json:"sequences"`
	Context     int    `json:"context_tokens"`
	BlockTokens int    `json:"block_tokens"`
	// Workspace is the backend's, which decides whether long sequences are split.
	Workspace int64 `json:"workspace_bytes"`
}

// layoutResult has times of a layer, medians over rounds, and the ratio of both layouts' times
// in a round: median, lowest and highest.
type layoutResult struct {
	layoutCase
	PoolBlocks   int     `json:"pool_blocks"`
	Split        bool    `json:"split"`
	Rounds       int     `json:"rounds"`
	PerLayer     float64 `json:"per_layer_s"`
	BlockWise    float64 `json:"block_contiguous_s"`
	BytesPerS    float64 `json:"block_contiguous_bytes_per_s"`
	Ratio        float64 `json:"ratio"`
	LowestRatio  float64 `json:"lowest_ratio"`
	HighestRatio float64 `json:"highest_ratio"`
	// PerLayerSpread and BlockWiseSpread are (highest - lowest) / median of the times.
	PerLayerSpread  float64 `json:"per_layer_spread"`
	BlockWiseSpread float64 `json:"block_contiguous_spread"`
}

// kvLayout says where K (0) and V (1) of a layer are: elements from the pool's start, and from
// block to block.
type kvLayout func(c *layoutCase, blocks, layer, kv int) (start, stride int)

// blockWise is the layout of package kvcache: K and V of all layers of a block are contiguous.
func blockWise(c *layoutCase, _, layer, kv int) (start, stride int) {
	plane := c.BlockTokens * c.KVHeads * c.HeadDim
	return (2*layer + kv) * plane, 2 * c.Layers * plane
}

// perLayer has an array of blocks for K of each layer, and one for V.
func perLayer(c *layoutCase, blocks, layer, kv int) (start, stride int) {
	plane := c.BlockTokens * c.KVHeads * c.HeadDim
	return (2*layer + kv) * blocks * plane, plane
}

// layoutStep is the attention of all layers in one layout.
type layoutStep []kernels.Attention

// layoutRun is a case on a backend, with the steps of both layouts: per layer, and block-wise.
type layoutRun struct {
	layoutCase
	b      *Backend
	s      device.Stream
	blocks int
	steps  [2]layoutStep
	times  [2][]float64
	ratios []float64
}

// layoutSteps makes the steps of a case in a pool, whose blocks the sequences have in no order.
// Both layouts are views of the same memory, which only needs to hold numbers.
func (x *measurer) layoutSteps(c layoutCase, pool device.Range) *layoutRun {
	plane := c.BlockTokens * c.KVHeads * c.HeadDim
	r := &layoutRun{layoutCase: c, b: x.b, s: x.s, blocks: int(pool.Bytes) / (2 * c.Layers * 2 * plane)}
	width := (c.Context + c.BlockTokens - 1) / c.BlockTokens
	if need := c.Sequences * width; need > r.blocks {
		x.Fatalf("%+v needs %d blocks, and the pool has %d", c, need, r.blocks)
	}
	starts, lens, table := make([]int32, c.Sequences+1), make([]int32, c.Sequences), make([]int32, c.Sequences*width)
	for i := range lens {
		starts[i+1], lens[i] = int32(i+1), int32(c.Context)
	}
	for i, b := range x.random.Perm(r.blocks)[:len(table)] {
		table[i] = int32(b)
	}
	op := kernels.Attention{
		Q: x.act(c.Sequences, c.Heads, c.HeadDim), SeqStarts: x.ints(starts...), ContextLens: x.ints(lens...), BlockTable: x.ints(table...).View(c.Sequences, width),
		Scale: float32(1 / math.Sqrt(float64(c.HeadDim))), MaxContext: c.Context, MaxSeqTokens: 1, Out: x.act(c.Sequences, c.Heads, c.HeadDim),
	}
	for i, layout := range [...]kvLayout{perLayer, blockWise} {
		for layer := range c.Layers {
			for kv, to := range [...]*kernels.Tensor{&op.CacheK, &op.CacheV} {
				start, stride := layout(&c, r.blocks, layer, kv)
				*to = kernels.New(pool.Addr+device.Addr(2*start), kernels.BF16, r.blocks, c.BlockTokens, c.KVHeads, c.HeadDim)
				to.Stride[0] = stride
			}
			r.steps[i] = append(r.steps[i], op)
		}
	}
	return r
}

// enqueue puts a step's attention of all layers on the stream.
func (r *layoutRun) enqueue(layout int) error {
	for i := range r.steps[layout] {
		if err := r.b.Enqueue(r.s, &r.steps[layout][i]); err != nil {
			return err
		}
	}
	return nil
}

// layouts times the cases for a number of rounds, in each of them every case in both layouts,
// steps in a row at a time. add makes the runs.
func (x *measurer) layouts(runs []*layoutRun, rounds, steps int) []layoutResult {
	measure := func(r *layoutRun, layout int) float64 {
		took, _, err := x.span([]device.Stream{r.s}, func() error {
			for range steps {
				if err := r.enqueue(layout); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			x.Fatal(err)
		}
		return took.Seconds() / float64(steps*r.Layers)
	}
	for _, r := range runs { // the first launches load code
		measure(r, 0)
		measure(r, 1)
	}
	for round := 0; round < rounds && (round < 3 || !x.over()); round++ {
		for _, r := range runs {
			var took [2]float64
			for i := range took {
				layout := (i + round) % 2
				took[layout] = measure(r, layout)
			}
			for i := range took {
				r.times[i] = append(r.times[i], took[i])
			}
			r.ratios = append(r.ratios, took[1]/took[0])
		}
	}
	var results []layoutResult
	for _, r := range runs {
		spread := func(v []float64) float64 { return (slices.Max(v) - slices.Min(v)) / median(v) }
		bytes := float64(r.Sequences) * float64(r.Context) * float64(2*r.KVHeads*r.HeadDim*2)
		a := layoutResult{
			layoutCase: r.layoutCase, PoolBlocks: r.blocks, Rounds: len(r.ratios), PerLayer: median(r.times[0]), BlockWise: median(r.times[1]),
			Ratio: median(r.ratios), LowestRatio: slices.Min(r.ratios), HighestRatio: slices.Max(r.ratios),
			PerLayerSpread: spread(r.times[0]), BlockWiseSpread: spread(r.times[1]),
		}
		a.BytesPerS = bytes / a.BlockWise
		a.Split = r.splits()
		results = append(results, a)
	}
	return results
}

// splits reports whether sequences are split over blocks of threads, as attention decides.
func (r *layoutRun) splits() bool {
	_, split := r.b.splitAttention(r.Sequences, 1, r.Heads, r.KVHeads, r.HeadDim, ceil(r.Context, chunkTokens))
	return split
}

func layoutTable(results []layoutResult) [][]string {
	rows := [][]string{{"model", "sequences x tokens", "block", "long sequences", "per layer, us", "block-contiguous, us", "TB/s", "ratio", "lowest to highest", "spread of times"}}
	for i := range results {
		r := &results[i]
		split := "whole"
		if r.Split {
			split = "split"
		}
		rows = append(rows, []string{
			r.Model, fmt.Sprintf("%d x %d", r.Sequences, r.Context), fmt.Sprint(r.BlockTokens), split,
			fmt.Sprintf("%.1f", r.PerLayer*1e6), fmt.Sprintf("%.1f", r.BlockWise*1e6), fmt.Sprintf("%.2f", r.BytesPerS/1e12), fmt.Sprintf("%.4f", r.Ratio),
			fmt.Sprintf("%.4f to %.4f", r.LowestRatio, r.HighestRatio), fmt.Sprintf("%.1f %%, %.1f %%", 100*r.PerLayerSpread, 100*r.BlockWiseSpread),
		})
	}
	return rows
}

// TestMeasureLayout compares attention over the KV cache of package kvcache, where a layer
// is 1 / layers of every block, with one where each layer has an array: at the steps of the
// paper's batch and of few long sequences, in a pool of 72 GiB, whose pages exceed what
// address translation caches.
func TestMeasureLayout(t *testing.T) {
	needMeasure(t, "attention.cu")
	begin := time.Now()
	m, b, s := openGPU(t, Options{BatchInvariant: true})
	x := newMeasurer(t, m, b, s, *measureFor)
	defer x.free()
	pool := device.Range{Bytes: 72 << 30}
	if u, err := m.Usage(device.HBM(0)); err != nil {
		t.Fatal(err)
	} else if u.Free() < pool.Bytes+8<<30 {
		t.Skipf("needs a pool of %d bytes, and %d are free", pool.Bytes, u.Free())
	}
	pool.Addr = x.alloc(pool.Bytes)
	x.fill(pool)
	var runs []*layoutRun
	for _, c := range []layoutCase{
		{Model: "mixtral-8x7b", Heads: 32, KVHeads: 8, Sequences: 324, Context: 600},
		{Model: "mixtral-8x7b", Heads: 32, KVHeads: 8, Sequences: 32, Context: 8192},
		{Model: "qwen3-30b-a3b", Heads: 32, KVHeads: 4, Sequences: 324, Context: 600},
		{Model: "qwen3-30b-a3b", Heads: 32, KVHeads: 4, Sequences: 32, Context: 8192},
	} {
		c.Layers, c.HeadDim = 32, 128
		for _, c.BlockTokens = range []int{16, 32, 64} {
			c.Workspace = b.o.WorkspaceBytes
			runs = append(runs, x.layoutSteps(c, pool))
		}
	}
	t.Logf("ready in %v", time.Since(begin).Round(time.Millisecond))
	results := x.layouts(runs, 25, 2)
	t.Logf("measured in %v", time.Since(begin).Round(time.Millisecond))
	printTable(os.Stdout, layoutTable(results))
	writeMeasured(t, results)
	if err := s.Synchronize(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// fill writes random numbers to a range, the first piece from the host and the rest from there.
func (x *bench) fill(r device.Range) {
	piece := min(r.Bytes, 256<<20)
	x.upload(r.Addr, piece, func(b []byte) { philox.FillDummy(b, kernels.BF16, x.random.Uint64(), "kv cache", 0, x.exponent) })
	for at := piece; at < r.Bytes; at += piece {
		n := min(piece, r.Bytes-at)
		if err := x.s.Copy(device.Range{Addr: r.Addr + device.Addr(at), Bytes: n}, device.Range{Addr: r.Addr, Bytes: n}); err != nil {
			x.Fatal(err)
		}
	}
	if err := x.s.Synchronize(x.Context()); err != nil {
		x.Fatal(err)
	}
}
