package experts

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
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
	// Space is the GPU's memory.
	Space device.Space
	// Backend packs experts into their layout, and makes small copies on the compute stream, on which
	// it computes, too.
	Backend kernels.Backend
	// Transfer makes the copies.
	Transfer *transfer.Engine
	// Harvest lends peer memory for Promote. It is closed before the store. Default:
	// none, and no peer tier.
	Harvest *harvest.Runtime
	// Plan of the memory: see NewPlan.
	Plan Plan
	// SplitBytes is the minimum part of a fetch that the host sends while a peer sends
	// the rest. Default: transfer.MinSplitBytes.
	SplitBytes int64
	// CPU selects experts that the CPU computes where they lie, in host memory, in layers that are
	// opened by LayerUnrouted. Default: none, all that are missing are fetched.
	CPU *CPUShare
	// Events receives migrations. Default: none.
	Events EventListener
	// Log of dropped steps and failed swaps. Default: discarded.
	Log *slog.Logger
}

// EnsureDefaults returns o with its defaults filled in.
func (o Options) EnsureDefaults() Options {
	if o.SplitBytes == 0 {
		o.SplitBytes = transfer.MinSplitBytes
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.Events = o.Events.EnsureDefaults()
	return o
}

// Store holds all experts of a model. Expert may be called from several goroutines until
// Seal. Steps, one at a time, are used by one goroutine; all other methods may be called
// from any.
//
// # Memory
//
// In the GPU's memory: the extents of the resident experts, by layer and id, and spare
// ones for swaps; the expert cache; and the tables that kernels read (see tables). In
// pinned host memory: the extents of the offloaded experts (of all experts with dynamic
// residency), in the same order, so that a wave is contiguous there and usually in the
// expert cache, and needs one copy; and images of the tables' rows, from which they are
// updated. In peers' memory: the copies that Promote has made.
//
// # Slots
//
// Each slot of the expert cache has a lease.Cell (package cache). A layer that is
// prefetched or open holds a reference on each of its slots; Use.Release releases them at
// the fence value that it enqueues on the compute stream. A slot without references is
// free for the next fetch, whose copy waits for that value.
//
// # Locks
//
// mu guards everything, in the parts too, except peer copies and promotions. A step
// releases it while it waits for the device. Peer copies and promotions are guarded by the lock of peers, which may be taken under mu; a fetch finds a peer copy
// without that lock: see peercache.Cache.Acquire.
type Store struct {
	o    Options
	plan Plan
	// peers keeps the peer copies.
	peers *peercache.Cache[ID]

	mu sync.Mutex
	// sealing: Seal has the lock.
	sealing atomic.Bool
	loader  *load.Loader // until Seal
	closed  bool
	places  *places
	fetch   *fetcher
	tables  *tables
	steps   *steps
	// inPlace has no memory where Plan.InPlaceBytes is 0.
	inPlace *inPlace
	counts  counts
	// linkTime: see LinkTime.
	linkTime time.Duration
}

// New allocates all memory of the plan; only peer memory is allocated later. An error
// wraps device.ErrOutOfMemory if the plan does not fit.
func New(o Options) (*Store, error) {
	o = o.EnsureDefaults()
	s := &Store{o: o, plan: o.Plan, places: &places{}, fetch: &fetcher{}, tables: &tables{}, inPlace: &inPlace{}}
	s.fetch.mu, s.tables.mu = &s.mu, &s.mu
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
		{&s.places.gpu, s.o.Space, p.ResidentBytes, "resident experts"},
		{&s.fetch.memory, s.o.Space, p.CacheBytes, "expert cache"},
		{&s.tables.memory, s.o.Space, p.TableBytes, "expert tables"},
		{&s.places.host, device.Host, p.HostBytes, "offloaded experts"},
		{&s.tables.images, device.Host, p.UploadBytes, "expert table images"},
		{&s.inPlace.memory, s.o.Space, p.InPlaceBytes, "expert tables, read in place"},
		{&s.inPlace.image, device.Host, p.InPlaceBytes, "image of expert tables, read in place"},
	} {
		if x.bytes == 0 {
			continue
		}
		if *x.to, err = m.Alloc(x.space, x.bytes, x.label); err != nil {
			return err
		}
	}
	if s.tables.done, err = m.NewFence("expert layers done"); err != nil {
		return err
	}
	s.tables.value = s.tables.done.Value()
	if err = s.openPeers(); err != nil {
		return err
	}
	s.counts.open(p)
	if err = s.fetch.open(p, s.o, s.peers, s.places.hostRegion, &s.counts); err != nil {
		return err
	}
	s.tables.open(&s.o, p)
	if s.inPlace.memory != nil {
		s.inPlace.open(s.o, p, s.places.host)
	}
	s.steps = newSteps(&s.mu, p, s.places, s.fetch, s.tables, s.inPlace, &s.counts, s.o)
	s.tables.address = s.steps.address
	s.loader, err = s.newLoader()
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

// Seal ends the loading: it fails if a row of an expert is missing, waits for the copies
// and frees the staging buffers. No step may begin before it.
func (s *Store) Seal(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sealing.Store(true)
	defer s.sealing.Store(false)
	if s.loader == nil {
		return errors.New("experts: the store is already sealed")
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

// firstUpload copies the first tables to the device and, with dynamic residency, the
// resident experts, which were loaded to host memory.
func (s *Store) firstUpload(ctx context.Context) (err error) {
	if s.tables.memory == nil {
		return nil
	}
	fence, err := s.o.Machine.NewFence("expert tables")
	if err != nil {
		return fmt.Errorf("experts: %w", err)
	}
	defer func() { err = errors.Join(err, fence.Close()) }()
	value := fence.Value()
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
			_ = ticket.Wait(context.WithoutCancel(ctx)) // the caller frees the memory after this
		}
		return fmt.Errorf("experts: copy the %s to %s: %w", label, s.o.Space, err)
	}
	if s.plan.Dynamic && s.o.Machine.Capabilities().KeepsData {
		for i := range s.plan.Layers {
			for e := range s.plan.Experts {
				// Not in lent memory, which may be suspended: Suspension.Copied brings those back.
				if id := (ID{i, e}); s.places.own(id) {
					if err := put(s.places.residentRegion(id), s.places.hostRegion(id), "resident experts"); err != nil {
						return err
					}
				}
			}
		}
	}
	dst, src := s.tables.initialImage(func(position int) []int { return s.steps.layers[position].list })
	return put(dst, src, "expert tables")
}

// checkSealed fails before Seal and after Close.
func (s *Store) checkSealed() error {
	switch {
	case s.closed:
		return device.ErrClosed
	case s.loader != nil:
		return errors.New("the store is not sealed")
	}
	return nil
}

// Plan is the memory plan of the store.
func (s *Store) Plan() Plan { return s.plan }

// Layout of an expert, for kernels.ExpertUp and ExpertDown.
func (s *Store) Layout() kernels.ExpertLayout { return s.plan.Layout }

// LinkTime is the busy time, between the latest two calls of BeginStep, of the busiest
// link into the GPU, on the machine's clock.
func (s *Store) LinkTime() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.linkTime
}

// PeerLost reports that a step found a peer lost: nothing more is borrowed from it, and the steps
// that follow read the host's copies.
func (s *Store) PeerLost(peer device.Space, err error) { s.peers.PeerLost(peer, err) }

// Close cancels copies or waits for them, and frees all memory. Nothing that was enqueued
// on the compute stream still runs, and harvest is closed or holds nothing of this store.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("experts: %w", device.ErrClosed)
	}
	s.closed, s.steps.closed = true, true
	_ = s.fetch.cancel(context.Background()) // with this context it waits for all
	return errors.Join(s.peers.Close(), s.free())
}

func (s *Store) free() error {
	return errors.Join(s.loader.Close(), s.places.close(), s.fetch.close(), s.tables.close(), s.inPlace.close())
}
