package kv

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
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

// copied is what the cell copies from one memory.
func (c *cell) copied(repetitions int) int64 {
	return int64(repetitions+1) * int64(1+2*c.loads) * c.bytes()
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

// Needs is the memory that a measurement allocates, in bytes: the same in each space.
func (o ReloadOptions) Needs() map[device.Space]int64 {
	o = o.EnsureDefaults()
	var most int64
	for _, c := range o.cells() {
		most = max(most, int64(c.loads)*c.bytes())
	}
	needs := map[device.Space]int64{device.Host: most, o.Compute: most}
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
	// Host and Peer are loads from each; Peer is nil without peers.
	Host *Load `json:"host"`
	Peer *Load `json:"peer"`
	// Speedup is the time of a load from the host over that of one from the peer, RawSpeedup
	// the ratio of their raw rates; 0 without peers.
	Speedup    float64 `json:"speedup,omitempty"`
	RawSpeedup float64 `json:"raw_speedup,omitempty"`
}

// Load is how fast loads from one memory are.
type Load struct {
	// Seconds of one load alone, and BytesPerSecond of it.
	Seconds        float64 `json:"load_s"`
	BytesPerSecond float64 `json:"load_bytes_per_s"`
	// QueuedBytesPerSecond is the rate of QueuedLoads loads that are queued at once.
	QueuedLoads          int     `json:"queued_loads"`
	QueuedBytesPerSecond float64 `json:"queued_bytes_per_s"`
	// RawBytesPerSecond is the rate of the same copies queued on a stream.
	RawBytesPerSecond float64 `json:"raw_bytes_per_s"`
	// RawFraction is QueuedBytesPerSecond over RawBytesPerSecond.
	RawFraction float64 `json:"raw_fraction"`
}

// Reload measures loads of KV entries to the GPU that computes, from the host and from a
// peer. Where ctx ends, the points that have been measured are returned beside the error.
func Reload(ctx context.Context, o ReloadOptions) (_ []ReloadPoint, err error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	r := &reloads{rig: rig{machine: o.Machine}, o: o}
	defer func() { err = errors.Join(err, r.close()) }()
	if err := r.open(ctx); err != nil {
		return nil, fmt.Errorf("kv: measure loads: %w", err)
	}
	cells := o.cells()
	var done, total int64
	for _, c := range cells {
		total += int64(len(r.sources)) * c.copied(o.Repetitions)
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
		done += int64(len(r.sources)) * c.copied(o.Repetitions)
		if o.Progress != nil {
			o.Progress(done, total)
		}
	}
	return points, nil
}

// reloads is a measurement of loads.
type reloads struct {
	rig
	o      ReloadOptions
	pool   device.Region
	engine *transfer.Engine
	// sources are the host, and the peer where there is one.
	sources []*source
}

// source is a memory that blocks are loaded from.
type source struct {
	region device.Region
	raw    *lane
	// landed counts loads.
	landed device.Fence
	next   uint32
}

func (r *reloads) open(ctx context.Context) (err error) {
	needs := r.o.Needs()
	if r.pool, err = r.memory(r.o.Compute, needs[r.o.Compute], "pool"); err != nil {
		return err
	}
	for _, space := range []device.Space{device.Host, r.o.Peer} {
		if len(r.sources) > 0 && space == device.Host {
			continue // no peer
		}
		s := &source{}
		if s.region, err = r.memory(space, needs[space], "offloaded"); err != nil {
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
		if s.landed, err = r.machine.NewFence("KV loads measured"); err != nil {
			return err
		}
		r.closers = append(r.closers, s.landed.Close)
		s.next = s.landed.Value()
		if host := r.sources; len(host) > 0 { // what is read has been written
			if err := s.raw.stream.Copy(s.region.Range, host[0].region.Range); err != nil {
				return err
			}
			if err := s.raw.stream.Synchronize(ctx); err != nil {
				return err
			}
		}
		r.sources = append(r.sources, s)
	}
	// Closed before the memory that it copies is freed.
	if r.engine, err = transfer.New(transfer.Options{Machine: r.machine}); err == nil {
		r.closers = append(r.closers, r.engine.Close)
	}
	return err
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

// point measures a cell.
func (r *reloads) point(ctx context.Context, c *cell) (ReloadPoint, error) {
	const single, queued, raw, ways = 0, 1, 2, 3
	p := ReloadPoint{Models: c.entry.Models, EntryBytes: c.entry.Bytes, Entries: c.count, Layout: c.layout, Blocks: c.blocks, Bytes: c.bytes()}
	times := make([][ways][]time.Duration, len(r.sources))
	requests, all := make([][][]transfer.Piece, len(r.sources)), make([][]transfer.Piece, len(r.sources))
	for i, s := range r.sources {
		requests[i] = r.requests(c, s)
		all[i] = slices.Concat(requests[i]...)
	}
	for n := range r.o.Repetitions + 1 {
		for i, s := range r.sources {
			for way, measure := range [ways]func() (time.Duration, error){
				single: func() (time.Duration, error) { return r.load(ctx, s, requests[i][:1]) },
				queued: func() (time.Duration, error) { return r.load(ctx, s, requests[i]) },
				raw:    func() (time.Duration, error) { return s.copyRaw(ctx, all[i]) },
			} {
				took, err := measure()
				if err != nil {
					return p, err
				}
				if n > 0 { // the first is slower
					times[i][way] = append(times[i][way], took)
				}
			}
		}
	}
	loads := make([]*Load, len(r.sources))
	for i := range r.sources {
		took, bytes := median(times[i][single]), int64(c.loads)*c.bytes()
		l := &Load{
			Seconds: took.Seconds(), BytesPerSecond: rate(c.bytes(), took), QueuedLoads: c.loads,
			QueuedBytesPerSecond: rate(bytes, median(times[i][queued])), RawBytesPerSecond: rate(bytes, median(times[i][raw])),
		}
		l.RawFraction = l.QueuedBytesPerSecond / l.RawBytesPerSecond
		loads[i] = l
	}
	p.Host = loads[0]
	if len(loads) > 1 {
		p.Peer = loads[1]
		p.Speedup, p.RawSpeedup = p.Host.Seconds/p.Peer.Seconds, p.Peer.RawBytesPerSecond/p.Host.RawBytesPerSecond
	}
	return p, nil
}

// load submits loads at once, waits for all of them, and returns how long it took.
func (r *reloads) load(ctx context.Context, s *source, requests [][]transfer.Piece) (time.Duration, error) {
	tickets := make([]*transfer.Ticket, len(requests))
	began := r.machine.Now()
	for i, pieces := range requests {
		s.next++
		t, err := r.engine.Submit(transfer.Request{
			Pieces: pieces, Priority: transfer.KVLoad, Done: device.Point{Fence: s.landed, Value: s.next}, Label: transfer.Text("KV load measured"),
		})
		if err != nil {
			return 0, err
		}
		tickets[i] = t
	}
	for _, t := range tickets {
		if err := t.Wait(ctx); err != nil {
			return 0, err
		}
	}
	took := max(r.machine.Now()-began, 1)
	for _, t := range tickets {
		t.Release()
	}
	return took, nil
}

// copyRaw copies pieces on the stream, and returns how long it took on the device.
func (s *source) copyRaw(ctx context.Context, pieces []transfer.Piece) (time.Duration, error) {
	lanes := []*lane{s.raw}
	if err := enqueue(lanes, len(pieces), func(_, i int) error { return s.raw.stream.Copy(pieces[i].Dst.Range, pieces[i].Src.Range) }); err != nil {
		return 0, err
	}
	return span(ctx, lanes)
}
