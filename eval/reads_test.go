package eval

import (
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/transfer"
)

// copier is a backend that copies blocks.
type copier struct {
	kernels.Backend
	launches int
}

func (c *copier) CopyBlocks(s device.Stream, x *transfer.Blocks) error {
	c.launches++
	return c.Enqueue(s, &kernels.CopyBlocks{Src: kernels.New(x.Src, kernels.U64, x.N), Dst: kernels.New(x.Dst, kernels.U64, x.N), BlockBytes: x.Bytes, ThreadBlocks: x.ThreadBlocks})
}

// TestMeasureReads: a kernel reads host and peer memory as often as told, at the rate of its
// device, and what was measured is in the calibration; where kernels cannot read host memory the
// calibration has no rate of it.
func TestMeasureReads(t *testing.T) {
	for _, mapped := range []bool{true, false} {
		// A copy reads and writes each byte, which the emulated GPU's memory does at 2 GB/s.
		o := emulated.Options{Virtual: true, Check: true, GPUs: []emulated.GPU{{BytesPerSecond: 2e9}, {}}}
		if !mapped {
			o.NotMapped = []device.Space{device.Host}
		}
		m, err := emulated.New(o)
		if err != nil {
			t.Fatal(err)
		}
		backend := cpu.New(cpu.Options{Threads: 1})
		c := &copier{Backend: backend}
		r, err := MeasureReads(t.Context(), TransferOptions{Machine: m, Compute: device.HBM(0), Peer: device.HBM(1), Sizes: []int64{1 << 20, 1 << 16}, Repetitions: 3}, c)
		if err != nil {
			t.Fatal(err)
		}
		near := func(rate float64) bool { return rate > 0.99e9 && rate < 1.01e9 }
		want := 8
		if !mapped {
			want = 4
		}
		if near(r.Host) != mapped || !mapped && r.Host != 0 || !near(r.Peer) || c.launches != want {
			t.Errorf("host memory mapped: %t: %+v, %d launches, want %d", mapped, r, c.launches, want)
		}
		points := []TransferPoint{{HostPath, 1 << 20, 1e-3, 1e9, 1e9}, {D2HPath, 1 << 20, 1e-3, 1e9, 1e9}, {PeerPath, 1 << 20, 1e-4, 1e10, 1e10}}
		base := planner.Hardware{
			Name: "base", GPUMemory: 1, GPUMemoryRate: 1, GPUFlops: 1, GPUAttentionFlops: 1, HostMemory: 1, HostMemoryRate: 1, CPUFlops: 1, HostToGPU: []float64{1}, GPUToHost: 1,
			PeerMemory: 1, PeerToGPU: 1, HostReadRate: 7, PeerReadRate: 8,
		}
		h, err := Calibrate(&TransferResult{Points: points}, Calibration{Base: base, Date: time.DateOnly, Reads: r})
		if err != nil {
			t.Fatal(err)
		}
		if host := h.HostReadRate; mapped && host != r.Host || !mapped && host != 7 || h.PeerReadRate != r.Peer || h.Sources["peer_kernel_read_bytes_per_s"] == h.Sources["gpu_flop_per_s"] {
			t.Errorf("host memory mapped: %t: %v and %v bytes/s in the calibration, from %q", mapped, host, h.PeerReadRate, h.Sources["peer_kernel_read_bytes_per_s"])
		}
		if err := backend.Close(); err != nil {
			t.Error(err)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
}
