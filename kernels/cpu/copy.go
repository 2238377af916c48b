package cpu

import (
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// copyPart is the number of bytes from which on a block is copied by several goroutines.
const copyPart = 256 << 10

// checkAddresses checks addresses of blocks, or rows.
func checkAddresses(op string, src, dst []uint64) error {
	for i := range src {
		for _, side := range [...]struct {
			name string
			addr uint64
		}{{"Src", src[i]}, {"Dst", dst[i]}} {
			if side.addr%16 != 0 {
				return errValue(op, side.name, i, int64(side.addr), "a multiple of 16")
			}
		}
	}
	return nil
}

func (b *Backend) copyBlocks(o *kernels.CopyBlocks, access device.Access) error {
	src, dst, bytes := vector[uint64](&o.Src), vector[uint64](&o.Dst), int(o.BlockBytes)
	if err := checkAddresses(o.Name(), src, dst); err != nil {
		return err
	}
	reads, writes := merger{declare: access.Read}, merger{declare: access.Write}
	for i := range src {
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

func (b *Backend) addRows(o *kernels.AddRows, access device.Access) error {
	src, dst, bytes := vector[uint64](&o.Src), vector[uint64](&o.Dst), o.Columns*o.DType.Size()
	if err := checkAddresses(o.Name(), src, dst); err != nil {
		return err
	}
	for i := range src {
		access.Read(device.Range{Addr: device.Addr(src[i]), Bytes: int64(bytes)})
		access.Read(device.Range{Addr: device.Addr(dst[i]), Bytes: int64(bytes)})
		access.Write(device.Range{Addr: device.Addr(dst[i]), Bytes: int64(bytes)})
	}
	b.rows(len(src), o.Columns, func(from, to int) {
		scratch := b.floats(2 * o.Columns)
		defer b.release(scratch)
		sums, terms := (*scratch)[:o.Columns], (*scratch)[o.Columns:]
		for i := from; i < to; i++ {
			b.set.load(sums, device.Addr(dst[i]), o.DType)
			b.set.load(terms, device.Addr(src[i]), o.DType)
			for c, v := range terms {
				sums[c] += v
			}
			kernels.FromFloat32(at[byte](device.Addr(dst[i]), bytes), sums, o.DType)
		}
	})
	return nil
}

func (b *Backend) copy(o *kernels.Copy, _ device.Access) error {
	copy(at[byte](o.Dst.Addr, int(o.Dst.Bytes())), at[byte](o.Src.Addr, int(o.Src.Bytes())))
	copy(at[byte](o.Dst2.Addr, int(o.Dst2.Bytes())), at[byte](o.Src2.Addr, int(o.Src2.Bytes())))
	return nil
}
