package kv

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/transfer"
)

// Layout is where the blocks of a load are.
type Layout string

// The layouts.
const (
	// Scattered: each block is elsewhere, in both memories.
	Scattered Layout = "scattered"
	// Contiguous: all blocks are one run, in both memories.
	Contiguous Layout = "contiguous"
)

// Entry is the KV entry of a token. Models with entries of one size are one Entry: their
// loads are the same copies.
type Entry struct {
	// Models by name, for flags and tables.
	Models []string `json:"models"`
	// Bytes of one entry.
	Bytes int64 `json:"entry_bytes"`
	// Derivations of Bytes, in the order of Models.
	Derivations []string `json:"derivations"`
}

// Entries groups models by the size of their entries, in the order of each size's first model.
func Entries(models []configs.KVEntry) []Entry {
	var all []Entry
	for _, m := range models {
		i := slices.IndexFunc(all, func(e Entry) bool { return e.Bytes == m.Bytes() })
		if i < 0 {
			i = len(all)
			all = append(all, Entry{Bytes: m.Bytes()})
		}
		all[i].Models = append(all[i].Models, m.Name)
		all[i].Derivations = append(all[i].Derivations, m.Derivation())
	}
	return all
}

// ReloadOptions describe a measurement of loads.
type ReloadOptions struct {
	Machine device.Machine
	// Compute is the memory that blocks are loaded to, Peer that of another GPU;
	// device.Host: there is none.
	Compute, Peer device.Space
	// Directory of files that blocks are loaded from, in a new folder that is removed at the end.
	// Default: files are not measured.
	Directory string
	// Kernel that the transfer engine has, as a server's. Default: none.
	Kernel *transfer.Kernel
	// Entries whose loads are measured. Required.
	Entries []Entry
	// Counts of entries, tokens, that one load has. Default: DefaultCounts.
	Counts []int
	// BlockTokens is the number of tokens of a block. Default: 16.
	BlockTokens int
	// Repetitions, whose median counts. Default: 10.
	Repetitions int
	// QueuedBytes of loads are queued at once, but 1 to 16 loads. Default: 256 MiB.
	QueuedBytes int64
	// Log of copies from and to files that fail. Default: discarded.
	Log *slog.Logger
	// Progress, if set, is called after each cell, with the bytes that have been copied and
	// all that there are to copy.
	Progress func(done, total int64)
}

const (
	defaultBlockTokens = 16
	defaultRepetitions = 10
	maxQueuedLoads     = 16
)

// DefaultCounts are the numbers of entries in the Harvest paper's Figure 7.
func DefaultCounts() []int { return []int{100, 500, 1000, 2000, 4000, 8000} }

// EnsureDefaults fills in what is zero.
func (o ReloadOptions) EnsureDefaults() ReloadOptions {
	if len(o.Counts) == 0 {
		o.Counts = DefaultCounts()
	}
	if o.BlockTokens == 0 {
		o.BlockTokens = defaultBlockTokens
	}
	if o.Repetitions == 0 {
		o.Repetitions = defaultRepetitions
	}
	if o.QueuedBytes == 0 {
		o.QueuedBytes = 256 << 20
	}
	return o
}

// Validate reports the first invalid option.
func (o ReloadOptions) Validate() error {
	switch {
	case o.Machine == nil:
		return errors.New("kv: ReloadOptions.Machine is not set")
	case len(o.Entries) == 0:
		return errors.New("kv: ReloadOptions.Entries is empty")
	case slices.ContainsFunc(o.Entries, func(e Entry) bool { return e.Bytes < 1 }):
		return errors.New("kv: an entry has no bytes")
	case o.Directory != "" && slices.ContainsFunc(o.Entries, func(e Entry) bool { return e.Bytes%shapeBytes != 0 }):
		return fmt.Errorf("kv: loads from files need entries of a multiple of %d bytes", shapeBytes)
	case slices.Min(o.Counts) < 1:
		return fmt.Errorf("kv: a load of %d entries: must have at least 1", slices.Min(o.Counts))
	case o.BlockTokens < 1 || o.Repetitions < 1 || o.QueuedBytes < 1:
		return fmt.Errorf("kv: %d tokens per block, %d repetitions, %d bytes queued: must be at least 1", o.BlockTokens, o.Repetitions, o.QueuedBytes)
	}
	return nil
}

