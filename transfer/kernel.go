package transfer

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/transfer/dispatch"
)

// BlockCopier enqueues kernels that copy blocks.
type BlockCopier interface {
	// CopyBlocks enqueues one launch on a stream of Kernel.Space. b may be changed once it has
	// returned.
	CopyBlocks(s device.Stream, b *Blocks) error
}

// Blocks are what one launch copies: block i from the i-th address of the table at Src to that
// of the table at Dst. The tables have N addresses of 8 bytes, in the GPU's memory. No block
// that is written overlaps any other one.
type Blocks struct {
	Src, Dst device.Addr
	N        int
	// Bytes of a block, a multiple of 16, as are the addresses.
	Bytes int64
	// ThreadBlocks is the maximum number of thread blocks.
	ThreadBlocks int
}

// Kernel says which copies a kernel makes in place of the copy engines: it is faster where
// pieces are small, and takes multiprocessors from other work. So only requests of many pieces
// that have the priority Rebalance, KVStore or KVLoad when they are submitted use it.
//
// A kernel that accesses a peer's memory while that GPU is lost loses Space, too, on CUDA; copies
// from a peer, which its own copy engines make, do not.
type Kernel struct {
	Copier BlockCopier
	// Space is the GPU whose streams launch it.
	Space device.Space
	// Paths that have one, from or to Space, over which that GPU can read and write.
	Paths map[device.Pair]KernelPath
}

// KernelPath says where the kernel copies on a path.
type KernelPath struct {
	// Below this mean size of a request's pieces, in bytes, the kernel copies them; 0: never.
	Below int64
	// ThreadBlocks is the maximum number of thread blocks of a launch, and so of the
	// multiprocessors that it takes. 0: one per multiprocessor.
	ThreadBlocks int
}

const (
	// kernelWord is what a kernel copies at once: blocks and addresses are multiples.
	kernelWord = 16
	// maxKernelBlocks is the maximum number of blocks of a launch.
	maxKernelBlocks = 512
	tableBytes      = 2 * 8 * maxKernelBlocks
	// minKernelPieces is the minimum number of pieces of a chunk that is worth a launch.
	minKernelPieces = 16
)

func (k *Kernel) validate() error {
	if k.Copier == nil {
		return errors.New("transfer: Kernel.Copier is not set")
	}
	for pair, p := range k.Paths {
		switch {
		case pair.From == pair.To || pair.From != k.Space && pair.To != k.Space:
			return fmt.Errorf("transfer: a kernel on %s for copies from %s to %s", k.Space, pair.From, pair.To)
		case p.Below < 0 || p.ThreadBlocks < 0:
			return fmt.Errorf("transfer: a kernel below %d bytes on %d thread blocks: must be at least 0", p.Below, p.ThreadBlocks)
		}
	}
	return nil
}

// kernelLane is what a link launches kernels with.
type kernelLane struct {
	path   KernelPath
	copier BlockCopier
	stream device.Stream
	// tables has one of addresses for each slot, from first on: written by the host, copied to
	// the GPU on the stream. uploaded has passed when the host may write a slot's again.
	tables   *tables
	first    int
	uploaded []device.Event
	recorded []bool
}

// tables are tables of addresses of blocks, in the host's memory and in the GPU's.
type tables struct {
	host, gpu device.Memory
	// used is the number of tables that lanes have.
	used int
}

// TableBytes is what an engine with so many chunks in flight (Options.Depth; 0: the default)
// allocates for the kernel, in host memory and in that of Space.
func (k *Kernel) TableBytes(depth int) int64 {
	if k == nil {
		return 0
	}
	return int64(len(k.Paths)) * int64(dispatch.Link{Depth: depth}.Slots()) * tableBytes
}

func newTables(o *Options) (t *tables, err error) {
	t = &tables{}
	bytes := o.Kernel.TableBytes(o.Depth)
	if bytes == 0 {
		return t, nil
	}
	if t.host, err = o.Machine.Alloc(device.Host, bytes, "addresses of copied blocks"); err == nil {
		if t.gpu, err = o.Machine.Alloc(o.Kernel.Space, bytes, "addresses of copied blocks"); err != nil {
			err = errors.Join(err, t.host.Free())
		}
	}
	return t, err
}

