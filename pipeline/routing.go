package pipeline

import (
	"context"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// routingReader copies the expert ids that routers select, or that are predicted, to the
// host.
type routingReader struct {
	results *results
	// copied is signaled after each copy, with a value one higher.
	copied device.Fence
	value  uint32
	// ids is the buffer of await's result.
	ids []int32
}

// routingCopy is an enqueued copy of n expert ids to the results' memory, complete at the
// point done.
type routingCopy struct {
	done device.Point
	// off is in bytes.
	off int64
	n   int
}

// copyToHost enqueues a copy of ids to an offset of the results' memory.
func (c *routingReader) copyToHost(s device.Stream, off int64, ids kernels.Tensor) (routingCopy, error) {
	if err := c.results.copy(s, off, ids); err != nil {
		return routingCopy{}, err
	}
	c.value++
	return routingCopy{done: device.Point{Fence: c.copied, Value: c.value}, off: off, n: ids.Shape[0] * ids.Shape[1]}, s.SignalFence(c.copied, c.value)
}

// await waits for ids, which are valid until the next call. If the stream runs out of work
// meanwhile, its idle time until the next enqueued kernel is a stall by RouterSync.
func (c *routingReader) await(ctx context.Context, x routingCopy, m *meter) ([]int32, error) {
	idle, err := m.record(m.stream)
	if err != nil {
		return nil, err
	}
	if err := x.done.Wait(ctx); err != nil {
		return nil, err
	}
	if err := m.afterRouterSync(idle); err != nil {
		return nil, err
	}
	c.ids = slices.Grow(c.ids[:0], x.n)[:x.n]
	c.results.ints(c.ids, x.off)
	return c.ids, nil
}

func (c *routingReader) close() error {
	if c.copied == nil {
		return nil
	}
	return c.copied.Close()
}
