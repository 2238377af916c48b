package kv

import (
	"context"
	crand "crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"time"

	"golang.org/x/sys/unix"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/transfer"
)

// FileLoad is how fast loads from files are, through the tiers of a server: from Tiers.Load until
// Tiers.Poll reports the end.
type FileLoad struct {
	// PageCache says whether the files of Seconds and QueuedBytesPerSecond were in memory.
	PageCache PageCache `json:"page_cache"`
	// Seconds of one load alone, and BytesPerSecond of it.
	Seconds        float64 `json:"load_s"`
	BytesPerSecond float64 `json:"load_bytes_per_s"`
	// CachedSeconds is the time of the same load once more, which finds its files in the system's
	// page cache, and CachedBytesPerSecond its rate.
	CachedSeconds        float64 `json:"cached_load_s"`
	CachedBytesPerSecond float64 `json:"cached_load_bytes_per_s"`
	// QueuedBytesPerSecond is the rate of QueuedLoads loads that are started at once,
	// CachedQueuedBytesPerSecond that of the same loads once more.
	QueuedLoads                int     `json:"queued_loads"`
	QueuedBytesPerSecond       float64 `json:"queued_bytes_per_s"`
	CachedQueuedBytesPerSecond float64 `json:"cached_queued_bytes_per_s"`
	FileRaw
}

// FileRaw is how fast the files of the queued loads are read without the engine, by RawThreads
// threads, as many as a tier has readers, into pinned memory of the size of its staging buffers: the
// faster one of one read for each file, and of one of its header before that of the block. Nothing is
// verified, and nothing copied to the GPU. It is 0 on a clock that does not count reading files.
type FileRaw struct {
	RawThreads int `json:"raw_threads"`
	// RawBytesPerSecond is the rate after the system was asked to drop the files' pages, as of
	// QueuedBytesPerSecond; RawFraction that rate over it.
	RawBytesPerSecond float64 `json:"raw_bytes_per_s,omitempty"`
	RawFraction       float64 `json:"raw_fraction,omitempty"`
	// CachedRawBytesPerSecond is the rate of reading the files at once again, CachedRawFraction
	// CachedQueuedBytesPerSecond over it.
	CachedRawBytesPerSecond float64 `json:"cached_raw_bytes_per_s,omitempty"`
	CachedRawFraction       float64 `json:"cached_raw_fraction,omitempty"`
}

// ErrDirectory marks errors of the directory of files, or of the room in it.
var ErrDirectory = errors.New("directory of files")

// directoryError is one that ErrDirectory marks, which is not part of its text.
type directoryError struct{ error }

func (e directoryError) Unwrap() []error { return []error{ErrDirectory, e.error} }

// files are the blocks of one entry in files, as a server's tiers have them.
type files struct {
	rig
	o     *ReloadOptions
	tiers *offload.Tiers
	// dst are blocks of the pool, as many as there are keys; paths are the files of the keys.
	dst   []int32
	keys  []kvcache.Key
	paths []string
	loads int64 // since the beginning
	raw   rawReader
}

const (
	// storedAtOnce bounds the bytes of a store, after each of which ctx is asked.
	storedAtOnce = 64 << 20
	// fileOverhead is what a file may take beside its block, in bytes: a header, in a block of the
	// file system.
	fileOverhead = 8 << 10
	// shapeBytes is what an entry is a multiple of: K and V of elements of 16 bit.
	shapeBytes = 4
)

// fileBlocks is the number of blocks in files that loads of an entry need.
func (o *ReloadOptions) fileBlocks(e *Entry) (most int) {
	for _, c := range o.cells() {
		if c.entry.Bytes == e.Bytes {
			most = max(most, c.loads*c.blocks)
		}
	}
	return most
}

// tier is the configuration of the tier in files of an entry.
func (o *ReloadOptions) tier(e *Entry) offload.Config {
	return offload.Config{FileBlocks: o.fileBlocks(e), Directory: o.Directory, LoadPolicy: offload.LoadAlways}
}

// fileNeeds are the bytes that loads from files take, at most of one entry: of the GPU's memory, of
// the host's and of the directory.
func (o *ReloadOptions) fileNeeds() (compute, host, directory int64) {
	if o.Directory == "" {
		return 0, 0, 0
	}
	for i := range o.Entries {
		e := &o.Entries[i]
		n, block := int64(o.fileBlocks(e)), int64(o.BlockTokens)*e.Bytes
		compute, directory = max(compute, n*block), max(directory, n*(block+fileOverhead))
		host = max(host, 2*device.Align(o.staging(e))) // of the tier, and of reads without it
	}
	return compute, host, directory
}

// staging is the pinned memory of an entry's tier in files, in bytes.
func (o *ReloadOptions) staging(e *Entry) int64 {
	tiers, err := o.tier(e).Tiers(int64(o.BlockTokens)*e.Bytes, o.BlockTokens)
	if err != nil || len(tiers) != 1 { // opening it says why
		return 0
	}
	return tiers[0].HostBytes
}

