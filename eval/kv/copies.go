package kv

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/transfer"
)

// Method is what copies blocks.
type Method string

// The methods.
const (
	// DMA is a copy of the device for each block, by its copy engines.
	DMA Method = "dma"
	// Batch is one call of the driver for all blocks, which copy engines copy.
	Batch Method = "batch"
	// Kernel is one launch of a kernel that copies all blocks (kernels.CopyBlocks).
	Kernel Method = "kernel"
)

// Direction is where blocks are copied, seen from the GPU that computes.
type Direction string

// The directions.
const (
	// LoadDirection is to the GPU's memory, StoreDirection from it.
	LoadDirection  Direction = "load"
	StoreDirection Direction = "store"
	// BothDirections are as many blocks in each, at once.
	BothDirections Direction = "both"
)

// The names of the tiers that blocks are copied from and to.
const (
	hostTier = "host"
	peerTier = "peer"
)

// Enqueuer enqueues operations on the streams of a machine; kernels.Backend is one.
type Enqueuer interface {
	Enqueue(s device.Stream, op kernels.Op) error
}

// CopyOptions describe a measurement of copies by block size.
type CopyOptions struct {
	Machine device.Machine
	// Backend enqueues the kernel. Required by method Kernel.
	Backend Enqueuer
	// Compute is the memory of the GPU that computes, Peer that of another one;
	// device.Host: there is none.
	Compute, Peer device.Space
	// Methods that are measured, in turn. Batch needs streams that can. Default: DMA and Kernel.
	Methods []Method
	// Sizes of a block in bytes, multiples of 16. Default: DefaultBlockSizes.
	Sizes []int64
	// Blocks of one copy. Default: 1000.
	Blocks int
	// MaxBytes of one copy, which has fewer blocks if they are large. Default: 4 GiB.
	MaxBytes int64
	// ThreadBlocks of the kernel's launch; 0: one per multiprocessor.
	ThreadBlocks int
	// Repetitions, whose median counts. Default: 10.
	Repetitions int
	// Progress, if set, is called after each block size of a tier and direction, with the
	// bytes that have been copied and all that there are to copy.
	Progress func(done, total int64)
}

// DefaultBlockSizes are the powers of two from 4 KiB to 16 MiB.
func DefaultBlockSizes() []int64 {
	var sizes []int64
	for n := int64(4 << 10); n <= 16<<20; n *= 2 {
		sizes = append(sizes, n)
	}
	return sizes
}

const (
	// wordBytes is what the kernel copies at once.
	wordBytes     = 16
	defaultBlocks = 1000
	// addressBytes of an entry of the kernel's tables.
	addressBytes = 8
)

// EnsureDefaults fills in what is zero.
func (o CopyOptions) EnsureDefaults() CopyOptions {
	if len(o.Methods) == 0 {
		o.Methods = []Method{DMA, Kernel}
	}
	if len(o.Sizes) == 0 {
		o.Sizes = DefaultBlockSizes()
	}
	if o.Blocks == 0 {
		o.Blocks = defaultBlocks
	}
	if o.MaxBytes == 0 {
		o.MaxBytes = 4 << 30
	}
	if o.Repetitions == 0 {
		o.Repetitions = defaultRepetitions
	}
	return o
}

// Validate reports the first invalid option.
func (o CopyOptions) Validate() error {
	for _, m := range o.Methods {
		switch {
		case m != DMA && m != Batch && m != Kernel:
			return fmt.Errorf("kv: copy method %q: must be %s, %s or %s", m, DMA, Batch, Kernel)
		case m == Kernel && o.Backend == nil:
			return errors.New("kv: CopyOptions.Backend is not set, which the kernel needs")
		}
	}
	switch {
	case o.Machine == nil:
		return errors.New("kv: CopyOptions.Machine is not set")
	case slices.ContainsFunc(o.Sizes, func(n int64) bool { return n < wordBytes || n%wordBytes != 0 }):
		return fmt.Errorf("kv: blocks of %v bytes: must be multiples of %d", o.Sizes, wordBytes)
	case o.MaxBytes < slices.Max(o.Sizes):
		return fmt.Errorf("kv: copies of at most %d bytes have no room for a block of %d", o.MaxBytes, slices.Max(o.Sizes))
	case o.Blocks < 1 || o.Repetitions < 1 || o.ThreadBlocks < 0:
		return fmt.Errorf("kv: %d blocks, %d repetitions, %d thread blocks: must be at least 1, 1 and 0", o.Blocks, o.Repetitions, o.ThreadBlocks)
	}
	return nil
}

