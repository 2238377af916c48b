package experts

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
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
	// Plan says what lies where: see NewPlan.
	Plan Plan
	// NoData says that the machine keeps no bytes: Expert checks and counts what it is
	// given and moves nothing. Fetches cost the time that they cost. Default: off.
	NoData bool
	// Logger hears of resets. Default: none.
	Logger *slog.Logger
}

// Store holds all experts of a model. Expert may be called from several goroutines
// until Seal; Prefetch, Open, Done and Reset are for one goroutine; Err, Stats,
// Fetches and Residency may be called from any.
//
// # Memory
//
// In the compute GPU's memory: the extents of the local experts, in the order of
// layers and ids; the ring; and the table, [layers, experts] U64 slot addresses
// followed by [layers, experts] I32 expert ids, where a layer's ids stand in the
// order of its waves, so that a wave's list is a slice of its row. In pinned host
// memory: the extents of the offloaded experts, in the same order, so that a wave
// is contiguous there and, in general, in the ring: one copy; and images of the
// slot table's rows, two for each layer, from which they are updated.
//
// # Slots
//
// Each ring slot has a residency.Cell. A layer that is being prefetched or is open
// holds a reference on each of its slots; Done releases them at the fence value
// that it puts on the compute stream. A slot without references is free for the
// next fetch, whose copy waits for that value. Slots are taken in ring order from
// behind the last one taken.
type Store struct {
	o    Options
	plan Plan
	log  *slog.Logger

	local, ring, host, table, upload device.Memory
	// position of a model layer in plan.Layers; offset of each expert's extent in
	// local or host.
	position  map[int]int
	offset    [][]int64
	offloaded [][]bool

	// passed is raised by Done on the compute stream.
	passed      device.Fence
	passedValue uint32

	mu       sync.Mutex
	coverage *coverage // until Seal
	staging  staging   // until Seal; nil where nothing is local, or no data is kept
	sealed   bool
	closed   bool
	slots    []slot
	next     int // where the search for a free slot starts
	layers   []layer
	// fetches that have not been seen to end.
	fetches []*fetch
	err     error
	stats   Stats
	counts  [][]int64
}

// slot is one extent of the ring.
type slot struct {
	cell residency.Cell
	// holds is the expert that is here where the cell is valid.
	holds ID
	// arrival is reached when it is here; none where the host knows that it is.
	arrival transfer.Point
	// landed is raised by the copies whose first extent goes here, value its last.
	landed device.Fence
	value  uint32
}

// nothing is what a slot holds whose copy failed.
var nothing = ID{-1, -1}

// layer is what the store knows of one layer with experts.
type layer struct {
	missing []int // the offloaded experts, ascending
	// waves are the ranges of missing that are launched together.
	waves [][2]int
	use   Use
	// want is the slot table's row as it must be, image as the device has it.
	want, image []uint64
	// rows are until when each pinned image of the row is being read; turn is the
	// next to be used.
	rows [uploadRows]uint32
	turn int
	sent int // the one sent for this use, or -1

	open bool
	// refs on the slots of missing, held from Prefetch or Open to Done; slot is
	// where the last fetch of each went, or -1.
	refs []residency.Ref
	slot []int
	// fetches of this use, and how its experts were found.
	fetches                  []*fetch
	hits, misses, prefetched int64
}

// fetch is one copy into the ring: of experts that are neighbors in both places.
type fetch struct {
	ticket *transfer.Ticket
	slots  []int
}

// New allocates everything the plan says, and nothing later but staging. An error
// wraps device.ErrOutOfMemory where it does not fit.
func New(o Options) (*Store, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Store{o: o, plan: o.Plan, log: o.Logger}
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
		if s.slots[i].landed, err = s.o.Machine.NewFence(fmt.Sprintf("expert ring slot %d", i)); err != nil {
			return err
		}
	}
	s.coverage = newCoverage(p.Layout.ExpertShape, p.LocalExperts+p.OffloadedExperts)
	if p.LocalExperts > 0 && !s.o.NoData {
		if p.Layout.Tag == rowMajor {
			s.staging, err = newPieces(s.o)
		} else {
			s.staging, err = newExtents(s.o)
		}
		if err != nil {
			s.staging = nil
			return err
		}
	}
	s.arrange()
	return nil
}

