package kv_test

import (
	"bytes"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/kv"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// ops records the operations that are enqueued.
type ops struct {
	kv.Enqueuer
	all []kernels.CopyBlocks
}

func (o *ops) Enqueue(s device.Stream, op kernels.Op) error {
	o.all = append(o.all, *op.(*kernels.CopyBlocks))
	return o.Enqueuer.Enqueue(s, op)
}

// backend is that of the CPU.
func backend(t *testing.T) *ops {
	t.Helper()
	b := cpu.New(cpu.Options{})
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return &ops{Enqueuer: b}
}

// Copies by DMA have the rates of the links, one direction as the other, and both at once the
// sum.
func TestCopies(t *testing.T) {
	m := machine(t, emulated.Options{NoData: true, GPUs: make([]emulated.GPU, 2)})
	o := kv.CopyOptions{Machine: m, Compute: device.HBM(0), Peer: device.HBM(1), Methods: []kv.Method{kv.DMA}, Repetitions: 2, Blocks: 100, MaxBytes: 64 << 20}
	var done, total int64
	o.Progress = func(d, all int64) { done, total = d, all }
	points, err := kv.Copies(t.Context(), o)
	if err != nil || done != total || total == 0 {
		t.Fatalf("%v, %d of %d bytes", err, done, total)
	}
	if want := 2 * 3 * len(kv.DefaultBlockSizes()); len(points) != want {
		t.Errorf("%d points, want %d", len(points), want)
	}
	for s, want := range o.Needs() {
		if u, err := m.Usage(s); err != nil || u.Peak != want {
			t.Errorf("%s: peak of %d bytes, %v; %d announced", s, u.Peak, err, want)
		}
	}
	for i, p := range points {
		ways, linkRate, latency := int64(1), hostRate, hostLatency
		if p.Direction == kv.BothDirections {
			ways = 2
		}
		if p.Tier == "peer" {
			linkRate, latency = peerRate, peerLatency
		}
		blocks := int(min(100, 64<<20/p.BlockBytes))
		want := raw(blocks, float64(p.BlockBytes), linkRate, latency)
		if p.Blocks != blocks || p.Bytes != ways*int64(blocks)*p.BlockBytes || math.Abs(p.Seconds/want-1) > 1e-3 || math.Abs(p.BytesPerSecond*p.Seconds/float64(p.Bytes)-1) > 1e-9 {
			t.Errorf("%+v, want %d blocks in %.4g s", p, blocks, want)
		}
		if i > 0 && points[i-1].Direction == p.Direction && (points[i-1].BlockBytes >= p.BlockBytes || points[i-1].BytesPerSecond >= p.BytesPerSecond) {
			t.Errorf("not faster with larger blocks: %+v, %+v", points[i-1], p)
		}
	}
}

// Both methods copy the same blocks; the checker of conflicting accesses finds none, and that
// each operation stays in its pool.
func TestCopiesByBothMethods(t *testing.T) {
	m := machine(t, emulated.Options{Check: true, GPUs: make([]emulated.GPU, 2)})
	b := backend(t)
	sizes := []int64{64, 4096}
	points, err := kv.Copies(t.Context(), kv.CopyOptions{
		Machine: m, Backend: b, Compute: device.HBM(0), Peer: device.HBM(1), Sizes: sizes, Blocks: 8, MaxBytes: 4 * 4096, Repetitions: 1, ThreadBlocks: 5,
	})
	if err != nil || len(points) != 2*3*2*len(sizes) {
		t.Fatalf("%d points, %v", len(points), err)
	}
	methods := map[kv.Method]int{}
	for _, p := range points {
		methods[p.Method]++
		if want := map[int64]int{64: 8, 4096: 4}[p.BlockBytes]; p.Blocks != want {
			t.Errorf("%+v", p)
		}
	}
	if methods[kv.DMA] != methods[kv.Kernel] {
		t.Errorf("%v", methods)
	}
	// A launch for each point and repetition, one of which does not count, also where both
	// directions are copied.
	if want := 2 * methods[kv.Kernel]; len(b.all) != want {
		t.Errorf("%d kernels, want %d", len(b.all), want)
	}
	for i, op := range b.all {
		blocks := map[int64]int{64: 8, 4096: 4}[op.BlockBytes]
		if i/(2*len(sizes))%3 == 2 {
			blocks *= 2
		}
		if op.ThreadBlocks != 5 || blocks == 0 || op.Src.Shape[0] != blocks || op.Dst.Shape[0] != blocks {
			t.Errorf("kernel %d: %+v, want %d blocks", i, op, blocks)
		}
	}
}

// Batches copy the blocks that single copies do, with the latency of one; devices without them say so.
func TestCopiesByBatch(t *testing.T) {
	m := machine(t, emulated.Options{NoData: true, GPUs: make([]emulated.GPU, 2)})
	o := kv.CopyOptions{Machine: m, Compute: device.HBM(0), Peer: device.HBM(1), Methods: []kv.Method{kv.DMA, kv.Batch}, Sizes: []int64{4096}, Repetitions: 1, Blocks: 7}
	points, err := kv.Copies(t.Context(), o)
	if err != nil || len(points) != 2*3*2 {
		t.Fatalf("%d points, %v", len(points), err)
	}
	for i := 0; i < len(points); i += 2 {
		dma, batch := points[i], points[i+1]
		latency := hostLatency
		if dma.Tier == "peer" {
			latency = peerLatency
		}
		if dma.Method != kv.DMA || batch.Method != kv.Batch || dma.Bytes != batch.Bytes || math.Abs(dma.Seconds-batch.Seconds-6*latency.Seconds()) > 1e-8 {
			t.Errorf("%+v, %+v", dma, batch)
		}
	}
	o.Machine = machine(t, emulated.Options{NoData: true, GPUs: make([]emulated.GPU, 2), NoBatches: true})
	if _, err := kv.Copies(t.Context(), o); err == nil || !strings.Contains(err.Error(), "no batched copies") {
		t.Error(err)
	}
}

func TestCopiesInterrupted(t *testing.T) {
	m := machine(t, emulated.Options{NoData: true, GPUs: make([]emulated.GPU, 1)})
	ctx, cancel := context.WithCancel(t.Context())
	n := 0
	points, err := kv.Copies(ctx, kv.CopyOptions{
		Machine: m, Compute: device.HBM(0), Methods: []kv.Method{kv.DMA}, Sizes: []int64{16, 32}, Repetitions: 1,
		Progress: func(int64, int64) {
			if n++; n == 3 {
				cancel()
			}
		},
	})
	if !errors.Is(err, context.Canceled) || len(points) != 3 {
		t.Errorf("%d points, %v", len(points), err)
	}
}

func TestCopiesRefuse(t *testing.T) {
	m := machine(t, emulated.Options{NoData: true, GPUs: make([]emulated.GPU, 1)})
	good := kv.CopyOptions{Machine: m, Compute: device.HBM(0), Methods: []kv.Method{kv.DMA}}
	for name, spoil := range map[string]func(*kv.CopyOptions){
		"no machine":     func(o *kv.CopyOptions) { o.Machine = nil },
		"no backend":     func(o *kv.CopyOptions) { o.Methods = []kv.Method{kv.Kernel} },
		"a method":       func(o *kv.CopyOptions) { o.Methods = []kv.Method{"mail"} },
		"half a word":    func(o *kv.CopyOptions) { o.Sizes = []int64{8} },
		"words and more": func(o *kv.CopyOptions) { o.Sizes = []int64{24} },
		"no room":        func(o *kv.CopyOptions) { o.MaxBytes = 1 << 20 },
		"no blocks":      func(o *kv.CopyOptions) { o.Blocks = -1 },
	} {
		o := good
		spoil(&o)
		if _, err := kv.Copies(t.Context(), o); err == nil {
			t.Errorf("%s: measured", name)
		}
	}
}

// compared are points of two methods with rates by size.
func compared(tier string, d kv.Direction, dma, kernel map[int64]float64) []kv.CopyPoint {
	var points []kv.CopyPoint
	for _, size := range []int64{4096, 8192, 16384} {
		points = append(
			points,
			kv.CopyPoint{Tier: tier, Direction: d, Method: kv.DMA, BlockBytes: size, BytesPerSecond: dma[size]},
			kv.CopyPoint{Tier: tier, Direction: d, Method: kv.Kernel, BlockBytes: size, BytesPerSecond: kernel[size]},
		)
	}
	return points
}

func TestCrossovers(t *testing.T) {
	dma := map[int64]float64{4096: 10, 8192: 20, 16384: 30}
	for name, c := range map[string]struct {
		kernel map[int64]float64
		want   int64
		words  string
	}{
		"small blocks": {map[int64]float64{4096: 25, 8192: 20, 16384: 25}, 8192, "the kernel pays below 8 KiB"},
		"never":        {map[int64]float64{4096: 5, 8192: 5, 16384: 5}, 0, "the kernel pays at no size"},
		"too little":   {map[int64]float64{4096: 14, 8192: 28, 16384: 43}, 0, "the kernel pays at no size"},
		"always":       {map[int64]float64{4096: 50, 8192: 50, 16384: 50}, 16385, "the kernel pays up to the largest size"},
		"middle":       {map[int64]float64{4096: 5, 8192: 50, 16384: 5}, 16384, "the kernel pays below 16 KiB"},
	} {
		points := compared("host", kv.LoadDirection, dma, c.kernel)
		got := kv.Crossovers(points)
		if len(got) != 1 || got[0] != (kv.Crossover{Tier: "host", Direction: kv.LoadDirection, KernelBelowBytes: c.want}) {
			t.Errorf("%s: %+v, want %d", name, got, c.want)
		}
		var table bytes.Buffer
		if err := kv.WriteTable(&table, &kv.Result{Sizes: &kv.Sizes{Copies: points, Crossovers: got}}); err != nil || !strings.Contains(table.String(), c.words) {
			t.Errorf("%s: %v, no %q in\n%s", name, err, c.words, &table)
		}
	}
	// The faster of the copy engines' methods counts.
	points := compared("host", kv.LoadDirection, dma, map[int64]float64{4096: 25, 8192: 30, 16384: 45})
	points = append(points, kv.CopyPoint{Tier: "host", Direction: kv.LoadDirection, Method: kv.Batch, BlockBytes: 16384, BytesPerSecond: 50})
	if got := kv.Crossovers(points); len(got) != 1 || got[0].KernelBelowBytes != 16384 {
		t.Errorf("with batches of the largest blocks: %+v", got)
	}
	alone := slices.DeleteFunc(compared("host", kv.LoadDirection, dma, dma), func(p kv.CopyPoint) bool { return p.Method == kv.Kernel })
	if got := kv.Crossovers(alone); len(got) != 0 {
		t.Errorf("of one method: %+v", got)
	}
}

func TestCalibrate(t *testing.T) {
	base, err := planner.HardwarePreset("h200")
	if err != nil {
		t.Fatal(err)
	}
	dma, kernel := map[int64]float64{4096: 10, 8192: 20, 16384: 30}, map[int64]float64{4096: 25, 8192: 20, 16384: 25}
	points := slices.Concat(compared("host", kv.LoadDirection, dma, kernel), compared("host", kv.StoreDirection, dma, dma), compared("host", kv.BothDirections, dma, kernel), compared("peer", kv.LoadDirection, kernel, map[int64]float64{4096: 10, 8192: 20, 16384: 40}))
	r := &kv.Result{Machine: eval.Machine{Device: "NVIDIA H200"}, Sizes: &kv.Sizes{Copies: points, Crossovers: kv.Crossovers(points), ThreadBlocks: 32}}
	h, err := kv.Calibrate(r, eval.Calibration{Base: base, Date: "2026-11-22", Version: "v1"})
	if err != nil {
		t.Fatal(err)
	}
	if h.HostLoadKernelBelow != 8192 || h.HostStoreKernelBelow != 0 || h.PeerLoadKernelBelow != 16385 || h.PeerStoreKernelBelow != 0 || h.PeerToGPU != base.PeerToGPU || h.Name != "NVIDIA H200, 2026-11-22, moeserve v1" {
		t.Errorf("%+v", h)
	}
	for key, want := range map[string]string{
		"host_load_kernel_below_bytes": "measured by bench kv: rates of scattered blocks, kernel on 32 thread blocks",
		"peer_load_kernel_below_bytes": "measured by bench kv", "peer_store_kernel_below_bytes": "none: bench kv had no peer",
		"gpu_flop_per_s": "from h200 (not measured here)",
	} {
		if !strings.HasPrefix(h.Sources[key], want) {
			t.Errorf("the source of %s is %q, want %q", key, h.Sources[key], want)
		}
	}
	// A later calibration of other figures keeps what this one has measured.
	next := eval.Calibration{Base: h, Date: "2026-11-23"}
	if got := next.Start(&r.Machine); got.Sources["host_load_kernel_below_bytes"] != h.Sources["host_load_kernel_below_bytes"] || got.HostLoadKernelBelow != 8192 || !strings.HasPrefix(got.Sources["gpu_flop_per_s"], "from NVIDIA H200, 2026-11-22") {
		t.Errorf("%+v", got)
	}
	if got := next.Start(&eval.Machine{Device: "NVIDIA A100"}); !strings.Contains(got.Sources["host_load_kernel_below_bytes"], "not measured here") {
		t.Errorf("%+v", got)
	}
	// Calibrations with other thread blocks add up: the larger size counts, of equal ones that
	// with fewer thread blocks; the same thread blocks are measured again.
	for i, c := range []struct {
		blocks                int
		kernel                float64 // rate at 8 KiB, where DMA has 20
		wantBelow, wantBlocks int64
	}{{32, 10, 8192, 32}, {64, 10, 8192, 32}, {16, 10, 8192, 16}, {0, 10, 8192, 16}, {64, 30, 16384, 64}, {16, 10, 16384, 64}, {64, 10, 8192, 64}} {
		points := compared("host", kv.LoadDirection, dma, map[int64]float64{4096: 25, 8192: c.kernel, 16384: 25})
		x := &kv.Result{Machine: r.Machine, Sizes: &kv.Sizes{Copies: points, Crossovers: kv.Crossovers(points), ThreadBlocks: c.blocks}}
		if next.Base, err = kv.Calibrate(x, next); err != nil {
			t.Fatal(err)
		}
		if b := next.Base; b.HostLoadKernelBelow != c.wantBelow || int64(b.HostLoadKernelBlocks) != c.wantBlocks || b.PeerLoadKernelBelow != 16385 || b.PeerLoadKernelBlocks != 32 ||
			!strings.HasSuffix(b.Sources["host_load_kernel_thread_blocks"], fmt.Sprintf("on %d thread blocks", c.wantBlocks)) {
			t.Errorf("calibration %d: %+v", i, b)
		}
	}
	for name, bad := range map[string]*kv.Result{
		"loads":      {Machine: r.Machine, Loads: &kv.Loads{}},
		"one method": {Machine: r.Machine, Sizes: &kv.Sizes{}},
		"emulated":   {Machine: eval.Machine{Emulated: true}, Sizes: r.Sizes},
	} {
		if _, err := kv.Calibrate(bad, eval.Calibration{Base: base}); err == nil {
			t.Errorf("%s: calibrated", name)
		}
	}
}

func TestCopiesOutput(t *testing.T) {
	racedetector.SkipSequential(t)
	m := machine(t, emulated.Options{NoData: true, GPUs: make([]emulated.GPU, 2)})
	points, err := kv.Copies(t.Context(), kv.CopyOptions{Machine: m, Backend: backend(t), Compute: device.HBM(0), Peer: device.HBM(1), Repetitions: 1, Blocks: 10})
	if err != nil {
		t.Fatal(err)
	}
	r := &kv.Result{
		Machine: eval.Machine{Device: "emulated", Emulated: true, Emulation: &eval.Emulation{Rates: eval.RatesVirtual}},
		Sizes:   &kv.Sizes{Copies: points},
	}
	var table, list, svg, png bytes.Buffer
	if err := errors.Join(kv.WriteTable(&table, r), kv.WriteCSV(&list, r), kv.Plot(&svg, "svg", r), kv.Plot(&png, "png", r)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"loads from host memory", "stores to peer memory", "loads from and stores to host memory at once", "dma ms", "kernel ms", "16 MiB", "do not compare with DMA"} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("no %q in\n%s", want, &table)
		}
	}
	if lines, err := csv.NewReader(&list).ReadAll(); err != nil || len(lines) != 1+len(points) {
		t.Errorf("%v, %d lines", err, len(lines))
	}
	if strings.Count(svg.String(), "copy kernel") != 1 || !strings.Contains(svg.String(), "stores to peer memory") || png.Len() == 0 {
		t.Errorf("%s", &svg)
	}
}
