package node_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
)

// A batch draws what the engine draws, however its prompts are cut into steps, and
// again when it goes back.
func TestBatchDrawsWhatTheEngineDraws(t *testing.T) {
	const newTokens = 6
	prompts := [][]int32{{5}, {9, 8, 7, 6, 5, 4, 3, 2, 1, 30, 31, 32, 33}, {40, 41, 42}}
	for _, rows := range []int{3, 7, 64} {
		s := configs.Defaults()
		s.Batch.MaxNumBatchedTokens, s.Batch.MaxNumSeqs, s.Offload.Fraction, s.KV.MaxModelLen = rows, 3, 0.5, 64
		n, err := node.Open(t.Context(), node.Options{Settings: s})
		if err != nil {
			t.Fatal(err)
		}
		var requests []engine.Request
		for _, p := range prompts {
			requests = append(requests, request(p, newTokens))
		}
		want, err := n.Engine().Generate(t.Context(), requests, nil)
		if err != nil {
			t.Fatal(err)
		}
		b, err := n.NewBatch(prompts, newTokens)
		if err != nil {
			t.Fatal(err)
		}
		check := func(what string) {
			t.Helper()
			for i, got := range b.Tokens() {
				if !slices.Equal(got, want[i].TokenIDs) {
					t.Errorf("%d rows a step, %s: sequence %d draws %v, the engine %v", rows, what, i, got, want[i].TokenIDs)
				}
			}
		}
		run := func(what string, err error) {
			t.Helper()
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
		}
		run("prefill", b.Prefill(t.Context()))
		run("decode", b.Decode(t.Context(), 1, newTokens))
		check("at first")
		run("decode again", b.Decode(t.Context(), 3, newTokens))
		check("again from the third on")
		run("prefill again", b.Prefill(t.Context()))
		if err := b.Decode(t.Context(), 3, newTokens); err == nil {
			t.Error("went on from tokens that were not drawn")
		}
		run("decode", b.Decode(t.Context(), 1, newTokens))
		check("from the prompts again")
		if err := b.Decode(t.Context(), newTokens, newTokens+1); err == nil {
			t.Error("drew more tokens than there is room for")
		}
		b.Close()
		if free, all := n.KV().Free(), n.KV().Blocks(); free != all {
			t.Errorf("%d of %d blocks are free behind a batch", free, all)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestBatchRefuses(t *testing.T) {
	s := configs.Defaults()
	s.Batch.MaxNumSeqs, s.KV.MaxModelLen, s.KV.NumBlocks = 2, 32, 3
	n, err := node.Open(t.Context(), node.Options{Settings: s})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close() //nolint:errcheck // only read from
	long := make([]int32, 20)
	for _, c := range []struct {
		prompts   [][]int32
		newTokens int
		want      string
	}{
		{[][]int32{{1}, {2}, {3}}, 1, "node: a batch of 3 sequences in steps of at most 2"},
		{[][]int32{{1}, {}}, 1, "node: sequence 1 of a batch has 0 tokens"},
		{[][]int32{long}, 13, "node: sequence 0 of a batch has 20 tokens and 13 new ones; the context is 32"},
		{[][]int32{{1}}, math.MaxInt, fmt.Sprintf("node: sequence 0 of a batch has 1 tokens and %d new ones; the context is 32", math.MaxInt)},
		{[][]int32{{1}}, -1, "node: sequence 0 of a batch has 1 tokens and -1 new ones; the context is 32"},
		{[][]int32{long, long}, 12, "node: the KV cache does not hold a batch of 2 sequences, only 1"},
	} {
		_, err := n.NewBatch(c.prompts, c.newTokens)
		if !errors.Is(err, node.ErrConfig) || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
		}
		if free := n.KV().Free(); free != 3 {
			t.Errorf("%s: %d blocks are free, of 3", c.want, free)
		}
	}
}

// What the planner hears of emulated devices is what they were told to be.
func TestHardware(t *testing.T) {
	s := configs.Defaults()
	d := func(spec string) *node.Devices {
		t.Helper()
		s.Device.Emulate = spec
		d, err := node.OpenDevices(s, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
		return d
	}
	devices := d("virtual,nodata,gpus=2,hbm=10GiB,host=20GiB,pcie=50GB/s,nvlink=300GB/s,hostlatency=2us,peerlatency=3us,flops=7T,bw=2TB/s")
	h, ok := devices.Hardware()
	if !ok || h.Validate() != nil {
		t.Fatalf("%+v, %v, %v", h, ok, h.Validate())
	}
	if h.GPUMemory != 10<<30 || h.HostMemory != 20<<30 || h.PeerMemory != 10<<30 || h.GPUFlops != 7e12 || h.GPUMemoryRate != 2e12 ||
		!slices.Equal(h.HostToGPU, []float64{50e9}) || h.GPUToHost != 50e9 || h.PeerToGPU != 300e9 ||
		math.Abs(h.HostCopyStart-2e-6) > 1e-12 || math.Abs(h.PeerCopyStart-3e-6) > 1e-12 {
		t.Errorf("%+v", h)
	}
	if !devices.Emulated() || !slices.Equal(devices.Peers(), []device.Space{device.HBM(1)}) || devices.Compute() != device.HBM(0) {
		t.Errorf("peers %v of %v", devices.Peers(), devices.Compute())
	}
	if h, ok := d("virtual").Hardware(); !ok || h.Validate() != nil {
		t.Errorf("without limits: %+v, %v, %v", h, ok, h.Validate())
	}
	if h, ok := d("pcie=50GB/s,flops=7T").Hardware(); ok {
		t.Errorf("rates that nothing keeps: %+v", h)
	}
	if _, ok := d("pace,pcie=50GB/s,flops=7T").Hardware(); !ok {
		t.Error("paced devices have no rates")
	}
	s.Device.Emulate = "gpus=0"
	if _, err := node.OpenDevices(s, nil); !errors.Is(err, node.ErrConfig) {
		t.Errorf("%v", err)
	}
}

// A real GPU is known by its name and, where two have one, by its memory.
func TestHardwareOfGPUs(t *testing.T) {
	for _, c := range []struct {
		name, want string
	}{
		{"NVIDIA H200", "H200"},
		{"NVIDIA A100-SXM4-80GB", "A100-80"},
		{"NVIDIA L4", "L4"},
		{"Tesla T4", "T4"},
		{"NVIDIA L40S", ""},
		{"NVIDIA H100 80GB HBM3", "H100-80"},
	} {
		h, from := node.PresetOf(device.Info{Name: c.name, MemoryBytes: 80e9})
		ok := from != ""
		if ok != (c.want != "") || h.Name != c.want {
			t.Errorf("%s: %q, want %q", c.name, h.Name, c.want)
		}
	}
}
