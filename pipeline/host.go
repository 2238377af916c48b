package pipeline

import (
	"context"
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/forward"
)

// hostAttention attends on the host, beside keys and values in its memory. Each
// micro-batch's turn in a layer is a chain over four streams: compute projects its q, k
// and v, out brings them to pinned memory, host appends to the cache and attends, in
// brings the result back to where the compute stream collects it. Every link of a chain
// awaits the fence that the one before raises; chains are numbered, and each raises its
// number on all four fences. A chain is enqueued from its beginning to its end, so
// whatever is awaited has been enqueued before.
//
// A row of the step has its place in the staging memory, which its chain of a layer
// uses again once the compute stream has collected what its chain of the layer before
// has brought.
type hostAttention struct {
	// attention has the staging of all rows for its buffers.
	attention *forward.Attention
	staging   device.Memory
	out, in   device.Stream
	host      device.Executor

	projected, sent, ended, landed device.Fence
	chain                          uint32
	tracer                         *tracer
}

func newHostAttention(o *Options) (h *hostAttention, err error) {
	h = &hostAttention{}
	c, act, rows := o.config(), o.KV.Shape().DType, o.Limits.MaxTokens
	bytes := o.StagingBytes(c, act, o.Limits)
	if h.staging, err = o.Machine.Alloc(device.Host, bytes, "attention, pinned"); err != nil {
		return h, err
	}
	buffers := forward.NewAttentionBuffers(&c.Attention, act, rows, h.staging.Range(0, bytes).Addr)
	h.attention = forward.NewAttention(&c.Attention, o.HostAttention, o.KV, buffers)
	if h.out, err = o.Machine.NewStream(o.space(), device.StreamOptions{Name: "q, k, v to host", Priority: 1}); err != nil {
		return h, err
	}
	if h.in, err = o.Machine.NewStream(o.space(), device.StreamOptions{Name: "attention from host", Priority: 1}); err != nil {
		return h, err
	}
	s, err := o.Machine.NewStream(device.Host, device.StreamOptions{Name: "attention"})
	if err != nil {
		return h, err
	}
	var ok bool
	if h.host, ok = s.(device.Executor); !ok {
		return h, errors.Join(errors.New("a host stream of this machine runs no Go work"), s.Close())
	}
	for _, f := range []struct {
		to   *device.Fence
		name string
	}{{&h.projected, "q, k, v computed"}, {&h.sent, "q, k, v sent"}, {&h.ended, "attention computed"}, {&h.landed, "attention brought"}} {
		if *f.to, err = o.Machine.NewFence(f.name); err != nil {
			return h, err
		}
	}
	return h, nil
}

// attend enqueues a micro-batch's chain behind its Project on the compute stream.
func (h *hostAttention) attend(compute device.Stream, m *forward.Model, layer int, b *microBatch, meter *meter) error {
	h.chain++
	n := h.chain
	if err := compute.Raise(h.projected, n); err != nil {
		return err
	}
	rows := forward.Span{First: b.row, Rows: b.batch.Rows}
	onHost, onDevice := h.attention.Buffers().Rows(rows), m.Buffers(&b.batch)
	h.tracer.onHost(h.out, "copy q, k, v")
	h.tracer.onHost(h.host, "")
	err := hop(h.out, h.projected, h.sent, n, func() (err error) {
		if err = h.out.Copy(onHost.Projected.Range(), onDevice.Projected.Range()); err == nil {
			b.sent, err = meter.mark(h.out)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("send q, k, v to the host: %w", err)
	}
	err = hop(h.host, h.sent, h.ended, n, func() (err error) {
		if err = h.attention.Append(h.host, layer, rows, &b.onHost); err == nil {
			err = h.attention.Attend(h.host, layer, rows, &b.onHost)
		}
		if err == nil {
			b.attended, err = meter.mark(h.host)
		}
		return err
	})
	if err != nil {
		return err
	}
	h.tracer.brings(h.in, "copy attention", device.Point{Fence: h.landed, Value: n})
	if err := hop(h.in, h.ended, h.landed, n, func() error { return h.in.Copy(onDevice.Attended.Range(), onHost.Attended.Range()) }); err != nil {
		return fmt.Errorf("bring attention from the host: %w", err)
	}
	b.chain = n
	return nil
}

// hop enqueues a link of chain n.
func hop(s device.Stream, after, then device.Fence, n uint32, do func() error) error {
	if err := s.Await(after, n); err != nil {
		return err
	}
	if err := do(); err != nil {
		return err
	}
	return s.Raise(then, n)
}

// collect holds the compute stream back until the micro-batch's last chain has ended.
func (h *hostAttention) collect(compute device.Stream, b *microBatch, meter *meter) error {
	h.tracer.wait(CPUAttention, device.Point{Fence: h.landed, Value: b.chain})
	return meter.wait(CPUAttention, b.sent, b.attended, func() error { return compute.Await(h.landed, b.chain) })
}

// Err implements source: the first error that one of the streams is in.
func (h *hostAttention) Err(ctx context.Context) error {
	for _, s := range []device.Stream{h.out, h.host, h.in} {
		if err := s.Synchronize(ctx); err != nil {
			return fmt.Errorf("pipeline: attention on the host: %w", err)
		}
	}
	return nil
}

// Reset implements source.
func (h *hostAttention) Reset(ctx context.Context) error {
	return errors.Join(h.out.Recover(ctx), h.host.Recover(ctx), h.in.Recover(ctx))
}

func (h *hostAttention) close() error {
	var errs []error
	for _, s := range []device.Stream{h.out, h.in} {
		if s != nil {
			errs = append(errs, s.Close())
		}
	}
	if h.host != nil {
		errs = append(errs, h.host.Close())
	}
	for _, f := range []device.Fence{h.projected, h.sent, h.ended, h.landed} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	if h.staging != nil {
		errs = append(errs, h.staging.Free())
	}
	return errors.Join(errs...)
}
