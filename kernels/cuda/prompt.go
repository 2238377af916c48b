package cuda

import (
	"fmt"
	"math"
	"math/bits"

	"github.com/moeserve/moeserve/kernels"
)

const (
	// promptQueries is the queries of an item of work of prompt.cu (tokens times heads that share
	// a KV head), promptTile its positions per tile, promptHead its head size.
	promptQueries, promptTile, promptHead = 128, 128, 128
	// promptSharedBytes is the shared memory of a block: four slots of keys or values, its
	// queries, and the float32 results of earlier chunks.
	promptSharedBytes = ringAlign + 4*promptTile*promptHead*2 + promptQueries*promptHead*(2+4)
	promptThreads     = 384
	// Without joins, chunks of a split context have at most promptPartTiles tiles, so that multiprocessors have equal work
	// where sequences differ in length, too.
	promptPartTiles = 16
)

// promptPart is how many tiles a chunk of split contexts of at most that many tokens has, without joins: what lets all end
// soonest, by that many sequences and KV heads together. It is the same for all contexts that a graph of kernels is launched
// with (see docs/design/pipeline.md).
func (b *Backend) promptPart(pairs, context int) int {
	const rounded, mostRounds = 256, 8
	tiles := ceil(context, rounded) * rounded / promptTile
	best, least := tiles, math.MaxInt
	for rounds := 1; rounds <= mostRounds; rounds++ {
		parts := min(max(rounds*b.multiprocessors/pairs, 1), tiles)
		each := min(ceil(tiles, parts), promptPartTiles)
		if took := ceil(pairs*ceil(tiles, each), b.multiprocessors) * (2*each + 1); took < least { // start and end take as long as half a tile
			best, least = each, took
		}
	}
	return best
}

// promptChunks is the number of chunks of a context, as prompt.cu has them with joins.
func promptChunks(context int) int {
	const small, large, from = 256, 1024, 4096
	return ceil(min(context, from), small) + ceil(max(context-from, 0), large)
}

// hasPrompt reports whether prompt.cu can compute the attention. That depends on the device, on
// shapes of heads and blocks, and on layouts, never on numbers of tokens or sequences.
func (b *Backend) hasPrompt(o *kernels.Attention) bool {
	tokens := o.CacheK.Shape[1]
	if !b.hopper || o.Q.Shape[2] != promptHead || tokens < 8 || tokens&(tokens-1) != 0 {
		return false
	}
	for _, t := range [...]*kernels.Tensor{&o.CacheK, &o.CacheV} {
		if t.Stride[1] <= 0 || t.Stride[0]%t.Stride[1] != 0 || tokenRows(t) > math.MaxInt32-promptTile {
			return false
		}
	}
	return o.Q.Addr%16 == 0 && o.Q.Stride[0]%8 == 0 && o.Q.Stride[1]%8 == 0 && pairedHeads(&o.Out)
}

// pairedHeads reports whether pairs of elements of each head are aligned.
func pairedHeads(t *kernels.Tensor) bool {
	return t.Addr%4 == 0 && t.Stride[0]%2 == 0 && t.Stride[1]%2 == 0
}

// tokenRows is the number of rows of a cache tensor that is seen as a matrix with one row per
// token, from which a block's first is Stride[0] / Stride[1] rows behind that of the block
// before.
func tokenRows(t *kernels.Tensor) int {
	return (t.Shape[0]-1)*(t.Stride[0]/t.Stride[1]) + t.Shape[1]
}

// prompt enqueues attention on Hopper's tensor cores, for sequences with at least minRows tokens
// in the step. With Options.BatchInvariant the results do not depend on whether long sequences with
// few tokens are split.
func (l *streamState) prompt(o *kernels.Attention, minRows int) error {
	sequences, heads, kvHeads, tokens := o.ContextLens.Shape[0], o.Q.Shape[1], o.CacheK.Shape[2], o.CacheK.Shape[1]
	group := heads / kvHeads
	a := promptArgs{
		q: address(&o.Q), values: address(&o.CacheV), starts: address(&o.SeqStarts), lens: address(&o.ContextLens), table: address(&o.BlockTable), out: address(&o.Out),
		qRow: int64(o.Q.Stride[0]), qHead: int64(o.Q.Stride[1]), kHead: int64(o.CacheK.Stride[2]),
		vBlock: int64(o.CacheV.Stride[0]), vToken: int64(o.CacheV.Stride[1]), vHead: int64(o.CacheV.Stride[2]),
		tableRow: int64(o.BlockTable.Stride[0]), outRow: int64(o.Out.Stride[0]), outHead: int64(o.Out.Stride[1]),
		kBlockRows: int32(o.CacheK.Stride[0] / o.CacheK.Stride[1]), vBlockRows: int32(o.CacheV.Stride[0] / o.CacheV.Stride[1]),
		kRows: int32(tokenRows(&o.CacheK)), vRows: int32(tokenRows(&o.CacheV)),
		sequences: int32(sequences), heads: int32(heads), group: int32(group),
		shift: int32(bits.TrailingZeros(uint(tokens))), blocks: int32(o.CacheK.Shape[0]), box: int32(min(tokens, promptTile)),
		window: int32(min(o.Window, math.MaxInt32)), minRows: int32(minRows), maxRows: math.MaxInt32, joins: b2i(l.b.o.BatchInvariant), scale: float32(float64(o.Scale) * math.Log2E),
	}
	for i, t := range [...]*kernels.Tensor{&o.CacheK, &o.CacheV} {
		l.tiles = tileMap{t.Addr, tokenRows(t), (kvHeads-1)*t.Stride[2] + promptHead, t.Stride[1], int(a.box)}
		if err := l.b.run.mapTiles(&l.maps[i], &l.tiles); err != nil {
			return fmt.Errorf("cuda: %s: %w", o.Name(), err)
		}
	}
	a.k, a.v = l.maps[0], l.maps[1]

	g := grid{threads: promptThreads, shared: promptSharedBytes}
	perTile := promptQueries / group
	chunks, part := promptChunks(o.MaxContext), 0
	if !l.b.o.BatchInvariant {
		part = l.b.promptPart(sequences*kvHeads, o.MaxContext)
		chunks = ceil(o.MaxContext, part*promptTile)
	}
	if rows := min(queriesPerWarp/group, o.MaxSeqTokens); rows >= minRows && !(sequences == 1 && o.MaxSeqTokens > rows) {
		if parts, split := l.b.splitAttention(sequences, rows, heads, kvHeads, promptHead, chunks); split {
			a.sums, a.ends = uint64(l.work.Addr), uint64(l.work.Addr)+uint64(parts)*promptHead*4
			a.maxRows, a.chunks, a.chunkTiles = int32(rows), int32(chunks), int32(part)
			g.x = min(l.b.multiprocessors, sequences*kvHeads*chunks)
			if err := launch(l, o.Name(), promptKernel, g, &a); err != nil {
				return err
			}
			if err := launch(l, o.Name(), promptJoin, grid{x: sequences * rows, y: heads, threads: 128}, &a); err != nil {
				return err
			}
			a.minRows, a.maxRows, a.chunks, a.chunkTiles = a.maxRows+1, math.MaxInt32, 0, 0
		}
	}
	if o.MaxSeqTokens < int(a.minRows) {
		return nil
	}
	g.x = min(l.b.multiprocessors, sequences*ceil(o.MaxSeqTokens, perTile)*kvHeads)
	return launch(l, o.Name(), promptKernel, g, &a)
}
