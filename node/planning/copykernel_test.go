package planning_test

import (
	"maps"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/transfer"
)

// The kernel copies on the paths that were calibrated, and there are.
func TestCopyKernel(t *testing.T) {
	m, err := emulated.New(emulated.Options{GPUs: make([]emulated.GPU, 3)})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	gpu, peer := device.HBM(0), device.HBM(2)
	h := planner.Hardware{HostLoadKernelBelow: 1, HostLoadKernelBlocks: 4, PeerStoreKernelBelow: 2, PeerStoreKernelBlocks: 64, PeerLoadKernelBlocks: 9}
	for _, c := range []struct {
		h     planner.Hardware
		peers []device.Space
		want  map[device.Pair]transfer.KernelPath
	}{
		{planner.Hardware{}, []device.Space{peer}, nil},
		{h, nil, map[device.Pair]transfer.KernelPath{{From: device.Host, To: gpu}: {Below: 1, ThreadBlocks: 4}}},
		{h, []device.Space{peer, device.HBM(7)}, map[device.Pair]transfer.KernelPath{
			{From: device.Host, To: gpu}: {Below: 1, ThreadBlocks: 4}, {From: gpu, To: peer}: {Below: 2, ThreadBlocks: 64},
		}},
	} {
		k := planning.CopyKernel(c.h, m.Topology(), nil, gpu, c.peers)
		if (k == nil) != (c.want == nil) || k != nil && (!maps.Equal(k.Paths, c.want) || k.Space != gpu) {
			t.Errorf("%+v, peers %v: %+v, want %v", c.h, c.peers, k, c.want)
		}
	}
}
