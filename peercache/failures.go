package peercache

import (
	"errors"
	"sync"
	"sync/atomic"

	"github.com/moeserve/moeserve/device"
)

// failures counts those in a row, by peer.
type failures struct {
	// any is how many peers have some: a success is no news to the others.
	any atomic.Int32

	mu    sync.Mutex
	inRow map[device.Space]int
}

// failed returns how many they are now.
func (f *failures) failed(peer device.Space) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.inRow == nil {
		f.inRow = map[device.Space]int{}
	}
	f.inRow[peer]++
	f.any.Store(int32(len(f.inRow)))
	return f.inRow[peer]
}

// worked ends a row.
func (f *failures) worked(peer device.Space) {
	if f.any.Load() == 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.inRow, peer)
	f.any.Store(int32(len(f.inRow)))
}

// fences are points of fences that nobody waits for, to be used again.
type fences struct {
	machine device.Machine
	name    string
	idle    []device.Point
	all     []device.Fence
}

// take returns the next point of a fence.
func (f *fences) take() (device.Point, error) {
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
	return device.Point{Fence: fence, Value: 1}, nil
}

// put takes a point back that was raised or failed.
func (f *fences) put(at device.Point) { f.idle = append(f.idle, at) }

// unused takes a point back that nobody was given.
func (f *fences) unused(at device.Point) {
	at.Value--
	f.put(at)
}

func (f *fences) close() error {
	var errs []error
	for _, fence := range f.all {
		errs = append(errs, fence.Close())
	}
	return errors.Join(errs...)
}
