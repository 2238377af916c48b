package harvest

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
)

// resources are a runtime's resources on the machine: the slabs' memory, scrubbers and
// monitor.
type resources struct {
	machine device.Machine
	monitor Monitor
	// ownMonitor is the default monitor, which the runtime closes.
	ownMonitor *MachineMonitor
	zeros      device.Memory
	peers      []device.Space
	// scrubbers are used by the goroutine that ticks.
	scrubbers map[device.Space]*scrubber

	mu     sync.Mutex
	memory map[uint64]device.Memory // by slab
}

// open allocates the resources; close releases them, also after an error.
func (r *resources) open(o Options) (err error) {
	r.machine, r.monitor, r.peers = o.Machine, o.Monitor, o.Peers
	r.scrubbers, r.memory = map[device.Space]*scrubber{}, map[uint64]device.Memory{}
	if r.zeros, err = r.machine.Alloc(device.Host, o.ScrubBytes, "harvest zeros"); err != nil {
		return fmt.Errorf("harvest: %w", err)
	}
	clear(r.zeros.Write(0, o.ScrubBytes))
	for _, p := range r.peers {
		s, err := newScrubber(r.machine, p, r.zeros)
		if err != nil {
			return err
		}
		r.scrubbers[p] = s
	}
	if r.monitor == nil {
		if r.ownMonitor, err = NewMachineMonitor(r.machine, r.peers); err != nil {
			return err
		}
		r.monitor = r.ownMonitor
	}
	return nil
}

// close releases everything. There are no slabs any more.
func (r *resources) close() error {
	var errs []error
	for _, s := range r.scrubbers {
		errs = append(errs, s.close())
	}
	if r.ownMonitor != nil {
		errs = append(errs, r.ownMonitor.Close())
	}
	if r.zeros != nil {
		errs = append(errs, r.zeros.Free())
	}
	return errors.Join(errs...)
}

// allocate allocates the memory of a slab.
func (r *resources) allocate(s device.Space, bytes int64, slab uint64) (device.Region, error) {
	mem, err := r.machine.Alloc(s, bytes, fmt.Sprintf("harvest slab %d", slab))
	if err != nil {
		return device.Region{}, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.memory[slab] = mem
	return mem.Region(0, bytes), nil
}

// memoryOf is the slab's memory.
func (r *resources) memoryOf(s *slab) device.Memory {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.memory[s.id]
}

// freeSlab frees the slab's memory.
func (r *resources) freeSlab(s *slab) error {
	if err := r.memoryOf(s).Free(); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.memory, s.id)
	return nil
}

// scrub starts to overwrite the first bytes of the slab.
func (r *resources) scrub(s *slab, bytes int64) {
	r.scrubbers[s.peer.space].begin(s, r.memoryOf(s), bytes)
}

// completedScrubs returns the scrubs that have ended since the last call.
func (r *resources) completedScrubs() (over []result) {
	for _, p := range r.peers {
		over = append(over, r.scrubbers[p].completed()...)
	}
	return over
}

// timeline is the latest time of a tick, in nanoseconds. It never runs backwards.
type timeline struct{ at atomic.Int64 }

func (t *timeline) now() time.Duration { return time.Duration(t.at.Load()) }

// advance sets the time, unless it is later already, and returns it.
func (t *timeline) advance(to time.Duration) time.Duration {
	for {
		old := t.at.Load()
		if int64(to) <= old {
			return time.Duration(old)
		}
		if t.at.CompareAndSwap(old, int64(to)) {
			return to
		}
	}
}