// blocks of one copy of a size.
func (o *CopyOptions) blocks(size int64) int { return int(min(int64(o.Blocks), o.MaxBytes/size)) }

// poolBytes is what blocks of one direction take in each memory.
func (o *CopyOptions) poolBytes() int64 {
	var most int64
	for _, n := range o.Sizes {
		most = max(most, int64(o.blocks(n))*n)
	}
	return device.Align(most)
}

// tableBytes are the addresses of the blocks of both directions, on both sides.
func (o *CopyOptions) tableBytes() int64 {
	return device.Align(int64(2*2*o.Blocks) * addressBytes)
}

// Needs is the memory that a measurement allocates, in bytes: in each memory blocks that are
// read and blocks that are written, and on host and GPU the kernel's tables.
func (o CopyOptions) Needs() map[device.Space]int64 {
	o = o.EnsureDefaults()
	pools, tables := 2*o.poolBytes(), int64(0)
	if slices.Contains(o.Methods, Kernel) {
		tables = o.tableBytes()
	}
	needs := map[device.Space]int64{device.Host: pools + tables, o.Compute: pools + tables}
	if o.Peer != device.Host {
		needs[o.Peer] = pools
	}
	return needs
}

// CopyPoint is copies of blocks of one size by one method.
type CopyPoint struct {
	Tier       string    `json:"tier"`
	Direction  Direction `json:"direction"`
	Method     Method    `json:"method"`
	BlockBytes int64     `json:"block_bytes"`
	// Blocks of one copy in one direction, and Bytes of all directions together.
	Blocks int   `json:"blocks"`
	Bytes  int64 `json:"bytes"`
	// Seconds from the start of the first block to the end of the last, BytesPerSecond of
	// it; of both directions, their sum.
	Seconds        float64 `json:"copy_s"`
	BytesPerSecond float64 `json:"bytes_per_s"`
}

// Copies measures copies of scattered blocks by block size: from and to the host and a peer,
// one direction alone and both at once. Where ctx ends, the points that have been measured
// are returned beside the error.
func Copies(ctx context.Context, o CopyOptions) (_ []CopyPoint, err error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	r := &copies{rig: rig{machine: o.Machine}, o: o}
	defer func() { err = errors.Join(err, r.close()) }()
	if err := r.open(ctx); err != nil {
		return nil, fmt.Errorf("kv: measure copies: %w", err)
	}
	directions := []Direction{LoadDirection, StoreDirection, BothDirections}
	var done, total int64
	for range r.tiers {
		for _, d := range directions {
			for _, size := range o.Sizes {
				total += o.copied(d, size)
			}
		}
	}
	var points []CopyPoint
	for _, t := range r.tiers {
		for _, d := range directions {
			for _, size := range o.Sizes {
				p, err := r.point(ctx, t, d, size)
				if err != nil {
					if ctx.Err() == nil {
						points = nil
					}
					return points, fmt.Errorf("kv: copy blocks of %d bytes, %s, %s: %w", size, t.name, d, err)
				}
				points = append(points, p...)
				done += o.copied(d, size)
				if o.Progress != nil {
					o.Progress(done, total)
				}
			}
		}
	}
	return points, nil
}

// copied is what the points of a size and direction copy.
func (o *CopyOptions) copied(d Direction, size int64) int64 {
	return int64(len(o.Methods)*(o.Repetitions+1)*d.ways()) * int64(o.blocks(size)) * size
}

// ways is the number of directions that are copied in.
func (d Direction) ways() int {
	if d == BothDirections {
		return 2
	}
	return 1
}

// copies is a measurement of copies.
type copies struct {
	rig
	o CopyOptions
	// pool is on the GPU: blocks that are loaded, then those that are stored.
	pool  device.Region
	tiers []*tier
	// The kernel runs on the GPU that computes: a backend may have only one stream. Its table
	// is filled through a buffer of the host.
	kernel  *eval.Lane
	table   device.Region
	staging device.Memory
}

// tier is a memory that blocks are copied from and to.
type tier struct {
	name   string
	region device.Region // as the pool
	dma    [2]*eval.Lane // loads and stores
}

// The places of a direction in lanes.
const (
	loading = iota
	storing
)