// free releases the memory.
func (t *tables) free() error {
	if t.host == nil {
		return nil
	}
	return errors.Join(t.host.Free(), t.gpu.Free())
}

func newKernelLane(e *Engine, pair device.Pair, slots int) (k *kernelLane, err error) {
	k = &kernelLane{path: e.o.Kernel.Paths[pair], copier: e.o.Kernel.Copier, recorded: make([]bool, slots), tables: e.tables, first: e.tables.used}
	defer func() {
		if err != nil {
			err = errors.Join(err, k.release())
			k = nil
		}
	}()
	if k.stream, err = e.o.Machine.NewStream(e.o.Kernel.Space, device.StreamOptions{Name: fmt.Sprintf("copy kernel %s to %s", pair.From, pair.To)}); err != nil {
		return k, err
	}
	for range slots {
		ev, err := e.o.Machine.NewUntimedEvent()
		if err != nil {
			return k, err
		}
		k.uploaded = append(k.uploaded, ev)
	}
	e.tables.used += slots
	return k, nil
}

// takes returns the size of the blocks in which the kernel copies the pieces of a request, their
// greatest common divisor, and the number of pieces of a chunk; 0 if it does not copy them.
func (k *kernelLane) takes(p Priority, r *dispatch.Request, chunkBytes int64) (unit int64, pieces int) {
	n := int64(len(r.Pieces))
	if k == nil || p > KVLoad || n < 2 || r.Bytes() >= k.path.Below*n {
		return 0, 0
	}
	var largest int64
	for i := range r.Pieces {
		dst, src := r.Pieces[i].Dst, r.Pieces[i].Src
		if (uint64(dst.Addr)|uint64(src.Addr)|uint64(dst.Bytes))%kernelWord != 0 {
			return 0, 0
		}
		largest = max(largest, dst.Bytes)
		for rest := dst.Bytes; rest > 0; {
			unit, rest = rest, unit%rest
		}
	}
	if pieces = int(maxKernelBlocks * unit / largest); pieces < minKernelPieces || largest > chunkBytes {
		return 0, 0
	}
	return unit, pieces
}

// copy enqueues one launch for all pieces, which consist of blocks of unit bytes.
func (k *kernelLane) copy(slot int, dst, src []device.Range, unit int64) error {
	if k.recorded[slot] {
		// It has passed, with or without an error. This orders the host's write after it.
		_, _ = k.uploaded[slot].Query()
	}
	var n int64
	for _, r := range dst {
		n += r.Bytes / unit
	}
	at, half := int64(k.first+slot)*tableBytes, 8*n
	host, gpu := k.tables.host, k.tables.gpu
	table := host.Write(at, 2*half)
	for i, r := range dst {
		for off := int64(0); off < r.Bytes; off += unit {
			binary.NativeEndian.PutUint64(table, uint64(src[i].Addr)+uint64(off))
			binary.NativeEndian.PutUint64(table[half:], uint64(r.Addr)+uint64(off))
			table = table[8:]
		}
	}
	if err := k.stream.Copy(gpu.Range(at, 2*half), host.Range(at, 2*half)); err != nil {
		return err
	}
	if err := k.stream.Record(k.uploaded[slot]); err != nil {
		return err
	}
	k.recorded[slot] = true
	return k.copier.CopyBlocks(k.stream, &Blocks{
		Src: gpu.Range(at, half).Addr, Dst: gpu.Range(at+half, half).Addr, N: int(n), Bytes: unit, ThreadBlocks: k.path.ThreadBlocks,
	})
}

// release closes what exists.
func (k *kernelLane) release() error {
	if k == nil {
		return nil
	}
	var errs []error
	if k.stream != nil {
		errs = append(errs, k.stream.Close())
	}
	for _, ev := range k.uploaded {
		errs = append(errs, ev.Close())
	}
	return errors.Join(errs...)
}
