package cuda

import (
	"fmt"

	"github.com/moeserve/moeserve/kernels"
)

const (
	// copyThreads is the block size of copy_blocks.
	copyThreads = 512
	// copyWords is the number of 16-byte words that a thread of copy_blocks loads before it
	// stores the first.
	copyWords = 8
	// copySmallThreads is the block size of copy_small, and copySmallBlocks the maximum number of blocks:
	// 128 KiB in flight, more than a link to the host delivers within its latency.
	copySmallThreads = 256
	copySmallBlocks  = 32
	// addRowsThreads is the block size of add_rows.
	addRowsThreads = 128
)

func (l *streamState) copyBlocks(o *kernels.CopyBlocks) error {
	count, words := o.Src.Shape[0], o.BlockBytes/16
	blocks := o.ThreadBlocks
	if blocks == 0 {
		blocks = l.b.multiprocessors
	}
	enough := (int64(count)*words + copyThreads*copyWords - 1) / (copyThreads * copyWords)
	return launch(l, o.Name(), copyBlocksKernel, grid{x: int(min(int64(blocks), enough)), threads: copyThreads}, &copyBlocksArgs{
		src: address(&o.Src), dst: address(&o.Dst), count: int32(count), words: int32(words),
	})
}

func (l *streamState) addRows(o *kernels.AddRows) error {
	if o.DType != l.b.o.Activation {
		return fmt.Errorf("cuda: %s: DType is %v, want %v, the activation type", o.Name(), o.DType, l.b.o.Activation)
	}
	return launch(l, o.Name(), addRowsKernel, grid{x: o.Src.Shape[0], y: ceil(o.Columns, 8*addRowsThreads), threads: addRowsThreads}, &addRowsArgs{
		src: address(&o.Src), dst: address(&o.Dst), columns: int32(o.Columns),
	})
}

func (l *streamState) copy(o *kernels.Copy) error {
	first, blocks := copiedPart(&o.Src, &o.Dst)
	second, more := copiedPart(&o.Src2, &o.Dst2)
	return launch(l, o.Name(), copySmallKernel, grid{x: blocks + more, threads: copySmallThreads, noOverlap: true}, &copyArgs{
		first: first, second: second, blocks: int32(blocks),
	})
}

// copiedPart returns the arguments of a copy, and its number of blocks.
func copiedPart(src, dst *kernels.Tensor) (copyPartArgs, int) {
	bytes, chunks := int(src.Bytes()), 0
	if (src.Addr|dst.Addr)%16 == 0 {
		chunks = bytes / 16
	}
	words := bytes / 4
	return copyPartArgs{src: address(src), dst: address(dst), chunks: int32(chunks), words: int32(words)},
		min(ceil(max(chunks, words-4*chunks), copySmallThreads), copySmallBlocks)
}
