package cuda

import (
	"fmt"

	"github.com/moeserve/moeserve/kernels"
)

const (
	sampleThreads = 512
	// minSegment is the minimum number of tokens of a row that one block samples from.
	minSegment = 4096
	// rowBlock is the block size of the kernels that select among a row's tokens.
	rowBlock = 1024
	// maxTop is the maximum number of tokens of a row that can be sorted.
	maxTop = 2048
	// adjustThreads is the block size of adjust and restore, with one thread per entry.
	adjustThreads = 256
	// maskThreads is the block size of mask_logits.
	maskThreads = 256
)

func (l *streamState) sample(o *kernels.Sample) error {
	rows, vocabulary := o.Logits.Shape[0], o.Logits.Shape[1]
	if rows == 0 {
		return nil
	}
	a := sampleArgs{
		logits: address(&o.Logits), temperatures: address(&o.Temperature), seeds: address(&o.Seeds), samples: address(&o.Samples),
		positions: address(&o.Positions), out: address(&o.Out), work: uint64(l.work.Addr),
		topK: address(&o.TopK), topP: address(&o.TopP), minP: address(&o.MinP),
		stride: int64(o.Logits.Stride[0]), vocabulary: int32(vocabulary), aligned: b2i(aligned(&o.Logits)),
	}
	if !o.TopK.None() || !o.TopP.None() || !o.MinP.None() {
		return launch(l, o.Name(), sampleCut, grid{x: rows, threads: rowBlock}, &a)
	}
	segments := max(min(2*l.b.multiprocessors/rows, ceil(vocabulary, minSegment)), 1)
	segment := ceil(ceil(vocabulary, segments), 4) * 4
	segments = ceil(vocabulary, segment)
	if int64(rows)*int64(segments)*8 > l.work.Bytes {
		segments, segment = 1, ceil(vocabulary, 4)*4
	}
	a.segments, a.segment = int32(segments), int32(segment)
	if err := launch(l, o.Name(), sampleKernel, grid{x: rows, y: segments, threads: sampleThreads}, &a); err != nil || segments == 1 {
		return err
	}
	return launch(l, o.Name(), sampleMerge, grid{x: rows, threads: 32}, &a)
}

func (l *streamState) logProbs(o *kernels.LogProbs) error {
	a := logProbsArgs{
		logits: address(&o.Logits), tokens: address(&o.Tokens), sampled: address(&o.Sampled), topIDs: address(&o.TopIDs), top: address(&o.Top), ranks: address(&o.Ranks),
		stride: int64(o.Logits.Stride[0]), vocabulary: int32(o.Logits.Shape[1]), aligned: b2i(aligned(&o.Logits)),
	}
	if !o.TopIDs.None() {
		n := o.TopIDs.Shape[1]
		if n > maxTop {
			return fmt.Errorf("cuda: %s: TopIDs is %v, want at most %d columns", o.Name(), o.TopIDs, maxTop)
		}
		a.n = int32(n)
	}
	return launch(l, o.Name(), logProbsKernel, grid{x: o.Logits.Shape[0], threads: rowBlock}, &a)
}

// entryGrid completes args for the lists of entries, of which a row may have any number, and
// returns the grid.
func (b *Backend) entryGrid(a *adjustArgs, logits, starts, ids, saved *kernels.Tensor) grid {
	rows, entries := logits.Shape[0], ids.Shape[0]
	if rows == 0 || entries == 0 {
		return grid{}
	}
	parts := min(ceil(entries, adjustThreads), ceil(2*b.multiprocessors, rows))
	a.logits, a.starts, a.ids, a.saved = address(logits), address(starts), address(ids), address(saved)
	a.stride, a.vocabulary, a.entries, a.parts = int64(logits.Stride[0]), int32(logits.Shape[1]), int32(entries), int32(parts)
	return grid{x: rows, y: parts, threads: adjustThreads}
}

func (l *streamState) adjust(o *kernels.Adjust) error {
	a := adjustArgs{
		seen: address(&o.Seen), bias: address(&o.Bias),
		repetition: address(&o.Repetition), presence: address(&o.Presence), frequency: address(&o.Frequency),
	}
	g := l.b.entryGrid(&a, &o.Logits, &o.Starts, &o.IDs, &o.Saved)
	return launch(l, o.Name(), adjustKernel, g, &a)
}

func (l *streamState) mask(o *kernels.Mask) error {
	rows, vocabulary := o.Rows.Shape[0], o.Logits.Shape[1]
	if rows == 0 {
		return nil
	}
	// Each thread has four tokens at a time; two blocks per multiprocessor keep all stores in flight.
	parts := min(ceil(vocabulary, 4*maskThreads), ceil(2*l.b.multiprocessors, rows))
	a := maskArgs{
		logits: address(&o.Logits), rows: address(&o.Rows), allowed: address(&o.Allowed),
		stride: int64(o.Logits.Stride[0]), words: int64(o.Allowed.Shape[1]),
		count: int32(o.Logits.Shape[0]), vocabulary: int32(vocabulary), parts: int32(parts), aligned: b2i(aligned(&o.Logits)),
	}
	return launch(l, o.Name(), maskKernel, grid{x: rows, y: parts, threads: maskThreads}, &a)
}

func (l *streamState) restore(o *kernels.Restore) error {
	var a adjustArgs
	g := l.b.entryGrid(&a, &o.Logits, &o.Starts, &o.IDs, &o.Saved)
	return launch(l, o.Name(), restoreKernel, g, &a)
}