// arrange gives every expert its place, its wave and its table entry.
func (s *Store) arrange() {
	p := s.plan
	s.position = map[int]int{}
	s.layers = make([]layer, len(p.Layers))
	var localBytes, hostBytes int64
	for i, number := range p.Layers {
		s.position[number] = i
		l := &s.layers[i]
		l.missing, l.sent = p.Placement[i], -1
		l.want = make([]uint64, p.Experts)
		offloaded, offset := make([]bool, p.Experts), make([]int64, p.Experts)
		for _, e := range l.missing {
			offloaded[e] = true
		}
		for e := range p.Experts {
			if offloaded[e] {
				offset[e], hostBytes = hostBytes, hostBytes+p.Layout.Size
				continue
			}
			offset[e] = localBytes
			l.want[e] = uint64(s.local.Range(localBytes, p.Layout.Size).Addr)
			localBytes += p.Layout.Size
		}
		s.offloaded, s.offset = append(s.offloaded, offloaded), append(s.offset, offset)
		s.counts = append(s.counts, make([]int64, p.Experts))

		resident := p.Experts - len(l.missing)
		ids := kernels.New(s.table.Range(s.idsAt(i), int64(p.Experts)*idBytes).Addr, kernels.I32, p.Experts)
		l.use.Slots = kernels.New(s.table.Range(s.rowAt(0, i), int64(p.Experts)*slotBytes).Addr, kernels.U64, p.Experts)
		if resident > 0 {
			l.use.Waves = append(l.use.Waves, Wave{Experts: ids.Slice(0, resident)})
		}
		n := min(p.Waves, len(l.missing))
		from := 0
		for w := range n {
			to := from + share(w, n, len(l.missing))
			l.waves = append(l.waves, [2]int{from, to})
			l.use.Waves = append(l.use.Waves, Wave{Experts: ids.Slice(resident+from, resident+to)})
			from = to
		}
		l.refs = make([]residency.Ref, len(l.missing))
		l.slot = slices.Repeat([]int{-1}, len(l.missing))
	}
}

// rowAt is the offset of a layer's row in an image of the slot table: image 0 of
// upload, or the table itself; idsAt that of its ids in the table.
func (s *Store) rowAt(image, layer int) int64 {
	return int64(image*len(s.plan.Layers)+layer) * int64(s.plan.Experts) * slotBytes
}

func (s *Store) idsAt(layer int) int64 {
	return s.rowAt(1, 0) + int64(layer*s.plan.Experts)*idBytes
}

// Expert takes rows [row, row+n) of one matrix of one expert, row-major as
// checkpoints have them, n being len(data) / the row's bytes. layer is the model's
// number. Different calls may come from several goroutines.
func (s *Store) Expert(layer, expert int, part kernels.Part, row int, data []byte) error {
	wrap := func(err error) error {
		return fmt.Errorf("experts: load layer %d expert %d: %w", layer, expert, err)
	}
	position, ok := s.position[layer]
	if !ok {
		return wrap(errors.New("this layer has no experts"))
	}
	if expert < 0 || expert >= s.plan.Experts {
		return wrap(fmt.Errorf("the layer has %d experts", s.plan.Experts))
	}
	if part > kernels.W2 {
		return wrap(fmt.Errorf("there is no part %d", uint8(part)))
	}
	s.mu.Lock()
	coverage, staging := s.coverage, s.staging
	s.mu.Unlock()
	if coverage == nil {
		return wrap(errors.New("the store is sealed"))
	}
	rows, bytes := rowsOf(s.plan.Layout.ExpertShape, part), rowBytes(s.plan.Layout.ExpertShape, part)
	n := len(data) / bytes
	if len(data)%bytes != 0 || row < 0 || row+n > rows {
		return wrap(fmt.Errorf("%d bytes from row %d on do not fit %v, which has %d rows of %d bytes", len(data), row, part, rows, bytes))
	}
	id := ID{position, expert}
	if err := coverage.add(id, part, row, n); err != nil {
		return wrap(err)
	}
	if n == 0 || s.o.NoData {
		return nil
	}
	offset, size := s.offset[position][expert], s.plan.Layout.Size
	var err error
	if s.offloaded[position][expert] {
		err = s.o.Backend.PackExpert(s.plan.Layout, part, row, data, s.host.Write(offset, size))
	} else {
		err = staging.write(id, s.local.Range(offset, size), part, row, data)
	}
	if err != nil {
		return wrap(err)
	}
	return nil
}

