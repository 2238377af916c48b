package checkpoint

import (
	"context"
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/node/fault"
)

// LoadOptions say what to load where.
type LoadOptions struct {
	Machine device.Machine
	// Space is the compute device's memory, and Arena the part of it for all weights but
	// experts, laid out as Layout says.
	Space  device.Space
	Arena  device.Memory
	Layout *models.Layout
	Source models.Source
	// Store takes the experts. It is sealed behind the last.
	Store *experts.Store
	// Groups over the weights have constants of their own.
	Groups []*forward.Model
	// Progress, which may be nil, is called with bytes.
	Progress func(done, total int64)
}

// Load streams the weights to their places. Errors wrap a kind of package fault, but
// where ctx was done.
func Load(ctx context.Context, o LoadOptions) (err error) {
	up, err := newUploader(o.Machine, o.Space)
	if err != nil {
		return fault.Of(fault.ErrDevice, err)
	}
	defer func() { err = errors.Join(err, fault.Of(fault.ErrDevice, up.close(ctx))) }()
	src, to := o.Source, &sink{ctx: ctx, arena: o.Arena, up: up, store: o.Store}
	if !o.Machine.Capabilities().KeepsData {
		src, to.up = shapes{src}, nil
	}
	if err := models.Load(ctx, src, o.Layout, to, o.Progress); err != nil {
		return loading(err)
	}
	if err := o.Store.Seal(ctx); err != nil {
		return loading(err)
	}
	if to.up == nil {
		return nil
	}
	for _, m := range o.Groups {
		if err := m.Constants(func(dst device.Range, data []byte) error { return up.put(ctx, dst, data) }); err != nil {
			return loading(err)
		}
	}
	return loading(up.flush(ctx))
}

// loading says what an error of loading is about: the device, the model, or, where
// ctx was done, neither.
func loading(err error) error {
	var d *device.Error
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("node: load the model: %w", err)
	case errors.As(err, &d):
		return fault.Of(fault.ErrDevice, err)
	}
	return fault.Of(fault.ErrModel, err)
}

// sink takes weights from models.Load to their places.
type sink struct {
	ctx   context.Context
	arena device.Memory
	// up is nil where the machine keeps no data.
	up    *uploader
	store *experts.Store
}

func (s *sink) Dense(off int64, data []byte) error {
	if s.up == nil {
		return nil
	}
	return s.up.put(s.ctx, s.arena.Range(off, int64(len(data))), data)
}

func (s *sink) Expert(layer, expert int, part kernels.Part, row int, data []byte) error {
	return s.store.Expert(layer, expert, part, row, data)
}

// shapes is a source whose weights are all zero, for machines that keep no data.
type shapes struct{ models.Source }

func (shapes) Prefetch(string, int64, int64) {}

func (shapes) Read(_ string, _, n int64, read func(data []byte) error) error {
	if n > int64(len(zeros)) {
		return read(make([]byte, n))
	}
	return read(zeros[:n])
}

// zeros are as many as models.Load reads at a time, but for very long rows.
var zeros [8 << 20]byte