// checkRoom refuses loads whose files the directory has no room for.
func (o *ReloadOptions) checkRoom() error {
	_, _, need := o.fileNeeds()
	var s unix.Statfs_t
	if need == 0 || unix.Statfs(o.Directory, &s) != nil { // opening the tier says why
		return nil
	}
	if block := uint64(s.Bsize); uint64(need)/block >= s.Bavail {
		return directoryError{fmt.Errorf("files of %s are needed, and %s are free in directory %q; make room there, name another, or load fewer entries", eval.Size(need), eval.Size(int64(s.Bavail*block)), o.Directory)}
	}
	return nil
}

// openFiles opens the tier of an entry and stores its blocks, which fill is copied to before, if there
// is data at all.
func openFiles(ctx context.Context, o *ReloadOptions, e *Entry, engine *transfer.Engine, fill device.Stream) (_ *files, err error) {
	f := &files{rig: rig{machine: o.Machine}, o: o}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
		}
	}()
	n := o.fileBlocks(e)
	pool, err := kvcache.NewPool(kvcache.PoolOptions{
		Machine: o.Machine, Space: o.Compute, Blocks: n,
		Shape: kvcache.Shape{Layers: 1, KVHeads: 1, HeadDim: int(e.Bytes / shapeBytes), DType: kernels.F16, BlockTokens: o.BlockTokens},
	})
	if err != nil {
		return nil, err
	}
	f.closers = append(f.closers, pool.Close)
	if err := f.fill(ctx, pool, n, fill); err != nil {
		return nil, err
	}
	blocks, err := kvcache.NewManager(kvcache.ManagerOptions{Blocks: n, BlockTokens: o.BlockTokens})
	if err != nil {
		return nil, err
	}
	table := blocks.NewTable()
	if !table.Reserve(n * o.BlockTokens) {
		return nil, fmt.Errorf("no room for %d blocks of %d", n, blocks.Free())
	}
	f.dst = table.Blocks()
	f.tiers, err = offload.New(offload.Options{
		Machine: o.Machine, Space: o.Compute, Pool: pool, Blocks: blocks, Transfer: engine, StoreLimit: n, Config: o.tier(e), Log: o.Log,
	})
	if err != nil {
		return nil, inDirectory(err, o.Directory)
	}
	f.closers = append(f.closers, f.tiers.Close)
	if err := f.store(ctx, pool.Shape().BlockBytes()); err != nil {
		return nil, err
	}
	f.raw, err = f.openRaw(pool.Shape().BlockBytes(), o.staging(e))
	return f, err
}

// inDirectory marks an error of files, and has it name their directory.
func inDirectory(err error, directory string) error {
	if _, ok := errors.AsType[*fs.PathError](err); !ok {
		return err
	}
	return directoryError{fmt.Errorf("files in directory %q: %w", directory, err)}
}

// fill writes random bytes to the pool: file systems may compress others.
func (f *files) fill(ctx context.Context, pool *kvcache.Pool, blocks int, s device.Stream) (err error) {
	if !f.machine.Capabilities().KeepsData {
		return nil
	}
	n := pool.Shape().BlockBytes()
	m, err := f.machine.Alloc(device.Host, n, "KV blocks measured, content")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Free()) }()
	var seed [32]byte
	_, _ = rand.NewChaCha8(seed).Read(m.Write(0, n)) // never fails
	for i := range blocks {
		if err := s.Copy(pool.Region(int32(i)).Range, m.Range(0, n)); err != nil {
			return err
		}
	}
	return s.Synchronize(context.WithoutCancel(ctx)) // the memory is freed
}

