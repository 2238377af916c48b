package peercache

import "github.com/moeserve/moeserve/device"

// BeginStep begins a step that may read any number of copies in place, until EndStep: see
// harvest.StepReader. It returns the version of the copies, which changes when one has landed,
// and when one is dropped or revoked: Readable may then return others. It takes no lock. One
// goroutine at a time reads in steps.
func (c *Cache[K]) BeginStep() (version uint64) {
	if c == nil {
		return 0
	}
	version = c.steps.Begin()
	return version + c.landings.Load() // both only grow
}

// ContinueStep reports whether the copies still have the version that BeginStep returned. If so, the step may read them once
// more, until EndStep.
func (c *Cache[K]) ContinueStep(version uint64) bool {
	if c == nil {
		return version == 0
	}
	return c.steps.Continue(version - c.landings.Load())
}

// EndStep ends the step: nothing of it reads any more, and the host knows.
func (c *Cache[K]) EndStep() {
	if c != nil {
		c.steps.End()
	}
}

// Readable returns the object's copy if it may be read until EndStep, otherwise nil. It is called
// within a step, takes no lock, and does not count as a use.
func (c *Cache[K]) Readable(key K) *Copy[K] {
	x := c.Find(key)
	if x == nil {
		return nil
	}
	if available, _ := x.handle.State(); !available {
		return nil
	}
	return x
}

// Len is the number of copies that can be found. It takes no lock.
func (c *Cache[K]) Len() int {
	if c == nil {
		return 0
	}
	return int(c.count.Load())
}

// PeerLost reports that a peer was found to be lost: it is excluded from harvest.
func (c *Cache[K]) PeerLost(peer device.Space, err error) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failed(peer, err)
}
