package peercache

import (
	"errors"
	"sync"
	"sync/atomic"

	"github.com/moeserve/moeserve/device"
)

// failures counts consecutive failures by peer.
type failures struct {
	// failingPeers is the number of peers with failures; if it is 0, reset takes no lock.
	failingPeers atomic.Int32

	mu          sync.Mutex
	consecutive map[device.Space]int
}

// add counts a failure and returns the peer's consecutive failures.
func (f *failures) add(peer device.Space) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.consecutive == nil {
		f.consecutive = map[device.Space]int{}
	}
	f.consecutive[peer]++
	f.failingPeers.Store(int32(len(f.consecutive)))
	return f.consecutive[peer]
}

// reset records a success.
func (f *failures) reset(peer device.Space) {
	if f.failingPeers.Load() == 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.consecutive, peer)
	f.failingPeers.Store(int32(len(f.consecutive)))
}

// fencePool is a freelist of fences, with the value that each has reached.
type fencePool struct {
	machine device.Machine
	name    string
	idle    []device.Point
	all     []device.Fence
}

// take returns the next value of a fence of the pool.
func (f *fencePool) take() (device.Point, error) {
	if n := len(f.idle); n > 0 {
		at := f.idle[n-1]
		f.idle = f.idle[:n-1]
		at.Value++
		return at, nil
	}
	fence, err := f.machine.NewFence(f.name)
	if err != nil {
		return device.Point{}, err
	}
	f.all = append(f.all, fence)
	return device.Point{Fence: fence, Value: fence.Value() + 1}, nil
}

// put returns a fence value that was signaled or failed.
func (f *fencePool) put(at device.Point) { f.idle = append(f.idle, at) }

// cancelTake returns a fence value that was not used.
func (f *fencePool) cancelTake(at device.Point) {
	at.Value--
	f.put(at)
}

func (f *fencePool) close() error {
	var errs []error
	for _, fence := range f.all {
		errs = append(errs, fence.Close())
	}
	return errors.Join(errs...)
}