// store stores all blocks, finds their files, and has the disk have them.
func (f *files) store(ctx context.Context, blockBytes int64) error {
	// Keys that nobody else has: they are in the names of the files.
	salt := make([]byte, 16)
	_, _ = crand.Read(salt) // never fails
	key := kvcache.RootKey(salt)
	for range f.dst {
		key = key.Next([]int32{0})
		f.keys = append(f.keys, key)
	}
	step := int(max(storedAtOnce/blockBytes, 1))
	for first := 0; first < len(f.keys); first += step {
		f.tiers.Store(f.keys, first, f.dst[first:min(first+step, len(f.dst))], offload.Filled)
		for f.tiers.Poll(); f.tiers.Busy(); f.tiers.Poll() {
			if err := f.tiers.Wait(ctx); err != nil {
				return err
			}
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	if n, _ := f.tiers.Lookup(f.keys, 0, len(f.keys)*f.o.BlockTokens); n < len(f.keys) {
		return directoryError{fmt.Errorf("of %d blocks of %s not all could be written to files in directory %q, the first %d were; make room there, name another, or load fewer entries", len(f.keys), eval.Size(blockBytes), f.o.Directory, n)}
	}
	var err error
	if f.paths, err = findFiles(f.o.Directory, f.keys); err != nil {
		return inDirectory(err, f.o.Directory)
	}
	for _, path := range f.paths {
		if err := errors.Join(ctx.Err(), syncFile(path)); err != nil {
			return inDirectory(err, f.o.Directory)
		}
	}
	return nil
}

// fileSamples are the times of a cell from files.
type fileSamples struct {
	cache                                PageCache
	single, cached, queued, cachedQueued []time.Duration
	// raw are the times of reading the files of the queued loads in each way, with the pages dropped
	// and cached.
	raw, cachedRaw [len(rawWays)][]time.Duration
}

// sample measures loads of a cell once, in each way.
func (f *files) sample(ctx context.Context, c *cell, into *fileSamples) error {
	queued := f.paths[:c.loads*c.blocks]
	type measured struct {
		paths   []string
		run     func() (time.Duration, error)
		dropped *[]time.Duration
		cached  *[]time.Duration
	}
	all := []measured{
		{f.paths[:c.blocks], func() (time.Duration, error) { return f.load(ctx, c, 1) }, &into.single, &into.cached},
		{queued, func() (time.Duration, error) { return f.load(ctx, c, c.loads) }, &into.queued, &into.cachedQueued},
	}
	for i, read := range rawWays {
		all = append(all, measured{queued, func() (time.Duration, error) { return f.raw.read(ctx, queued, read) }, &into.raw[i], &into.cachedRaw[i]})
	}
	for _, m := range all {
		now, err := dropPages(m.paths)
		if err != nil {
			return inDirectory(err, f.o.Directory)
		}
		into.cache = worse(into.cache, now)
		for _, times := range []*[]time.Duration{m.dropped, m.cached} {
			took, err := m.run()
			if err != nil {
				return inDirectory(err, f.o.Directory)
			}
			*times = append(*times, took)
		}
	}
	return nil
}

// load starts loads of a cell at once, waits for all of them, and returns how long it took.
func (f *files) load(ctx context.Context, c *cell, loads int) (time.Duration, error) {
	// As of other sources the blocks are elsewhere in the pool, in the same places each time.
	to := rand.New(rand.NewPCG(uint64(c.count), 1)).Perm(c.loads * c.blocks)
	dst := make([]int32, loads*c.blocks)
	for i := range dst {
		dst[i] = f.dst[to[i]]
	}
	began := f.machine.Now()
	for i := range loads {
		first, end := i*c.blocks, (i+1)*c.blocks
		f.loads++
		if err := f.tiers.Load(f.loads, f.keys[first:end], 0, dst[first:end]); err != nil {
			return 0, err
		}
	}
	for f.tiers.Pending() > 0 {
		if err := f.tiers.Wait(ctx); err != nil {
			return 0, err
		}
		for _, l := range f.tiers.Poll() {
			if l.Err != nil {
				return 0, directoryError{fmt.Errorf("%d blocks of %d were loaded from files in directory %q: %w", l.Blocks, c.blocks, f.o.Directory, l.Err)}
			}
		}
	}
	return max(f.machine.Now()-began, 1), nil
}

// load is what the samples say.
func (x *fileSamples) load(c *cell) *FileLoad {
	single, cached, bytes := eval.Median(x.single), eval.Median(x.cached), int64(c.loads)*c.bytes()
	l := &FileLoad{
		PageCache: x.cache, Seconds: single.Seconds(), BytesPerSecond: rate(c.bytes(), single),
		CachedSeconds: cached.Seconds(), CachedBytesPerSecond: rate(c.bytes(), cached),
		QueuedLoads: c.loads, QueuedBytesPerSecond: rate(bytes, eval.Median(x.queued)), CachedQueuedBytesPerSecond: rate(bytes, eval.Median(x.cachedQueued)),
	}
	l.RawThreads = offload.FileReaders
	l.RawBytesPerSecond, l.RawFraction = fasterRaw(bytes, &x.raw, l.QueuedBytesPerSecond)
	l.CachedRawBytesPerSecond, l.CachedRawFraction = fasterRaw(bytes, &x.cachedRaw, l.CachedQueuedBytesPerSecond)
	return l
}

// fasterRaw is the rate of the faster way, and the fraction of it that a rate is; 0 if reading took no
// time.
func fasterRaw(bytes int64, times *[len(rawWays)][]time.Duration, of float64) (raw, fraction float64) {
	for i := range times {
		if took := eval.Median(times[i]); took > 0 {
			raw = max(raw, rate(bytes, took))
		}
	}
	if raw == 0 {
		return 0, 0
	}
	return raw, of / raw
}

// fileName is how the name of a key's file begins.
func fileName(k kvcache.Key) string { return fmt.Sprintf("%016x-", binary.BigEndian.Uint64(k[:8])) }
