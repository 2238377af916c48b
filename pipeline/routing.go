package pipeline

import (
	"context"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// choices brings the ids of experts that routers choose, or are predicted to, to the host.
type choices struct {
	results *results
	// arrived is raised when ids have come, each time by one.
	arrived device.Fence
	value   uint32
	// ids as the host reads them.
	ids []int32
}

// choice is ids of experts on their way to the host: n of them, at a place of the results'
// memory behind a point.
type choice struct {
	at device.Point
	// off is in bytes.
	off int64
	n   int
}

// send enqueues the way of ids to a place.
func (c *choices) send(s device.Stream, off int64, ids kernels.Tensor) (choice, error) {
	if err := c.results.copy(s, off, ids); err != nil {
		return choice{}, err
	}
	c.value++
	return choice{at: device.Point{Fence: c.arrived, Value: c.value}, off: off, n: ids.Shape[0] * ids.Shape[1]}, s.Raise(c.arrived, c.value)
}

// await waits for ids, which are valid until the next call. For how long the stream
// stands still meanwhile, and until it is given more, is the router's.
func (c *choices) await(ctx context.Context, x choice, m *meter) ([]int32, error) {
	idle, err := m.mark(m.stream)
	if err != nil {
		return nil, err
	}
	if err := x.at.Await(ctx); err != nil {
		return nil, err
	}
	if err := m.asked(idle); err != nil {
		return nil, err
	}
	c.ids = slices.Grow(c.ids[:0], x.n)[:x.n]
	c.results.ints(c.ids, x.off)
	return c.ids, nil
}

func (c *choices) close() error {
	if c.arrived == nil {
		return nil
	}
	return c.arrived.Close()
}