func (r *copies) open(ctx context.Context) (err error) {
	pools := 2 * r.o.poolBytes()
	if r.pool, err = r.memory(r.o.Compute, pools, "pool"); err != nil {
		return err
	}
	for _, t := range []struct {
		name  string
		space device.Space
	}{{hostTier, device.Host}, {peerTier, r.o.Peer}} {
		if len(r.tiers) > 0 && t.space == device.Host {
			continue // no peer
		}
		x := &tier{name: t.name}
		if x.region, err = r.memory(t.space, pools, "offloaded"); err != nil {
			return err
		}
		// As the transfer engine does: copies between GPUs on a stream of the source.
		on := t.space
		if t.space == device.Host {
			on = r.o.Compute
		}
		if x.dma[loading], err = r.lane(on, "load KV blocks"); err != nil {
			return err
		}
		if x.dma[storing], err = r.lane(r.o.Compute, "store KV blocks"); err != nil {
			return err
		}
		// What is read has been written: the pool and the peer's memory from the host's.
		to, host := r.pool, x.region
		if len(r.tiers) > 0 {
			to, host = x.region, r.tiers[0].region
		}
		s := x.dma[loading].Stream
		if err := s.Copy(to.Range, host.Range); err != nil {
			return err
		}
		if err := s.Synchronize(ctx); err != nil {
			return err
		}
		r.tiers = append(r.tiers, x)
	}
	if !slices.Contains(r.o.Methods, Kernel) {
		return nil
	}
	if r.kernel, err = r.lane(r.o.Compute, "copy KV blocks by a kernel"); err != nil {
		return err
	}
	if r.table, err = r.memory(r.o.Compute, r.o.tableBytes(), "addresses"); err != nil {
		return err
	}
	if r.staging, err = r.machine.Alloc(device.Host, r.o.tableBytes(), "KV blocks measured, addresses"); err != nil {
		return err
	}
	r.closers = append(r.closers, r.staging.Free)
	return nil
}

// pieces are the blocks of a size, from and to a tier.
func (r *copies) pieces(t *tier, size int64) [2][]transfer.Piece {
	n, half := r.o.blocks(size), r.o.poolBytes()
	at := func(x device.Region, way int) blocks {
		return blocks{x.Slice(int64(way)*half, half), size}
	}
	return [2][]transfer.Piece{
		loading: scattered(at(r.pool, loading), at(t.region, loading), n, uint64(size)),
		storing: scattered(at(t.region, storing), at(r.pool, storing), n, uint64(size)),
	}
}

// point measures a size by all methods, in turn.
func (r *copies) point(ctx context.Context, t *tier, d Direction, size int64) ([]CopyPoint, error) {
	ways := map[Direction][]int{LoadDirection: {loading}, StoreDirection: {storing}, BothDirections: {loading, storing}}[d]
	pieces := r.pieces(t, size)
	var op kernels.CopyBlocks
	if slices.Contains(r.o.Methods, Kernel) {
		var err error
		if op, err = r.operation(ctx, ways, pieces); err != nil {
			return nil, err
		}
	}
	lanes := make([]*eval.Lane, len(ways))
	for i, way := range ways {
		lanes[i] = t.dma[way]
	}
	run := map[Method]func() ([]*eval.Lane, error){
		DMA: func() ([]*eval.Lane, error) {
			return lanes, eval.Enqueue(lanes, len(pieces[loading]), func(i, block int) error {
				p := &pieces[ways[i]][block]
				return lanes[i].Stream.Copy(p.Dst.Range, p.Src.Range)
			})
		},
		Batch: func() ([]*eval.Lane, error) {
			return lanes, eval.Enqueue(lanes, 1, func(i, _ int) error { return copyBatch(lanes[i].Stream, pieces[ways[i]]) })
		},
		Kernel: func() ([]*eval.Lane, error) {
			lanes := []*eval.Lane{r.kernel}
			return lanes, eval.Enqueue(lanes, 1, func(int, int) error { return r.o.Backend.Enqueue(r.kernel.Stream, &op) })
		},
	}
	times := make([][]time.Duration, len(r.o.Methods))
	for n := range r.o.Repetitions + 1 {
		for i, m := range r.o.Methods {
			lanes, err := run[m]()
			if err != nil {
				return nil, err
			}
			took, err := eval.Span(ctx, lanes)
			if err != nil {
				return nil, err
			}
			if n > 0 { // the first is slower
				times[i] = append(times[i], took)
			}
		}
	}
	points := make([]CopyPoint, len(r.o.Methods))
	for i, m := range r.o.Methods {
		took, all := eval.Median(times[i]), int64(d.ways())*int64(len(pieces[loading]))*size
		points[i] = CopyPoint{
			Tier: t.name, Direction: d, Method: m, BlockBytes: size, Blocks: len(pieces[loading]), Bytes: all,
			Seconds: took.Seconds(), BytesPerSecond: rate(all, took),
		}
	}
	return points, nil
}