// Seal ends the loading: it fails where a row of an expert is missing, waits for
// the copies and frees the staging memory. Nothing is used before it.
func (s *Store) Seal(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.coverage == nil {
		return errors.New("experts: the store is sealed")
	}
	if err := s.coverage.missing(s.plan.Layers, s.plan.Experts); err != nil {
		return err
	}
	if s.staging != nil {
		if err := s.staging.flush(ctx); err != nil {
			return fmt.Errorf("experts: bring local experts to %s: %w", s.o.Space, err)
		}
		if err := s.staging.close(); err != nil {
			return fmt.Errorf("experts: free staging memory: %w", err)
		}
		s.staging = nil
	}
	if err := s.uploadTables(ctx); err != nil {
		return fmt.Errorf("experts: bring the tables to %s: %w", s.o.Space, err)
	}
	s.coverage, s.sealed = nil, true
	return nil
}

// uploadTables brings the first slot table and all expert ids to the device.
func (s *Store) uploadTables(ctx context.Context) (err error) {
	if s.table == nil {
		return nil
	}
	// The ids lie behind all images of the slot table.
	slots, ids := s.rowAt(1, 0), s.rowAt(uploadRows, 0)
	image := s.upload.Write(0, slots)
	list := s.upload.Write(ids, s.plan.TableBytes-slots)
	for i := range s.layers {
		l := &s.layers[i]
		putRow(image[s.rowAt(0, i):], l.want)
		l.image = slices.Clone(l.want)
		n := i * s.plan.Experts
		put := func(e int) {
			binary.NativeEndian.PutUint32(list[n*idBytes:], uint32(e))
			n++
		}
		for e, offloaded := range s.offloaded[i] {
			if !offloaded {
				put(e)
			}
		}
		for _, e := range l.missing {
			put(e)
		}
	}
	fence, err := s.o.Machine.NewFence("expert tables")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, fence.Close()) }()
	for i, r := range []transfer.Request{
		{Src: s.upload.Range(0, slots), Dst: s.table.Range(0, slots)},
		{Src: s.upload.Range(ids, s.plan.TableBytes-slots), Dst: s.table.Range(slots, s.plan.TableBytes-slots)},
	} {
		r.From, r.To, r.Priority, r.Label = device.Host, s.o.Space, transfer.Needed, "expert tables"
		r.Done = transfer.Point{Fence: fence, Value: uint32(i + 1)}
		ticket, err := s.o.Transfer.Submit(r)
		if err != nil {
			return err
		}
		if err := ticket.Wait(ctx); err != nil {
			ticket.Cancel()
			_ = ticket.Wait(context.WithoutCancel(ctx)) // the memory is given back behind this
			return err
		}
	}
	return nil
}

func putRow(to []byte, row []uint64) {
	for e, a := range row {
		binary.NativeEndian.PutUint64(to[e*slotBytes:], a)
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

// Close waits for the copies under way and frees all memory. Nothing that was
// enqueued on the compute stream may still run.
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
	return s.free()
}

func (s *Store) free() error {
	var errs []error
	if s.staging != nil {
		errs = append(errs, s.staging.close())
	}
	for _, m := range []device.Memory{s.local, s.ring, s.host, s.table, s.upload} {
		if m != nil {
			errs = append(errs, m.Free())
		}
	}
	for i := range s.slots {
		if f := s.slots[i].landed; f != nil {
			errs = append(errs, f.Close())
		}
	}
	if s.passed != nil {
		errs = append(errs, s.passed.Close())
	}
	return errors.Join(errs...)
}
