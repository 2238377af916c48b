package experts

import (
	"context"
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts/load"
	"github.com/moeserve/moeserve/transfer"
)

// Suspension is what becomes of a store's memory while its model sleeps. The store's owner suspends
// the memories and resumes them.
type Suspension struct {
	// GPU has the memories in the GPU, Host that of the experts in host memory.
	GPU, Host []device.Memory
	// Alone are experts that only the GPU's memory has.
	Alone []device.Region
	// Copied are resident experts that host memory has, too: the copies that bring them back. Where
	// an expert is in lent memory, a copy goes to a region outside of GPU.
	Copied []transfer.Piece
}

// Suspend prepares the store for the suspension of its memory: it waits for all moves of experts,
// and forgets what is in the expert cache and in the tables. No step runs, and none may begin, nor
// any expert be moved, until the memory is resumed and has its content again. Peer copies stay.
func (s *Store) Suspend(ctx context.Context) (Suspension, error) {
	fail := func(err error) (Suspension, error) { return Suspension{}, fmt.Errorf("experts: suspend: %w", err) }
	if err := s.WaitMoves(ctx); err != nil {
		return fail(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.checkSealed(); err != nil {
		return fail(err)
	}
	if s.steps.running {
		return fail(errors.New("a step is running"))
	}
	s.places.completeSwaps(s.steps.onSwapped)
	s.places.settleAll(s.steps.onLent)
	if err := s.steps.reset(ctx); err != nil {
		return fail(err)
	}
	s.fetch.forget()
	return s.suspension(), nil
}

func (s *Store) suspension() Suspension {
	var x Suspension
	for _, m := range []device.Memory{s.places.gpu, s.fetch.memory, s.tables.memory, s.inPlace.memory} {
		if m != nil {
			x.GPU = append(x.GPU, m)
		}
	}
	if s.places.host != nil {
		x.Host = append(x.Host, s.places.host)
	}
	for l := range s.plan.Layers {
		for e := range s.plan.Experts {
			id := ID{l, e}
			switch {
			case !s.places.resident(id):
			case s.places.hostOffset[l][e] < 0:
				x.Alone = append(x.Alone, s.places.residentRegion(id))
			default:
				x.Copied = append(x.Copied, transfer.Piece{Dst: s.places.residentRegion(id), Src: s.places.hostRegion(id)})
			}
		}
	}
	return x
}

// forget empties the expert cache. No slot has references, and no fetch is in progress.
func (f *fetcher) forget() {
	for at := range f.slots {
		f.cache.Clear(at)
	}
}

// Reload opens a suspended store for Expert and Seal, as New does: all experts are loaded again,
// to where each is now. Nothing else may use the store until Seal.
func (s *Store) Reload() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.checkSealed(); err != nil {
		return fmt.Errorf("experts: reload: %w", err)
	}
	var err error
	if s.loader, err = s.newLoader(); err != nil {
		return fmt.Errorf("experts: reload: %w", err)
	}
	return nil
}

// EndReload ends a Reload that Seal has not ended: what was loaded is undefined.
func (s *Store) EndReload() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.loader
	s.loader = nil
	return l.Close()
}

func (s *Store) newLoader() (*load.Loader, error) {
	p := &s.plan
	return load.New(load.Options{
		Machine: s.o.Machine, Transfer: s.o.Transfer, Packer: s.o.Backend, Layout: p.Layout,
		Layers: p.Layers, Experts: p.Experts, StagingBytes: p.StagingBytes,
	}, s.places.loadTarget)
}