// cell is one point that is measured.
type cell struct {
	entry  *Entry
	count  int
	layout Layout
	// blocks of a load, and loads that are queued.
	blocks, loads int
	blockBytes    int64
}

func (c *cell) bytes() int64 { return int64(c.blocks) * c.blockBytes }

// fromFiles reports whether the cell is measured from files: each block is a file, so there is no
// run of them.
func (c *cell) fromFiles(o *ReloadOptions) bool { return o.Directory != "" && c.layout == Scattered }

// copied is what the cell copies, about: a machine may have no batches.
func (c *cell) copied(o *ReloadOptions, sources int) int64 {
	n := sources * (3 + 4*c.loads)
	if c.fromFiles(o) {
		n += 2 * (1 + (1+len(rawWays))*c.loads)
	}
	return int64(o.Repetitions+1) * int64(n) * c.bytes()
}

// cells lists what is measured, in its order.
func (o *ReloadOptions) cells() []cell {
	var all []cell
	for i := range o.Entries {
		e := &o.Entries[i]
		for _, n := range o.Counts {
			for _, layout := range []Layout{Scattered, Contiguous} {
				c := cell{entry: e, count: n, layout: layout, blocks: (n + o.BlockTokens - 1) / o.BlockTokens, blockBytes: int64(o.BlockTokens) * e.Bytes}
				c.loads = int(min(max(o.QueuedBytes/c.bytes(), 1), maxQueuedLoads))
				all = append(all, c)
			}
		}
	}
	return all
}

// poolBytes is what the blocks of the largest cell take in each memory.
func (o *ReloadOptions) poolBytes() (most int64) {
	for _, c := range o.cells() {
		most = max(most, int64(c.loads)*c.bytes())
	}
	return most
}

// Needs is the memory that a measurement allocates, in bytes: the same in each space, and for
// loads from files another pool on the GPU, and on the host staging buffers, and as much for reads
// without the engine.
func (o ReloadOptions) Needs() map[device.Space]int64 {
	o = o.EnsureDefaults()
	most := o.poolBytes()
	pool, staging, _ := o.fileNeeds()
	needs := map[device.Space]int64{device.Host: most + staging, o.Compute: most + pool}
	if o.Peer != device.Host {
		needs[o.Peer] = most
	}
	return needs
}

// ReloadPoint is loads of a number of entries.
type ReloadPoint struct {
	Models     []string `json:"models"`
	EntryBytes int64    `json:"entry_bytes"`
	// Entries are the tokens whose entries are loaded, in Blocks whole blocks of Bytes
	// together.
	Entries int    `json:"entries"`
	Layout  Layout `json:"layout"`
	Blocks  int    `json:"blocks"`
	Bytes   int64  `json:"bytes"`
	// Host, Peer and File are loads from each; Peer is nil without peers, File without files and of a
	// contiguous layout.
	Host *Load     `json:"host"`
	Peer *Load     `json:"peer"`
	File *FileLoad `json:"file"`
	// Speedup is the time of a load from the host over that of one from the peer as the host
	// sees them, PlainSpeedup the same of copies without the engine, CopySpeedup as the device sees
	// them, and RawSpeedup the ratio of raw rates; 0 without peers.
	Speedup      float64 `json:"speedup,omitempty"`
	PlainSpeedup float64 `json:"plain_speedup,omitempty"`
	CopySpeedup  float64 `json:"copy_speedup,omitempty"`
	RawSpeedup   float64 `json:"raw_speedup,omitempty"`
}

// Reload measures loads of KV entries to the GPU that computes, from the host, from a
// peer, and from files. An error that wraps ErrDirectory is one of these or of their directory. Where ctx ends, the points that have been measured are returned beside the error.
func Reload(ctx context.Context, o ReloadOptions) (_ []ReloadPoint, err error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if err := o.checkRoom(); err != nil {
		return nil, fmt.Errorf("kv: %w", err)
	}
	r := &reloads{rig: rig{machine: o.Machine}, o: o}
	defer func() { err = errors.Join(err, r.close()) }()
	if err := r.open(ctx); err != nil {
		return nil, fmt.Errorf("kv: measure loads: %w", err)
	}
	cells := o.cells()
	var done, total int64
	for _, c := range cells {
		total += c.copied(&o, len(r.sources))
	}
	var points []ReloadPoint
	for _, c := range cells {
		p, err := r.point(ctx, &c)
		if err != nil {
			if ctx.Err() == nil {
				points = nil
			}
			return points, fmt.Errorf("kv: load %d entries of %d bytes, %s: %w", c.count, c.entry.Bytes, c.layout, err)
		}
		points = append(points, p)
		done += c.copied(&o, len(r.sources))
		if o.Progress != nil {
			o.Progress(done, total)
		}
	}
	return points, nil
}

