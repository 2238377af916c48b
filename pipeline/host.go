package pipeline

import (
	"context"
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/forward"
)

// hostAttention computes attention on the host, with the KV cache in host memory. For each
// micro-batch and layer there is one round trip over four streams: compute projects q, k and
// v; out copies them to pinned memory; host appends k and v to the cache and computes
// attention; in copies the output to the device, where the compute stream waits for it. Each
// stage waits for the fence that the stage before signals. Round trips are numbered, and the
// number is the value signaled on all four fences. A round trip is enqueued from its first
// stage to its last, so whatever is waited for has been enqueued before.
//
// Each token of the step has its own place in the staging memory. The next layer's round trip
// reuses it after the compute stream has waited for the output of this one.
type hostAttention struct {
	// attention has the staging buffers of all tokens.
	attention *forward.Attention
	staging   device.Memory
	out, in   device.Stream
	host      device.Executor

	projected, sent, computed, returned device.Fence
	lastTrip                            uint32
	tracer                              *tracer
}

func newHostAttention(o *Options) (h *hostAttention, err error) {
	h = &hostAttention{}
	c, act, tokens := o.config(), o.KV.Shape().DType, o.Limits.MaxTokens
	bytes := o.StagingBytes(c, act, o.Limits)
	if h.staging, err = o.Machine.Alloc(device.Host, bytes, "attention, pinned"); err != nil {
		return h, err
	}
	buffers := forward.NewAttentionBuffers(&c.Attention, act, tokens, h.staging.Range(0, bytes).Addr)
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
		return h, errors.Join(errors.New("host streams of this machine cannot run Go functions"), s.Close())
	}
	for _, f := range []struct {
		to   *device.Fence
		name string
	}{{&h.projected, "q, k, v computed"}, {&h.sent, "q, k, v sent"}, {&h.computed, "attention computed"}, {&h.returned, "attention on device"}} {
		if *f.to, err = o.Machine.NewFence(f.name); err != nil {
			return h, err
		}
	}
	h.lastTrip = h.projected.Value() // all four begin there
	return h, nil
}

// enqueue enqueues a micro-batch's round trip behind its ProjectQKV on the compute stream.
func (h *hostAttention) enqueue(compute device.Stream, m *forward.Model, layer int, b *microBatch, meter *meter) error {
	h.lastTrip++
	n := h.lastTrip
	if err := compute.SignalFence(h.projected, n); err != nil {
		return err
	}
	tokens := forward.Span{First: b.firstToken, Rows: b.batch.Rows}
	onHost, onDevice := h.attention.Buffers().Rows(tokens), m.Buffers(&b.batch)
	h.tracer.hostWork(h.out, "copy q, k, v")
	h.tracer.hostWork(h.host, "")
	err := enqueueStage(h.out, h.projected, h.sent, n, func() (err error) {
		if err = h.out.Copy(onHost.QKV.Range(), onDevice.QKV.Range()); err == nil {
			b.qkvOnHost, err = meter.record(h.out)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("copy q, k, v to the host: %w", err)
	}
	err = enqueueStage(h.host, h.sent, h.computed, n, func() (err error) {
		if err = h.attention.Append(h.host, layer, tokens, &b.hostMetadata); err == nil {
			err = h.attention.Compute(h.host, layer, tokens, &b.hostMetadata)
		}
		if err == nil {
			b.hostDone, err = meter.record(h.host)
		}
		return err
	})
	if err != nil {
		return err
	}
	h.tracer.copyBack(h.in, "copy attention", device.Point{Fence: h.returned, Value: n})
	if err := enqueueStage(h.in, h.computed, h.returned, n, func() error { return h.in.Copy(onDevice.Output.Range(), onHost.Output.Range()) }); err != nil {
		return fmt.Errorf("copy attention output from the host: %w", err)
	}
	b.trip = n
	return nil
}

// enqueueStage enqueues a stage of round trip n: it waits for one fence, runs do, and signals
// the next fence.
func enqueueStage(s device.Stream, wait, signal device.Fence, n uint32, do func() error) error {
	if err := s.WaitFence(wait, n); err != nil {
		return err
	}
	if err := do(); err != nil {
		return err
	}
	return s.SignalFence(signal, n)
}

// await makes the compute stream wait for the micro-batch's last round trip.
func (h *hostAttention) await(compute device.Stream, b *microBatch, meter *meter) error {
	h.tracer.wait(CPUAttention, device.Point{Fence: h.returned, Value: b.trip})
	return meter.wait(CPUAttention, b.qkvOnHost, b.hostDone, func() error { return compute.WaitFence(h.returned, b.trip) })
}

// Err implements source: it returns the first error of the streams.
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
	for _, f := range []device.Fence{h.projected, h.sent, h.computed, h.returned} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	if h.staging != nil {
		errs = append(errs, h.staging.Free())
	}
	return errors.Join(errs...)
}
