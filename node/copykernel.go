package node

import (
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/transfer"
)

// copyKernel says where a kernel copies KV blocks: where --hardware has a calibration by which it
// is faster than the copy engines. nil: nowhere.
func (u *setup) copyKernel() (*transfer.Kernel, error) {
	name := u.settings.Plan.Hardware
	if name == "" || !u.kvTiers.Enabled() {
		return nil, nil
	}
	h, err := planning.LoadHardware(name)
	if err != nil {
		return nil, err
	}
	paths := kernelPaths(h, u.devices.Machine.Topology(), u.kvSpace(), u.kvPeers)
	if len(paths) == 0 {
		return nil, nil
	}
	return &transfer.Kernel{Copier: blockCopier{u.devices.Enqueuing()}, Space: u.kvSpace(), Paths: paths}, nil
}

// kernelPaths are the paths between a GPU and the tiers of its KV blocks on which hardware has the
// kernel copy.
func kernelPaths(h planner.Hardware, t *device.Topology, gpu device.Space, peers []device.Space) map[device.Pair]transfer.KernelPath {
	paths := map[device.Pair]transfer.KernelPath{}
	add := func(from, to device.Space, below int64, threadBlocks int) {
		if _, err := t.Path(from, to); err == nil && below > 0 {
			paths[device.Pair{From: from, To: to}] = transfer.KernelPath{Below: below, ThreadBlocks: threadBlocks}
		}
	}
	add(device.Host, gpu, h.HostLoadKernelBelow, h.HostLoadKernelBlocks)
	add(gpu, device.Host, h.HostStoreKernelBelow, h.HostStoreKernelBlocks)
	for _, p := range peers {
		add(p, gpu, h.PeerLoadKernelBelow, h.PeerLoadKernelBlocks)
		add(gpu, p, h.PeerStoreKernelBelow, h.PeerStoreKernelBlocks)
	}
	return paths
}

// blockCopier is a backend as package transfer uses it.
type blockCopier struct{ kernels.Backend }

// CopyBlocks implements transfer.BlockCopier.
func (b blockCopier) CopyBlocks(s device.Stream, x *transfer.Blocks) error {
	return b.Enqueue(s, &kernels.CopyBlocks{
		Src: kernels.New(x.Src, kernels.U64, x.N), Dst: kernels.New(x.Dst, kernels.U64, x.N), BlockBytes: x.Bytes, ThreadBlocks: x.ThreadBlocks,
	})
}