// reloads is a measurement of loads.
type reloads struct {
	rig
	o    ReloadOptions
	pool device.Region
	// engine is as a server's, timed has times of the parts of loads.
	engine, timed *transfer.Engine
	// sources are the host, and the peer where there is one.
	sources []*source
	// files are those of entry, one after the other.
	files *files
	entry *Entry
}

// source is a memory that blocks are loaded from.
type source struct {
	machine device.Machine
	region  device.Region
	raw     *eval.Lane
	// copied is recorded behind what the host waits for.
	copied device.Event
	// landed is where each of the loads that are queued at once ends: a fence of its own, and the value of
	// the latest.
	landed [maxQueuedLoads]device.Point
}

func (r *reloads) open(ctx context.Context) (err error) {
	size := r.o.poolBytes()
	if r.pool, err = r.memory(r.o.Compute, size, "pool"); err != nil {
		return err
	}
	for _, space := range []device.Space{device.Host, r.o.Peer} {
		if len(r.sources) > 0 && space == device.Host {
			continue // no peer
		}
		s := &source{machine: r.machine}
		if s.region, err = r.memory(space, size, "offloaded"); err != nil {
			return err
		}
		// As the transfer engine does: copies between GPUs on a stream of the source.
		on := space
		if space == device.Host {
			on = r.o.Compute
		}
		if s.raw, err = r.lane(on, "raw copies from "+space.String()); err != nil {
			return err
		}
		if s.copied, err = r.machine.NewUntimedEvent(); err != nil {
			return err
		}
		r.closers = append(r.closers, s.copied.Close)
		for i := range s.landed {
			f, err := r.machine.NewFence("KV loads measured")
			if err != nil {
				return err
			}
			r.closers = append(r.closers, f.Close)
			s.landed[i] = device.Point{Fence: f, Value: f.Value()}
		}
		if host := r.sources; len(host) > 0 { // what is read has been written
			if err := s.raw.Stream.Copy(s.region.Range, host[0].region.Range); err != nil {
				return err
			}
			if err := s.raw.Stream.Synchronize(ctx); err != nil {
				return err
			}
		}
		r.sources = append(r.sources, s)
	}
	// Closed before the memory that they copy is freed.
	for e, timed := range map[**transfer.Engine]bool{&r.engine: false, &r.timed: true} {
		if *e, err = transfer.New(transfer.Options{Machine: r.machine, Timed: timed, Kernel: r.o.Kernel}); err != nil {
			return err
		}
		r.closers = append(r.closers, (*e).Close)
	}
	r.closers = append(r.closers, r.closeFiles)
	return nil
}

// openFiles has files be those of an entry.
func (r *reloads) openFiles(ctx context.Context, e *Entry) error {
	if r.entry == e {
		return nil
	}
	if err := r.closeFiles(); err != nil {
		return err
	}
	files, err := openFiles(ctx, &r.o, e, r.engine, r.sources[0].raw.Stream)
	if err == nil {
		r.files, r.entry = files, e
	}
	return err
}

// closeFiles removes the files that there are.
func (r *reloads) closeFiles() error {
	f := r.files
	if f == nil {
		return nil
	}
	r.files, r.entry = nil, nil
	return f.close()
}

// requests are the pieces of a cell's loads from a source.
func (r *reloads) requests(c *cell, s *source) [][]transfer.Piece {
	dst, src := blocks{r.pool, c.blockBytes}, blocks{s.region, c.blockBytes}
	all := make([][]transfer.Piece, c.loads)
	if c.layout == Contiguous {
		for i := range all {
			all[i] = []transfer.Piece{contiguous(dst, src, i*c.blocks, c.blocks)}
		}
		return all
	}
	pieces := scattered(dst, src, c.loads*c.blocks, uint64(c.count))
	for i := range all {
		all[i] = pieces[i*c.blocks : (i+1)*c.blocks]
	}
	return all
}
