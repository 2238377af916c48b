package sizing

import (
	"errors"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/planner"
)

func TestRoomReportsTheMisfit(t *testing.T) {
	d := Demand{Space: "gpu0", Capacity: 1000, Share: 0.9, Parts: []planner.Part{{Name: "weights", Bytes: 600}, {Name: "experts", Bytes: 299}}, Advice: "offload more experts"}
	if room, err := d.Room(); err != nil || room != 1 {
		t.Errorf("room %d, %v; want 1", room, err)
	}
	d.Parts[1].Bytes = 2 << 30
	_, err := d.Room()
	var misfit *MisfitError
	if !errors.As(err, &misfit) || strings.Contains(misfit.Brief(), "weights") || !strings.Contains(misfit.Brief(), "need 2.00 GiB, usable") {
		t.Fatal(err)
	}
	for _, want := range []string{"gpu0", "need 2.00 GiB (weights 600 B, experts 2.00 GiB)", "usable 900 B", "90 %", "; offload more experts"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q lacks %q", err, want)
		}
	}
}

func TestKVFit(t *testing.T) {
	base := KVDemand{Room: 100 * 10, BlockBytes: 10, BlockTokens: 16, ModelPositions: 320, MaxNumSeqs: 2}
	for _, c := range []struct {
		name   string
		change func(*KVDemand)
		want   KVFit
		err    string
	}{
		{"as much as the sequences can use", func(*KVDemand) {}, KVFit{Blocks: 40, MaxModelLen: 320}, ""},
		{"all the room", func(d *KVDemand) { d.MaxNumSeqs = 64 }, KVFit{Blocks: 100, MaxModelLen: 320}, ""},
		{"as much as the sequences can use, and what can be lent", func(d *KVDemand) { d.Lendable = 30 }, KVFit{Blocks: 70, MaxModelLen: 320}, ""},
		{"no more than the room", func(d *KVDemand) { d.Lendable = 61 }, KVFit{Blocks: 100, MaxModelLen: 320}, ""},
		{"a requested length", func(d *KVDemand) { d.MaxModelLen = 33 }, KVFit{Blocks: 6, MaxModelLen: 33}, ""},
		{"requested blocks", func(d *KVDemand) { d.Blocks = 50 }, KVFit{Blocks: 50, MaxModelLen: 320}, ""},
		{"the length is what fits", func(d *KVDemand) { d.Room = 70 }, KVFit{Blocks: 7, MaxModelLen: 112}, ""},
		{"few blocks shorten it", func(d *KVDemand) { d.Blocks = 3 }, KVFit{Blocks: 3, MaxModelLen: 48}, ""},
		{"longer than the model", func(d *KVDemand) { d.MaxModelLen = 321 }, KVFit{}, "context is 320 tokens"},
		{"longer than the room", func(d *KVDemand) { d.MaxModelLen = 320; d.Room = 190 }, KVFit{}, "at most 304"},
		{"no room", func(d *KVDemand) { d.Room = 9 }, KVFit{}, "no room for the KV cache: one block, of 16 tokens, needs 10 B; raise --gpu-memory-utilization"},
		{"more blocks than room", func(d *KVDemand) { d.Blocks = 101 }, KVFit{}, "room for 100"},
	} {
		d := base
		c.change(&d)
		got, err := d.Fit()
		if c.err == "" && (err != nil || got != c.want) {
			t.Errorf("%s: %+v, %v; want %+v", c.name, got, err, c.want)
		}
		if c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
			t.Errorf("%s: error %v; want %q in it", c.name, err, c.err)
		}
	}
}

// Extents hold an expert each, wherever blocks begin, beside a sequence of maximum length.
func TestExtents(t *testing.T) {
	for _, c := range []struct {
		expert              int64
		headDim, offloaded  int
		blocks              int
		share               string
		extents, blocksEach int
	}{
		{4096, 16, 9, 20, configs.AutoShare, 5, 2}, // blocks of 2 KiB, 10 of them for a sequence
		{4096, 16, 9, 20, configs.StaticShare, 0, 2},
		{4096, 16, 3, 20, configs.AutoShare, 3, 2}, // no more than are offloaded
		{4097, 16, 9, 20, configs.AutoShare, 3, 3},
		{4096, 16, 9, 11, configs.AutoShare, 0, 2},
		{4096, 15, 9, 20, configs.AutoShare, 3, 3}, // blocks of 1,920 bytes, which are not aligned
	} {
		w := Needs{KV: kvcache.Shape{Layers: 1, KVHeads: 1, HeadDim: c.headDim, DType: kernels.F32}.EnsureDefaults()}
		w.Plan.Layout.Size, w.Plan.OffloadedExperts = c.expert, c.offloaded
		fit := KVFit{Blocks: c.blocks, MaxModelLen: 160}
		if n, each := w.Extents(fit, configs.KV{ExpertsShare: c.share}), w.ExtentBlocks(); n != c.extents || each != c.blocksEach {
			t.Errorf("%+v: %d extents of %d blocks", c, n, each)
		}
	}
}

func TestBytes(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1.00 KiB", 3 << 19: "1.50 MiB", 80 << 30: "80.00 GiB", 5 << 50: "5120.00 TiB"} {
		if got := Bytes(n); got != want {
			t.Errorf("Bytes(%d) = %q, want %q", n, got, want)
		}
	}
}
