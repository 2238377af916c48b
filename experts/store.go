package experts

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts/load"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/peercache"
	"github.com/moeserve/moeserve/residency"
	"github.com/moeserve/moeserve/transfer"
)

// Options describe a store.
type Options struct {
	Machine device.Machine
	// Space is the compute GPU's memory.
	Space device.Space
	// Backend packs experts.
	Backend kernels.Backend
	// Transfer makes the copies.
	Transfer *transfer.Engine
	// Harvest lends the memory of peers, for Promote. It is closed before the store.
	// Default: none, and no peer tier.
	Harvest *harvest.Runtime
	// Plan says what lies where: see NewPlan.
	Plan Plan
	// SplitBytes is the least that a fetch takes from the host while the rest of it
	// comes from a peer. Default: transfer.LeastSplit.
	SplitBytes int64
	// Events is told what moves. Default: nobody.
	Events EventListener
	// Log hears of steps that were dropped. Default: nobody.
	Log *slog.Logger
}

// EnsureDefaults returns o with its defaults filled in.
func (o Options) EnsureDefaults() Options {
	if o.SplitBytes == 0 {
		o.SplitBytes = transfer.LeastSplit
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.Events = o.Events.EnsureDefaults()
	return o
}

// Store holds all experts of a model. Expert may be called from several goroutines
// until Seal. Steps, one at a time, are for one goroutine; everything else may be called
// from any.
//
// # Memory
//
// In the compute GPU's memory: the extents of the local experts, in the order of
// layers and ids, and spare ones for swaps; the ring; and the tables, for each layer
// a row of [experts] U64 slot addresses and [experts] I32 expert ids, where ids stand
// in the order of the layer's waves, so that a wave's list is a slice of its row. In
// pinned host memory: the extents of the offloaded experts (of all, where the store is
// adaptive), in the same order, so that a wave is contiguous there and, in general, in
// the ring: one copy; and images of the tables' rows, two for each layer, from which
// they are updated. In peers' memory: what Promote has put there.
//
// # Slots
//
// Each ring slot has a residency.Cell. A layer that is being prefetched or is open
// holds a reference on each of its slots; Use.Close releases them at the fence value
// that it puts on the compute stream. A slot without references is free for the
// next fetch, whose copy waits for that value. Slots are taken in ring order from
// behind the last one taken.
//
// # Locks
//
// mu guards everything but what is in peers' memory or moving, which is the cache's, with
// a lock of its own that may be taken under mu. A fetch resolves an expert without that:
// see peercache.Cache.Acquire.
type Store struct {
	o    Options
	plan Plan

	local, ring, host, table, upload device.Memory
	// position of a model layer in plan.Layers.
	position map[int]int
	// hostAt is the offset of each expert's extent in host, -1 where it has none.
	hostAt [][]int64

	// passed is raised by Use.Close on the compute stream.
	passed      device.Fence
	passedValue uint32

	// peers keeps copies in peers' memory.
	peers *peercache.Cache[ID]

	mu     sync.Mutex
	loader *load.Loader // until Seal
	closed bool
	slots  []slot
	next   int // where the search for a free slot starts
	layers []layer
	spare  []spareExtent
	swaps  []*swap
	// fetches that have not been seen to end.
	fetches []*fetch
	err     error
	step    stepState
	// mistrust is after how many calls of BeginStep fetches use peers again.
	mistrust int
	stats    Stats
	counts   counts
	links    *transfer.Inbound
	linkTime time.Duration
	// What bring works with, and fetches that nobody refers to, to be used again.
	runs  []run
	after []device.Point
	loads []transfer.Load
	spent []*fetch

	without safeguards
}

// safeguards can be taken away one at a time by tests, which show that this is found
// out. The zero value has all of them.
type safeguards struct{ noReference, noArrival, noReaders bool }

// counts of every expert: [position][expert].
type counts struct{ fetches, uses, activations [][]int64 }

// slot is one extent of the ring.
type slot struct {
	cell residency.Cell
	// holds is the expert that is here where the cell is valid.
	holds ID
	// copies bring it, at most one of each kind; none where the host knows that it is
	// here.
	copies []*fetch
	// awaited says that the compute stream has waited for the copies, or will.
	awaited bool
	// from is the tier it came from. fresh: no use has counted that yet; ahead: it was
	// submitted ahead of need.
	from         Tier
	fresh, ahead bool
	// landed are raised by the copies whose first extent goes here, values their last.
	landed [2]device.Fence
	values [2]uint32
}

// The kinds of copies into a slot: the one from where the expert is, and the part
// that comes from the host at the same time.
const (
	mainCopy = iota
	hostPart
)

// nothing is what a slot holds whose copy failed.
var nothing = ID{-1, -1}

// layer is what the store knows of one layer with experts.
type layer struct {
	// localAt is the offset of each local expert's extent in local, -1 for others.
	localAt []int64
	// list has the experts in the order of the row of ids: residents local ones, then
	// those of the waves.
	list      []int
	residents int
	// ids is the row's list in device memory.
	ids kernels.Tensor
	use Use
	// row is the tables' row as it must be, image as the device has it; moved says that
	// what it has of local experts is out of date.
	row, image []byte
	moved      bool
	// rows are until when each pinned image of the row is being read; turn is the
	// next to be used.
	rows [uploadRows]uint32
	turn int
	sent int // the one sent for this use, or -1

	// refs on the slots of offloaded experts, held from a prefetch or the opening to
	// Close; slot is where the last fetch of each went, or -1.
	refs []residency.Ref
	slot []int
	// guessed and chosen experts of this use.
	guessed, chosen []bool
}

// fetch is one copy into the ring, of experts that are neighbors in both places, or
// of the part of them that comes from the host. It names the copy.
type fetch struct {
	// layer by the model's number, and the experts copied.
	layer, first, last int
	// refs counts the lists that have it: Store.fetches, and slot.copies.
	refs int
	// ticket is nil where the copy was not submitted.
	ticket *transfer.Ticket
	done   device.Point
	from   device.Space
	bytes  int64
	slots  []int
	// copies in peers' memory that are read.
	copies []*peercache.Copy[ID]
}

// New allocates everything the plan says, and nothing later but staging and what
// harvest lends. An error wraps device.ErrOutOfMemory where it does not fit.
func New(o Options) (*Store, error) {
	o = o.EnsureDefaults()
	s := &Store{o: o, plan: o.Plan, links: o.Transfer.Inbound(o.Space)}
	if err := s.allocate(); err != nil {
		return nil, errors.Join(fmt.Errorf("experts: %w", err), s.free())
	}
	return s, nil
}

func (s *Store) allocate() (err error) {
	p := s.plan
	for _, m := range []struct {
		to    *device.Memory
		space device.Space
		bytes int64
		label string
	}{
		{&s.local, s.o.Space, p.LocalBytes, "local experts"},
		{&s.ring, s.o.Space, p.RingBytes, "expert ring"},
		{&s.table, s.o.Space, p.TableBytes, "expert tables"},
		{&s.host, device.Host, p.HostBytes, "offloaded experts"},
		{&s.upload, device.Host, p.UploadBytes, "expert table images"},
	} {
		if m.bytes == 0 {
			continue
		}
		if *m.to, err = s.o.Machine.Alloc(m.space, m.bytes, m.label); err != nil {
			return err
		}
	}
	if s.passed, err = s.o.Machine.NewFence("expert layers done"); err != nil {
		return err
	}
	s.slots = make([]slot, p.RingSlots)
	for i := range s.slots {
		for k := range s.slots[i].landed {
			if s.slots[i].landed[k], err = s.o.Machine.NewFence(fmt.Sprintf("expert ring slot %d", i)); err != nil {
				return err
			}
		}
	}
	s.spare = make([]spareExtent, p.SpareSlots)
	for i := range s.spare {
		f, err := s.o.Machine.NewFence("expert to stay")
		if err != nil {
			return err
		}
		s.spare[i].done.Fence = f
	}
	if err = s.openPeers(); err != nil {
		return err
	}
	s.step.open = -1
	s.arrange()
	s.loader, err = load.New(load.Options{
		Machine: s.o.Machine, Transfer: s.o.Transfer, Packer: s.o.Backend, Layout: p.Layout,
		Layers: p.Layers, Experts: p.Experts, StagingBytes: p.StagingBytes,
	}, s.place)
	return err
}

// arrange gives every expert its place.
func (s *Store) arrange() {
	p := s.plan
	s.position = map[int]int{}
	s.layers = make([]layer, len(p.Layers))
	var localBytes, hostBytes int64
	for i, number := range p.Layers {
		s.position[number] = i
		l := &s.layers[i]
		l.sent = -1
		l.localAt = slices.Repeat([]int64{-1}, p.Experts)
		hostAt := slices.Repeat([]int64{-1}, p.Experts)
		for e := range p.Experts {
			_, offloaded := slices.BinarySearch(p.Placement[i], e)
			if offloaded || p.Adaptive {
				hostAt[e], hostBytes = hostBytes, hostBytes+p.Layout.Size
			}
			if !offloaded {
				l.localAt[e], localBytes = localBytes, localBytes+p.Layout.Size
			}
		}
		s.hostAt = append(s.hostAt, hostAt)
		for _, c := range []*[][]int64{&s.counts.fetches, &s.counts.uses, &s.counts.activations} {
			*c = append(*c, make([]int64, p.Experts))
		}

		row := s.table.Range(int64(i)*p.rowBytes(), p.rowBytes())
		l.use.Slots = kernels.New(row.Addr, kernels.U64, p.Experts)
		l.ids = kernels.New(row.Slice(int64(p.Experts)*slotBytes, int64(p.Experts)*idBytes).Addr, kernels.I32, p.Experts)
		l.row = make([]byte, p.rowBytes())
		l.refs = make([]residency.Ref, p.Experts)
		l.slot = slices.Repeat([]int{-1}, p.Experts)
		l.guessed, l.chosen = make([]bool, p.Experts), make([]bool, p.Experts)
		l.listAll()
	}
	for i := range s.spare {
		s.spare[i].at = localBytes
		localBytes += p.Layout.Size
	}
}

// place is where an expert is loaded to: its host copy, where it has one.
func (s *Store) place(layer, expert int) load.Place {
	if at := s.hostAt[layer][expert]; at >= 0 {
		return load.Place{Memory: s.host, Offset: at}
	}
	return load.Place{Memory: s.local, Offset: s.layers[layer].localAt[expert]}
}

// listAll puts the layer's experts in their order: local ones first.
func (l *layer) listAll() {
	l.list = l.list[:0]
	for e, at := range l.localAt {
		if at >= 0 {
			l.list = append(l.list, e)
		}
	}
	l.residents = len(l.list)
	for e, at := range l.localAt {
		if at < 0 {
			l.list = append(l.list, e)
		}
	}
}

// missing are the offloaded experts, ascending, once listAll was the last to change
// the list.
func (l *layer) missing() []int { return l.list[l.residents:] }

// Expert takes rows [row, row+n) of one matrix of one expert, row-major as
// checkpoints have them, n being len(data) / the row's bytes. layer is the model's
// number. Different calls may come from several goroutines.
func (s *Store) Expert(layer, expert int, part kernels.Part, row int, data []byte) error {
	wrap := func(err error) error {
		return fmt.Errorf("experts: load layer %d expert %d: %w", layer, expert, err)
	}
	s.mu.Lock()
	loader := s.loader
	s.mu.Unlock()
	if loader == nil {
		return wrap(errors.New("the store is sealed"))
	}
	if err := loader.Rows(layer, expert, part, row, data); err != nil {
		return wrap(err)
	}
	return nil
}

// Seal ends the loading: it fails where a row of an expert is missing, waits for
// the copies and frees the staging memory. Nothing is used before it.
func (s *Store) Seal(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.loader == nil {
		return errors.New("experts: the store is sealed")
	}
	if err := s.loader.Finish(ctx); err != nil {
		return err
	}
	if err := s.firstUpload(ctx); err != nil {
		return err
	}
	s.loader = nil
	return nil
}

// firstUpload brings the first tables to the device, and, where the store is adaptive,
// the local experts, of which all rows lie in host memory.
func (s *Store) firstUpload(ctx context.Context) (err error) {
	if s.table == nil {
		return nil
	}
	fence, err := s.o.Machine.NewFence("expert tables")
	if err != nil {
		return fmt.Errorf("experts: %w", err)
	}
	defer func() { err = errors.Join(err, fence.Close()) }()
	value := uint32(0)
	put := func(dst, src device.Region, label string) error {
		value++
		ticket, err := s.o.Transfer.Submit(transfer.Request{
			Src: src, Dst: dst, Priority: transfer.Needed, Label: transfer.Text(label), Done: device.Point{Fence: fence, Value: value},
		})
		if err == nil {
			if err = ticket.Wait(ctx); err == nil {
				return nil
			}
			ticket.Cancel()
			_ = ticket.Wait(context.WithoutCancel(ctx)) // the memory is given back behind this
		}
		return fmt.Errorf("experts: bring the %s to %s: %w", label, s.o.Space, err)
	}
	for i := range s.layers {
		l := &s.layers[i]
		if s.plan.Adaptive && s.o.Machine.Capabilities().KeepsData {
			for e, at := range l.localAt {
				if at < 0 {
					continue
				}
				if err := put(s.local.Region(at, s.plan.Layout.Size), s.hostRegion(ID{i, e}), "local experts"); err != nil {
					return err
				}
			}
		}
		s.fillRow(l)
		copy(s.upload.Write(int64(i)*s.plan.rowBytes(), s.plan.rowBytes()), l.row)
		l.image = slices.Clone(l.row)
	}
	return put(s.table.Region(0, s.plan.TableBytes), s.upload.Region(0, s.plan.TableBytes), "expert tables")
}

// hostRegion is the expert's extent in host memory.
func (s *Store) hostRegion(id ID) device.Region {
	return s.host.Region(s.hostAt[id.Layer][id.Expert], s.plan.Layout.Size)
}

// fillRow writes the layer's row as it must be. An offloaded expert's address is
// that of the slot it was last fetched to, or 0.
func (s *Store) fillRow(l *layer) {
	ids := l.row[int64(s.plan.Experts)*slotBytes:]
	for e, at := range l.localAt {
		var a uint64
		switch {
		case at >= 0:
			a = uint64(s.local.Range(at, s.plan.Layout.Size).Addr)
		case l.slot[e] >= 0:
			a = uint64(s.ring.Range(int64(l.slot[e])*s.plan.Layout.Size, s.plan.Layout.Size).Addr)
		}
		binary.NativeEndian.PutUint64(l.row[e*slotBytes:], a)
	}
	for n, e := range l.list {
		binary.NativeEndian.PutUint32(ids[n*idBytes:], uint32(e))
	}
}

// Plan is what the store was made of.
func (s *Store) Plan() Plan { return s.plan }

// Layers lists the model's layers that have experts, ascending.
func (s *Store) Layers() []int { return s.plan.Layers }

// Next is the layer whose experts are wanted after those of layer: the next one
// with experts, or, behind the last, the first. layer itself need not have any. It
// is -1 for a model without experts.
func (s *Store) Next(layer int) int {
	if len(s.plan.Layers) == 0 {
		return -1
	}
	i, found := slices.BinarySearch(s.plan.Layers, layer)
	if found {
		i++
	}
	return s.plan.Layers[i%len(s.plan.Layers)]
}

// Layout of an expert, for kernels.ExpertUp and ExpertDown.
func (s *Store) Layout() kernels.ExpertLayout { return s.plan.Layout }

// Missing is how many experts of a layer, by the model's number, are not local: 0 for
// a layer without experts.
func (s *Store) Missing(layer int) int {
	i, ok := s.position[layer]
	if !ok {
		return 0
	}
	return len(s.plan.Placement[i]) // swaps take one for one
}

// Close waits for the copies under way and frees all memory. Nothing that was
// enqueued on the compute stream may still run, and harvest is closed, or has nothing
// of this store.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("experts: %w", device.ErrClosed)
	}
	s.closed = true
	s.cancel()
	for _, f := range s.fetches {
		if f.ticket != nil {
			_ = f.ticket.Wait(context.Background()) // a copy that failed is over, too
		}
	}
	for _, w := range s.swaps {
		w.ticket.Cancel()
		_ = w.ticket.Wait(context.Background())
		s.spare = append(s.spare, w.to)
	}
	return errors.Join(s.peers.Close(), s.free())
}

func (s *Store) free() error {
	errs := []error{s.loader.Close()}
	for _, m := range []device.Memory{s.local, s.ring, s.host, s.table, s.upload} {
		if m != nil {
			errs = append(errs, m.Free())
		}
	}
	fences := []device.Fence{s.passed}
	for _, x := range s.spare {
		fences = append(fences, x.done.Fence)
	}
	for i := range s.slots {
		fences = append(fences, s.slots[i].landed[:]...)
	}
	for _, f := range fences {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}
