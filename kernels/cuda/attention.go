package cuda

import (
	"fmt"
	"math"
	"math/bits"

	"github.com/moeserve/moeserve/kernels"
)

// headSizes are the head sizes that attention is compiled for; smaller heads are padded.
var headSizes = [...]int{32, 64, 96, 128}

const (
	queriesPerWarp = 16
	// At most maxGroup heads of Q may share a KV head: as many as a block of four warps has
	// queries.
	maxGroup = 4 * queriesPerWarp
	// The online softmax runs over chunks of chunkTokens positions, which are then joined.
	chunkTokens   = 256
	attentionTile = 32
	// attentionBlocks blocks of one warp keep a multiprocessor busy. With more than
	// attentionTiles tiles per sequence, blocks would end too unevenly, so they are split into
	// chunks.
	attentionBlocks, attentionTiles = 4, 32
	// prompt.cu computes all tokens of a step with contexts of at least longContext tokens, and so
	// many that attention.cu would have longParts partial results.
	longContext, longParts = 16 << 10, 2 << 10
)

const (
	// attention_128_wide computes heads of wideHead elements.
	wideHead, wideWarps = 128, chunkTokens / attentionTile
	// wideWaves is the number of its blocks per multiprocessor, one after another, up to which it is
	// faster than blocks of one warp, of which many share a multiprocessor.
	wideWaves = 2
)

// wideSharedBytes is the shared memory of a block of attention_128_wide: that many tiles of a chunk, the queries,
// and the ends of each tile's queries.
func wideSharedBytes(tiles int) int {
	return (2*attentionTile*tiles+queriesPerWarp)*2*wideHead + wideWarps*queriesPerWarp*8
}

// attentionSharedBytes is the shared memory of a block: its stages of 32 keys and values, and
// its queries (see attend in attention.cu).
func attentionSharedBytes(d, warps int) int {
	stages := 3
	if warps == 1 {
		stages = 2
	}
	return (stages*2*attentionTile + queriesPerWarp*warps) * 2 * d
}

func (l *streamState) ropeAttention(o *kernels.RoPEAttention) error {
	if l.b.ropesWide(o) {
		return l.attention(&o.Attention, o)
	}
	if err := l.b.checkAttention(&o.Attention); err != nil { // before anything is launched
		return err
	}
	if err := l.ropeAppendKV(&o.Append); err != nil {
		return err
	}
	return l.attention(&o.Attention, nil)
}

// ropesWide reports whether one kernel computes all of o.
func (b *Backend) ropesWide(o *kernels.RoPEAttention) bool {
	t, r := &o.Attention, &o.Append
	if t.ContextLens.Shape[0] == 0 || t.Q.Shape[0] == 0 || t.Q.Shape[1] == 0 || b.promptsOnly(t) {
		return false
	}
	f := b.fewTokens(t)
	tokens := t.CacheK.Shape[1]
	return f.wide && t.MaxSeqTokens <= f.rows && tokens&(tokens-1) == 0 && (r.QNorm.None() || r.QNorm.DType == r.Q.DType && r.KNorm.DType == r.Q.DType) &&
		aligned(&r.Q, &r.K, &r.V, &r.QNorm, &r.KNorm, &r.Table, &r.CacheK, &r.CacheV)
}

// fewTokens is how the sequences of an attention with few tokens in the step (decode) are computed.
type fewTokens struct {
	rows   int // of a sequence, at most; 0: none of them is computed apart from those with many
	chunks int // of a context
	parts  int64
	split  bool // see splitAttention
	wide   bool // by attention_128_wide
}

// fewTokens returns how few tokens of o are computed; its sizes are not 0.
func (b *Backend) fewTokens(o *kernels.Attention) (f fewTokens) {
	sequences, heads, kvHeads, d := o.ContextLens.Shape[0], o.Q.Shape[1], o.CacheK.Shape[2], o.Q.Shape[2]
	few := queriesPerWarp / (heads / kvHeads)
	if few == 0 || sequences == 1 && o.MaxSeqTokens > few {
		return f
	}
	f.rows, f.chunks = min(few, o.MaxSeqTokens), ceil(o.MaxContext, chunkTokens)
	f.parts, f.split = b.splitAttention(sequences, f.rows, heads, kvHeads, d, f.chunks)
	f.wide = b.attendsWide(sequences*kvHeads, f.chunks, d) && f.split == (f.chunks > 1)
	return f
}

