package cpu

import (
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// copyPart is the number of bytes from which on a block is copied by several goroutines.
const copyPart = 256 << 10

func (b *Backend) copyBlocks(o *kernels.CopyBlocks, access device.Access) error {
	src, dst, bytes := vector[uint64](&o.Src), vector[uint64](&o.Dst), int(o.BlockBytes)
	reads, writes := merger{declare: access.Read}, merger{declare: access.Write}
	for i := range src {
		for _, side := range [...]struct {
			name string
			addr uint64
		}{{"Src", src[i]}, {"Dst", dst[i]}} {
			if side.addr%16 != 0 {
				return errValue(o.Name(), side.name, i, int64(side.addr), "a multiple of 16")
			}
		}
		if src[i] != 0 && dst[i] != 0 {
			reads.add(device.Addr(src[i]), bytes)
			writes.add(device.Addr(dst[i]), bytes)
		}
	}
	reads.flush()
	writes.flush()
	each := min(bytes, copyPart)
	parts := (bytes + each - 1) / each
	b.rows(len(src)*parts, each/16, func(from, to int) {
		for n := from; n < to; n++ {
			i, off := n/parts, n%parts*each
			if src[i] == 0 || dst[i] == 0 {
				continue
			}
			size := min(each, bytes-off)
			copy(at[byte](device.Addr(dst[i])+device.Addr(off), size), at[byte](device.Addr(src[i])+device.Addr(off), size))
		}
	})
	return nil
}

func (b *Backend) copy(o *kernels.Copy, _ device.Access) error {
	copy(at[byte](o.Dst.Addr, int(o.Dst.Bytes())), at[byte](o.Src.Addr, int(o.Src.Bytes())))
	return nil
}
