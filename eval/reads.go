package eval

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/transfer"
)

// Reads are the rates at which a kernel on all multiprocessors reads other memory in place, in
// bytes per second; 0: kernels cannot read it, or there is none.
type Reads struct {
	Host, Peer float64
}

// readBlock is a part of an extent that a launch copies as one block.
const readBlock = 64 << 10

// MeasureReads measures kernels that read host memory, and that of the peer if there is one,
// each alone: the median of the repetitions, with extents of the largest size. What is read is
// written to the GPU's own memory, which is much faster.
func MeasureReads(ctx context.Context, o TransferOptions, c transfer.BlockCopier) (r Reads, err error) {
	o = o.EnsureDefaults()
	fail := func(err error) (Reads, error) {
		return Reads{}, fmt.Errorf("eval: measure kernels that read memory in place: %w", err)
	}
	size := slices.Max(o.Sizes) / readBlock * readBlock
	if size == 0 {
		return fail(fmt.Errorf("extents of %d bytes; at least %d are needed", slices.Max(o.Sizes), readBlock))
	}
	for _, from := range []struct {
		space device.Space
		to    *float64
	}{{device.Host, &r.Host}, {o.Peer, &r.Peer}} {
		if from.to == &r.Peer && o.Peer == device.Host {
			continue
		}
		*from.to, err = readRate(ctx, &o, c, from.space, size)
		if err != nil && !errors.Is(err, device.ErrUnreachable) {
			return fail(err)
		}
	}
	return r, nil
}

// readRate is the rate from one memory.
func readRate(ctx context.Context, o *TransferOptions, c transfer.BlockCopier, from device.Space, size int64) (_ float64, err error) {
	var owned []func() error
	defer func() {
		for _, f := range slices.Backward(owned) {
			err = errors.Join(err, f())
		}
	}()
	memory := func(space device.Space, bytes int64) (device.Memory, error) {
		m, err := o.Machine.Alloc(space, bytes, "reads by a kernel, measured")
		if err == nil {
			owned = append(owned, m.Free)
		}
		return m, err
	}
	blocks := size / readBlock
	var src, dst, table, image device.Memory
	for _, x := range []struct {
		to    *device.Memory
		space device.Space
		bytes int64
	}{{&src, from, size}, {&dst, o.Compute, size}, {&table, o.Compute, 16 * blocks}, {&image, device.Host, 16 * blocks}} {
		if *x.to, err = memory(x.space, x.bytes); err != nil {
			return 0, err
		}
	}
	at, err := o.Machine.KernelAddr(o.Compute, src.Range(0, size))
	if err != nil {
		return 0, err
	}
	lane, err := OpenLane(o.Machine, o.Compute, "reads by a kernel")
	if err != nil {
		return 0, err
	}
	owned = append(owned, lane.Close)
	addresses := image.Write(0, image.Bytes())
	for i := range blocks {
		binary.NativeEndian.PutUint64(addresses[8*i:], uint64(at)+uint64(i*readBlock))
		binary.NativeEndian.PutUint64(addresses[8*(blocks+i):], uint64(dst.Range(i*readBlock, readBlock).Addr))
	}
	if err := lane.Stream.Copy(table.Range(0, table.Bytes()), image.Range(0, image.Bytes())); err != nil {
		return 0, err
	}
	zeros := src
	if from != device.Host {
		if zeros, err = memory(device.Host, size); err != nil {
			return 0, err
		}
	}
	clear(zeros.Write(0, size))
	if zeros != src {
		if err := lane.Stream.Copy(src.Range(0, size), zeros.Range(0, size)); err != nil {
			return 0, err
		}
	}
	if err := lane.Stream.Synchronize(ctx); err != nil {
		return 0, err
	}
	launch := transfer.Blocks{
		Src: table.Range(0, 8*blocks).Addr, Dst: table.Range(8*blocks, 8*blocks).Addr, N: int(blocks), Bytes: readBlock,
	}
	var seconds []float64
	for i := range o.Repetitions + 1 {
		if err := Enqueue([]*Lane{lane}, 1, func(int, int) error { return c.CopyBlocks(lane.Stream, &launch) }); err != nil {
			return 0, err
		}
		took, err := Span(ctx, []*Lane{lane})
		if err != nil {
			return 0, err
		}
		if i > 0 { // the first is slower
			seconds = append(seconds, took.Seconds())
		}
	}
	median := Median(seconds)
	if median <= 0 {
		return 0, nil // the devices take no time
	}
	return float64(size) / median, nil
}