// promptsOnly reports whether prompt.cu computes all tokens of o. With Options.BatchInvariant one kernel computes
// a token wherever it is: alone, or in a prompt. It is also the faster one for few tokens where contexts are long and many.
func (b *Backend) promptsOnly(o *kernels.Attention) bool {
	long := o.MaxContext >= longContext && o.ContextLens.Shape[0]*o.Q.Shape[1]*ceil(o.MaxContext, chunkTokens) >= longParts
	return b.hasPrompt(o) && (b.o.BatchInvariant || long)
}

// headSizeIndex is the index of the smallest of headSizes with room for heads of d elements, or their number.
func headSizeIndex(d int) int {
	i := 0
	for i < len(headSizes) && headSizes[i] < d {
		i++
	}
	return i
}

// checkAttention checks what kernels require of o beyond its contract; an operation without elements has no kernel.
func (b *Backend) checkAttention(o *kernels.Attention) error {
	if err := b.activation(o.Name(), "Q", &o.Q); err != nil {
		return err
	}
	heads, d, kvHeads := o.Q.Shape[1], o.Q.Shape[2], o.CacheK.Shape[2]
	switch {
	case o.ContextLens.Shape[0] == 0 || o.Q.Shape[0] == 0 || heads == 0 || d == 0:
	case d%8 != 0 || headSizeIndex(d) == len(headSizes):
		return fmt.Errorf("cuda: %s: Q is %v, want a head size that is a multiple of 8, at most %d", o.Name(), o.Q, headSizes[len(headSizes)-1])
	case heads/kvHeads > maxGroup:
		return fmt.Errorf("cuda: %s: Q is %v, want at most %d heads for each of CacheK's %d", o.Name(), o.Q, maxGroup, kvHeads)
	case !aligned(&o.CacheK, &o.CacheV):
		return fmt.Errorf("cuda: %s: CacheK is %v at %#x and CacheV %v at %#x, want addresses and strides that are multiples of 16 bytes",
			o.Name(), o.CacheK, uint64(o.CacheK.Addr), o.CacheV, uint64(o.CacheV.Addr))
	}
	return nil
}

