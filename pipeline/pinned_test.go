package pipeline

import (
	"sync/atomic"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device/emulated"
)

// TestSmallCopiesByKernels: where a copy fails only with its device, kernels copy what a step reads
// from pinned memory and writes there, with the same results; elsewhere its copy engines do.
func TestSmallCopiesByKernels(t *testing.T) {
	for _, o := range []Options{
		{SmallBatchTokens: -1},
		{SmallBatchTokens: 64},
		{SmallBatchTokens: 64, CPUExperts: host, CPUShare: cpuShare(0.5)},
		{SmallBatchTokens: -1, Grouping: configs.PerMicroBatch, MicroBatches: 2},
		{SmallBatchTokens: -1, HostAttention: host},
		{ExpertAccess: configs.DirectAccess, Graphs: 16},
		{ExpertAccess: configs.DirectAccess, MicroBatches: 2},
	} {
		var want history
		for _, byKernel := range []bool{false, true} {
			var copies, launches atomic.Int64
			mo := emulated.Options{Virtual: true, Check: true, CopyErrorsLoseDevice: byKernel, Trace: func(e emulated.Trace) {
				switch {
				case e.Stream != "compute":
				case e.Op == "copy":
					copies.Add(1)
				case e.Op == "launch" && e.Name == "copy":
					launches.Add(1)
				}
			}}
			got := newRig(t, "mixtral", 0.5, mo, o).run()
			if byKernel {
				if d := got.differs(want); d != "" {
					t.Errorf("%+v: %s", o, d)
				}
			} else {
				want = got
			}
			if (copies.Load() == 0) != byKernel || (launches.Load() > 0) != byKernel {
				t.Errorf("SmallBatchTokens %d, %v, %v: %d copies and %d kernels that copy", o.SmallBatchTokens, o.Grouping, byKernel, copies.Load(), launches.Load())
			}
		}
	}
}