// copyBatch copies pieces by one call.
func copyBatch(s device.Stream, pieces []transfer.Piece) error {
	b, ok := s.(device.BatchCopier)
	if !ok {
		return device.ErrNoBatches
	}
	dst, src := make([]device.Range, len(pieces)), make([]device.Range, len(pieces))
	for i := range pieces {
		dst[i], src[i] = pieces[i].Dst.Range, pieces[i].Src.Range
	}
	return b.CopyBatch(dst, src)
}

// operation writes the addresses of pieces to the GPU, directions by turns, and returns the
// operation that copies all of them.
func (r *copies) operation(ctx context.Context, ways []int, pieces [2][]transfer.Piece) (kernels.CopyBlocks, error) {
	n := len(ways) * len(pieces[loading])
	half := int64(n) * addressBytes
	table := r.staging.Write(0, 2*half)
	for i := range n {
		p := &pieces[ways[i%len(ways)]][i/len(ways)]
		binary.NativeEndian.PutUint64(table[i*addressBytes:], uint64(p.Src.Addr))
		binary.NativeEndian.PutUint64(table[(n+i)*addressBytes:], uint64(p.Dst.Addr))
	}
	s := r.kernel.Stream
	if err := s.Copy(r.table.Slice(0, 2*half).Range, r.staging.Range(0, 2*half)); err != nil {
		return kernels.CopyBlocks{}, err
	}
	if err := s.Synchronize(ctx); err != nil {
		return kernels.CopyBlocks{}, err
	}
	return kernels.CopyBlocks{
		Src: kernels.New(r.table.Addr, kernels.U64, n), Dst: kernels.New(r.table.Addr+device.Addr(half), kernels.U64, n),
		BlockBytes: pieces[loading][0].Src.Bytes, ThreadBlocks: r.o.ThreadBlocks,
	}, nil
}

// kernelGain is how many times as fast as the copy engines the kernel must be, all blocks in one
// launch, before it pays: the transfer engine launches one for each chunk, and it takes
// multiprocessors from the model. With 1.2, for blocks of 0.9 to 1.1 MiB from a peer, queued loads by
// the kernel were 3 to 12 % slower (docs/log/h200-2026-11-26.md).
const kernelGain = 1.5

// Crossover is the block size from which on the kernel does not pay.
type Crossover struct {
	Tier      string    `json:"tier"`
	Direction Direction `json:"direction"`
	// KernelBelowBytes is the smallest measured block size from which on the kernel is not at
	// least 1.5 times as fast as the copy engines, by the faster one of DMA and Batch. 0: it is at
	// no size. Where it is at the largest one, it is a byte more than that.
	KernelBelowBytes int64 `json:"kernel_below_bytes"`
}

// Crossovers compares the kernel with the copy engines, by tier and direction in the order of
// points. There are none where points have only the one or the other.
func Crossovers(points []CopyPoint) []Crossover {
	var all []Crossover
	type key struct {
		tier string
		d    Direction
		size int64
	}
	engines := map[key]float64{}
	for _, p := range points {
		if p.Method != Kernel {
			k := key{p.Tier, p.Direction, p.BlockBytes}
			engines[k] = max(engines[k], p.BytesPerSecond)
		}
	}
	for _, p := range points {
		rate, ok := engines[key{p.Tier, p.Direction, p.BlockBytes}]
		if p.Method != Kernel || !ok {
			continue
		}
		i := slices.IndexFunc(all, func(c Crossover) bool { return c.Tier == p.Tier && c.Direction == p.Direction })
		if i < 0 {
			i = len(all)
			all = append(all, Crossover{Tier: p.Tier, Direction: p.Direction})
		}
		if p.BytesPerSecond >= kernelGain*rate {
			all[i].KernelBelowBytes = max(all[i].KernelBelowBytes, above(points, p))
		}
	}
	return all
}

// above is the block size that was measured after that of a point; one byte more than the
// point's where there is none.
func above(points []CopyPoint, p CopyPoint) int64 {
	next := int64(0)
	for _, q := range points {
		if q.Tier == p.Tier && q.Direction == p.Direction && q.BlockBytes > p.BlockBytes && (next == 0 || q.BlockBytes < next) {
			next = q.BlockBytes
		}
	}
	if next == 0 {
		return p.BlockBytes + 1
	}
	return next
}