// attention runs o, or all of the operation that o is a part of, unless that is nil: see ropesWide.
func (l *streamState) attention(o *kernels.Attention, partOf *kernels.RoPEAttention) error {
	if err := l.b.checkAttention(o); err != nil {
		return err
	}
	sequences, heads, d := o.ContextLens.Shape[0], o.Q.Shape[1], o.Q.Shape[2]
	if sequences == 0 || o.Q.Shape[0] == 0 || heads == 0 || d == 0 {
		return nil
	}
	kvHeads := o.CacheK.Shape[2]
	group, size := heads/kvHeads, headSizeIndex(d)
	if l.b.promptsOnly(o) {
		return l.prompt(o, 1)
	}
	a := attentionArgs{
		q: address(&o.Q), k: address(&o.CacheK), v: address(&o.CacheV), starts: address(&o.SeqStarts), lens: address(&o.ContextLens),
		table: address(&o.BlockTable), out: address(&o.Out),
		qRow: int64(o.Q.Stride[0]), qHead: int64(o.Q.Stride[1]),
		kBlock: int64(o.CacheK.Stride[0]), kToken: int64(o.CacheK.Stride[1]), kHead: int64(o.CacheK.Stride[2]),
		vBlock: int64(o.CacheV.Stride[0]), vToken: int64(o.CacheV.Stride[1]), vHead: int64(o.CacheV.Stride[2]),
		tableRow: int64(o.BlockTable.Stride[0]), outRow: int64(o.Out.Stride[0]), outHead: int64(o.Out.Stride[1]),
		heads: int32(heads), group: int32(group), d: int32(d), tokens: int32(o.CacheK.Shape[1]), blocks: int32(o.CacheK.Shape[0]),
		window: int32(min(o.Window, math.MaxInt32)), minRows: 1, scale: float32(float64(o.Scale) * math.Log2E),
		qAligned: b2i(aligned(&o.Q)), outPaired: b2i(pairedHeads(&o.Out)),
		each: 1, shift: -1, vAsK: b2i(o.CacheK.Stride == o.CacheV.Stride), pastReady: b2i(o.PastReady),
	}
	if n := uint(o.CacheK.Shape[1]); n&(n-1) == 0 {
		a.shift = int32(bits.TrailingZeros(n))
	}
	name := attentionKernels + kernelID(2*size)

	// Sequences with few tokens in the step (decode) have a tile of one warp each. If they are
	// few and long, their chunks are computed by separate blocks.
	if few := l.b.fewTokens(o); few.rows > 0 {
		a.maxRows, a.tiles = int32(few.rows), 1
		g := grid{x: sequences, y: kvHeads, threads: 32, shared: attentionSharedBytes(headSizes[size], 1)}
		if few.split {
			a.sums, a.ends = uint64(l.work.Addr), uint64(l.work.Addr)+uint64(few.parts)*uint64(d)*4
			a.chunks, g.z = int32(few.chunks), few.chunks
		}
		k := name
		if few.wide {
			// Blocks of the GEMM behind attention start beside it where they find enough shared memory.
			a.chunkTiles = int32(min(ceil(o.MaxContext, attentionTile), wideWarps))
			k, g.threads, g.shared = attentionWide, 32*wideWarps, wideSharedBytes(int(a.chunkTiles))
		}
		// With enough blocks, a block computes several KV heads: it loads the first keys of the
		// next while it computes the last.
		tiles := ceil(o.MaxContext, attentionTile)
		for !few.wide && !few.split && kvHeads%(2*int(a.each)) == 0 && 2*int(a.each)*tiles <= attentionTiles &&
			sequences*kvHeads >= 2*int(a.each)*attentionBlocks*l.b.multiprocessors {
			a.each *= 2
			g.y /= 2
		}
		var err error
		if partOf != nil {
			err = l.launchRoped(partOf, g, &a)
		} else {
			err = launch(l, o.Name(), k, g, &a)
		}
		if err != nil {
			return err
		}
		if few.split {
			if err := launch(l, o.Name(), attentionJoin, grid{x: sequences * few.rows, y: heads, threads: 128}, &a); err != nil {
				return err
			}
		}
		a.minRows, a.chunks, a.each = a.maxRows+1, 0, 1
	}
	if o.MaxSeqTokens < int(a.minRows) {
		return nil
	}
	if l.b.hasPrompt(o) {
		return l.prompt(o, int(a.minRows))
	}
	a.maxRows, a.tiles = math.MaxInt32, int32(ceil(o.MaxSeqTokens, maxGroup/group)) // tokens per tile of four warps
	g := grid{x: sequences * int(a.tiles), y: kvHeads, threads: 128, shared: attentionSharedBytes(headSizes[size], 4)}
	return launch(l, o.Name(), name+1, g, &a)
}

// launchRoped launches attention with RoPE and the append before it, with the grid and the arguments that attention_128_wide
// would have.
func (l *streamState) launchRoped(o *kernels.RoPEAttention, g grid, a *attentionArgs) error {
	r := &o.Append
	k := ropeAttentionWide
	if !r.QNorm.None() {
		k = normRopeAttentionWide
	}
	return launch(l, o.Name(), k, g, &ropeAttentionArgs{
		attention: *a, k: address(&r.K), v: address(&r.V), qWeight: address(&r.QNorm), kWeight: address(&r.KNorm),
		angles: address(&r.Table), rows: address(&r.Rows), slots: address(&r.Slots),
		kRow: int64(r.K.Stride[0]), kHead: int64(r.K.Stride[1]), vRow: int64(r.V.Stride[0]), vHead: int64(r.V.Stride[1]),
		places: int32(r.Table.Shape[0]), eps: r.Eps,
	})
}

// attendsWide reports whether attention of few tokens of that many sequences times KV heads, in
// contexts of that many chunks, is computed by attention_128_wide. Its results differ in their last
// bits from those of longer prompts, so it is not with Options.BatchInvariant.
func (b *Backend) attendsWide(heads, chunks, d int) bool {
	return b.largeSmem && !b.o.BatchInvariant && d == wideHead && heads*chunks <= wideWaves*b.multiprocessors
}

// splitAttention reports whether the chunks of sequences with so many rows (tokens in the step)
// at most are computed by separate blocks, and the number of their partial results: if blocks of
// whole sequences would not fill the GPU, and the workspace has room for the results.
func (b *Backend) splitAttention(sequences, rows, heads, kvHeads, d, chunks int) (parts int64, split bool) {
	parts = int64(sequences) * int64(rows) * int64(heads) * int64(chunks)
	return parts, chunks > 1 && sequences*kvHeads < 4*b.multiprocessors && parts*int64(d+2)*4 <= b.o.WorkspaceBytes
}
