//go:build cuda && amd64

package cuda

import (
	"bytes"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/device"
)

// TestLayouts: both layouts have a place for every block of every layer, and no two share one.
func TestLayouts(t *testing.T) {
	const blocks = 5
	c := layoutCase{Layers: 3, KVHeads: 2, HeadDim: 4, BlockTokens: 8}
	plane := c.BlockTokens * c.KVHeads * c.HeadDim
	for name, layout := range map[string]kvLayout{"block-wise": blockWise, "per layer": perLayer} {
		var planes []int
		for layer := range c.Layers {
			for kv := range 2 {
				start, stride := layout(&c, blocks, layer, kv)
				for b := range blocks {
					planes = append(planes, start+b*stride)
				}
			}
		}
		slices.Sort(planes)
		for i, at := range planes {
			if at != i*plane {
				t.Fatalf("%s: plane %d is at element %d, want %d", name, i, at, i*plane)
			}
		}
	}
}

// TestEmulatedLayouts runs what TestMeasureLayout measures, small and on the CPU.
func TestEmulatedLayouts(t *testing.T) {
	m, b, s := emulate(t, Options{BatchInvariant: true}, 2)
	x := newMeasurer(t, m, b, s, 0)
	defer x.free()
	pool := device.Range{Bytes: 3 << 20}
	pool.Addr = x.alloc(pool.Bytes)
	x.fill(pool)
	var runs []*layoutRun
	for _, tokens := range []int{16, 32} {
		for _, context := range []int{40, 600} {
			c := layoutCase{Model: "small", Layers: 3, Heads: 4, KVHeads: 2, HeadDim: 32, Sequences: 3, Context: context, BlockTokens: tokens, Workspace: b.o.WorkspaceBytes}
			runs = append(runs, x.layoutSteps(c, pool))
		}
	}
	results := x.layouts(runs, 3, 1)
	if len(results) != 4 {
		t.Fatalf("%d results, want 4", len(results))
	}
	for i, r := range results {
		if r.Rounds != 3 || !(r.PerLayer > 0) || !(r.BlockWise > 0) || !(r.LowestRatio <= r.Ratio && r.Ratio <= r.HighestRatio) || math.IsInf(r.Ratio, 0) || r.Split != (i%2 == 1) {
			t.Errorf("%+v", r)
		}
	}
	if rows := layoutTable(results); len(rows) != 5 || len(rows[0]) != len(rows[1]) || rows[1][3] != "whole" || rows[2][3] != "split" {
		t.Errorf("table %q", rows)
	}
}

// TestEmulatedCopies runs what TestMeasureCopies measures, small and on the CPU: what arrives is
// what was sent, on all paths.
func TestEmulatedCopies(t *testing.T) {
	m, b, s := emulate(t, Options{BatchInvariant: true, Streams: 2}, 4)
	second, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: "second"})
	if err != nil {
		t.Fatal(err)
	}
	x := &copier{measurer: newMeasurer(t, m, b, s, 0), pool: 1 << 20}
	defer x.release()
	results := x.copies([]int64{4 << 10, 64 << 10}, 2, 2, [2]device.Stream{s, hidden{second, second.(device.Executor)}})
	if want := 2 * 6 * len(copyMethods); len(results) != want {
		t.Fatalf("%d results, want %d", len(results), want)
	}
	for _, r := range results {
		if r.Error != "" || r.Samples != 2 || r.Blocks != int(1<<20/r.BlockBytes) || !(r.Rate > 0) || !(r.Lowest <= r.Rate && r.Rate <= r.Highest) {
			t.Errorf("%+v", r)
		}
	}
	var table bytes.Buffer
	printTable(&table, copyTable(results))
	if lines := strings.Count(table.String(), "\n|"); lines != 1+12 || !strings.Contains(table.String(), "peer both ways") {
		t.Errorf("table:\n%s", table.String())
	}
}

// TestEmulatedPrompts is testPrompts on the CPU, and runs what TestMeasurePrompts measures, small.
func TestEmulatedPrompts(t *testing.T) {
	m, b, s := emulate(t, Options{BatchInvariant: true}, 3)
	b.hopper = true
	testPrompts(t, m, b, s, promptCase{Heads: 4, KVHeads: 1, Sequences: 2, Tokens: 50, Context: 560}, 0)
	testPrompts(t, m, b, s, promptCase{Heads: 3, KVHeads: 1, Sequences: 1, Tokens: 90, Context: 700}, 300)
	// Large chunks, too: from position 4096 on.
	testPrompts(t, m, b, s, promptCase{Heads: 2, KVHeads: 1, Sequences: 1, Tokens: 5, Context: 5300}, 0)
	testPrompts(t, m, b, s, promptCase{Heads: 2, KVHeads: 1, Sequences: 1, Tokens: 5, Context: 6200}, 1100)
	x := newMeasurer(t, m, b, s, 0)
	defer x.free()
	cases := []promptCase{
		{Model: "small", Heads: 4, KVHeads: 2, Sequences: 1, Tokens: 70, Context: 70, Kernel: "prompt.cu"},
		{Model: "small", Heads: 4, KVHeads: 2, Sequences: 1, Tokens: 70, Context: 70, Kernel: "attention.cu"},
		{Model: "small", Heads: 4, KVHeads: 2, Sequences: 3, Tokens: 1, Context: 300, Kernel: "prompt.cu"},
	}
	all := x.measurePrompts(cases, 100, 0)
	if !(all.ReadBytesPerS > 0) || len(all.Results) != len(cases) || !b.hopper || !b.o.BatchInvariant {
		t.Fatalf("%+v", all)
	}
	for i, r := range all.Results {
		if r.promptCase != cases[i] || r.Rounds != 3 || !(r.Seconds > 0) {
			t.Errorf("%+v", r)
		}
	}
	// A prompt's tokens attend to half of all pairs, and half of those of a token with itself.
	r := all.Results[0]
	if want := 4. * 4 * 128 * (70 * 71 / 2) / r.Seconds; math.Abs(r.FlopsPerS/want-1) > 1e-9 {
		t.Errorf("%g operations a second, want %g", r.FlopsPerS, want)
	}
	if r := all.Results[2]; math.Abs(r.BytesPerS*r.Seconds-3*300*2*2*128*2) > 1 {
		t.Errorf("%g bytes, want %d", r.BytesPerS*r.Seconds, 3*300*2*2*128*2)
	}
	if rows := promptTable(all); len(rows) != 4 || len(rows[0]) != len(rows[1]) {
		t.Errorf("table %q", rows)
	}
}

// TestPattern: the content of pools is found again where it was written, by parts or not.
func TestPattern(t *testing.T) {
	whole := make([]byte, 40<<20)
	fillPattern(whole, 0)
	part := make([]byte, 1<<20)
	fillPattern(part, 33<<20)
	if !bytes.Equal(part, whole[33<<20:][:1<<20]) || bytes.Equal(part, whole[:1<<20]) {
		t.Error("content depends on the parts that it is written in, or on nothing")
	}
}
