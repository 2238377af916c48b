package planning

import (
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/transfer"
)

// CopyKernel says where a kernel copies KV blocks between the GPU that computes, the host and
// peers: where the hardware has a calibration by which it is faster than the copy engines. nil:
// nowhere. The backend is the GPU's.
func CopyKernel(h planner.Hardware, t *device.Topology, b kernels.Backend, gpu device.Space, peers []device.Space) *transfer.Kernel {
	k := &transfer.Kernel{Copier: blockCopier{b}, Space: gpu, Paths: map[device.Pair]transfer.KernelPath{}}
	add := func(from, to device.Space, below int64, threadBlocks int) {
		if _, err := t.Path(from, to); err == nil && below > 0 {
			k.Paths[device.Pair{From: from, To: to}] = transfer.KernelPath{Below: below, ThreadBlocks: threadBlocks}
		}
	}
	add(device.Host, gpu, h.HostLoadKernelBelow, h.HostLoadKernelBlocks)
	add(gpu, device.Host, h.HostStoreKernelBelow, h.HostStoreKernelBlocks)
	for _, p := range peers {
		add(p, gpu, h.PeerLoadKernelBelow, h.PeerLoadKernelBlocks)
		add(gpu, p, h.PeerStoreKernelBelow, h.PeerStoreKernelBlocks)
	}
	if len(k.Paths) == 0 {
		return nil
	}
	return k
}

// BlockCopier is a backend that copies blocks by a kernel.
func BlockCopier(b kernels.Backend) transfer.BlockCopier { return blockCopier{b} }

// blockCopier is a backend as package transfer uses it.
type blockCopier struct{ kernels.Backend }

// CopyBlocks implements transfer.BlockCopier.
func (b blockCopier) CopyBlocks(s device.Stream, x *transfer.Blocks) error {
	return b.Enqueue(s, &kernels.CopyBlocks{
		Src: kernels.New(x.Src, kernels.U64, x.N), Dst: kernels.New(x.Dst, kernels.U64, x.N), BlockBytes: x.Bytes, ThreadBlocks: x.ThreadBlocks,
	})
}
