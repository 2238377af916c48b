package engine

import (
	"sync"

	"github.com/moeserve/moeserve/models/grammar"
)

// constraint is the grammar of one sample, behind the tokens that it has. It is the forward.Mask of the next one.
type constraint struct {
	m *grammar.Matcher
	// stop are the ids that end the sample, which may be sampled where the text may end.
	stop []int32
	// ready is closed when the mask is computed; nil: it is.
	ready chan struct{}
}

// accept adds a token, and reports whether the grammar allowed it.
func (c *constraint) accept(id int32) bool { return c.m.Accept(id) }

// prepare computes the mask in a goroutine of tasks, unless it is kept from before.
func (c *constraint) prepare(tasks *sync.WaitGroup) {
	c.ready = nil
	if c.m.Ended() || c.m.Ready() {
		return
	}
	ready, m := make(chan struct{}), c.m.Clone()
	c.ready = ready
	tasks.Go(func() {
		m.Mask()
		close(ready)
	})
}

// Allowed implements forward.Mask.
func (c *constraint) Allowed(dst []uint32) {
	if c.ready != nil {
		<-c.ready
	}
	copy(dst, c.m.Mask())
	if c.m.MayEnd() {
		for _, id := range c.stop {
			dst[id/32] |= 1 << (id % 32)
		}
	}
}
