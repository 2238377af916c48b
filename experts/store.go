package experts

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts/load"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/peercache"
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
// Each ring slot has a lease.Cell (package ring). A layer that is being prefetched or is
// open holds a reference on each of its slots; Use.Release releases them at the fence value
// that it puts on the compute stream. A slot without references is free for the
// next fetch, whose copy waits for that value.
//
// # Locks
//
// mu guards everything, in the parts too, but what is in peers' memory or moving. That is
// the cache's, whose lock may be taken under mu; a fetch resolves an expert without it: see
// peercache.Cache.Acquire.
type Store struct {
	o    Options
	plan Plan
	// peers keeps copies in peers' memory.
	peers *peercache.Cache[ID]

	mu     sync.Mutex
	loader *load.Loader // until Seal
	closed bool
	places *places
	fetch  *fetcher
	tables *tables
	steps  *steps
	counts counts
	// linkTime: see LinkTime.
	linkTime time.Duration
}

// New allocates everything the plan says, and nothing later but staging and what
// harvest lends. An error wraps device.ErrOutOfMemory where it does not fit.
func New(o Options) (*Store, error) {
	o = o.EnsureDefaults()
	s := &Store{o: o, plan: o.Plan, places: &places{}, fetch: &fetcher{}, tables: &tables{}}
	if err := s.allocate(); err != nil {
		return nil, errors.Join(fmt.Errorf("experts: %w", err), s.free())
	}
	return s, nil
}

func (s *Store) allocate() (err error) {
	p, m := &s.plan, s.o.Machine
	if s.places, err = newPlaces(p, m); err != nil {
		return err
	}
	for _, x := range []struct {
		to    *device.Memory
		space device.Space
		bytes int64
		label string
	}{
		{&s.places.gpu, s.o.Space, p.ResidentBytes, "local experts"},
		{&s.fetch.memory, s.o.Space, p.CacheBytes, "expert ring"},
		{&s.tables.memory, s.o.Space, p.TableBytes, "expert tables"},
		{&s.places.host, device.Host, p.HostBytes, "offloaded experts"},
		{&s.tables.images, device.Host, p.UploadBytes, "expert table images"},
	} {
		if x.bytes == 0 {
			continue
		}
		if *x.to, err = m.Alloc(x.space, x.bytes, x.label); err != nil {
			return err
		}
	}
	if s.tables.passed, err = m.NewFence("expert layers done"); err != nil {
		return err
	}
	if err = s.openPeers(); err != nil {
		return err
	}
	s.counts.open(p)
	if err = s.fetch.open(p, s.o, s.peers, s.places.hostRegion, &s.counts); err != nil {
		return err
	}
	s.tables.open(p)
	s.steps = newSteps(&s.mu, p, s.places, s.fetch, s.tables, &s.counts, s.o)
	s.tables.address = s.steps.address
	s.loader, err = load.New(load.Options{
		Machine: m, Transfer: s.o.Transfer, Packer: s.o.Backend, Layout: p.Layout,
		Layers: p.Layers, Experts: p.Experts, StagingBytes: p.StagingBytes,
	}, s.places.loaded)
	return err
}

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
	if s.tables.memory == nil {
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
			Src: src, Dst: dst, Priority: transfer.Demand, Label: transfer.Text(label), Done: device.Point{Fence: fence, Value: value},
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
	if s.plan.Dynamic && s.o.Machine.Capabilities().KeepsData {
		for i := range s.plan.Layers {
			for e := range s.plan.Experts {
				if id := (ID{i, e}); s.places.resident(id) {
					if err := put(s.places.residentRegion(id), s.places.hostRegion(id), "local experts"); err != nil {
						return err
					}
				}
			}
		}
	}
	dst, src := s.tables.first(func(position int) []int { return s.steps.layers[position].list })
	return put(dst, src, "expert tables")
}

// unsealed says why there can be no steps yet, or no more.
func (s *Store) unsealed() error {
	switch {
	case s.closed:
		return device.ErrClosed
	case s.loader != nil:
		return errors.New("the store is not sealed")
	}
	return nil
}

// Plan is what the store was made of.
func (s *Store) Plan() Plan { return s.plan }

// Layout of an expert, for kernels.ExpertUp and ExpertDown.
func (s *Store) Layout() kernels.ExpertLayout { return s.plan.Layout }

// LinkTime is for how long the link into the compute GPU that was longest at work was so
// between the latest two calls of BeginStep, by the machine's clock.
func (s *Store) LinkTime() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.linkTime
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
	s.closed, s.steps.closed = true, true
	_ = s.fetch.cancel(context.Background()) // which waits for all
	return errors.Join(s.peers.Close(), s.free())
}

func (s *Store) free() error {
	return errors.Join(s.loader.Close(), s.places.close(), s.fetch.close(), s.tables.close())
}
