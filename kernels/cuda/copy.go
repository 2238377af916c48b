package cuda

import (
	"github.com/moeserve/moeserve/kernels"
)

const (
	// copyThreads is the block size of copy_blocks.
	copyThreads = 512
	// copyWords is the number of 16-byte words that a thread of copy_blocks loads before it
	// stores the first.
	copyWords = 8
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
