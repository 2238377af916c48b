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

// LoadOptions are the source and the destination of the weights.
type LoadOptions struct {
	Machine device.Machine
	// Space is the memory of the GPU, and Arena the part of it for all weights except experts,
	// laid out by Layout.
	Space  device.Space
	Arena  device.Memory
	Layout *models.Layout
	Source models.Source
	// Store receives the experts. Load seals it after the last one.
	Store *experts.Store
	// Groups are models over these weights, whose constants are loaded too.
	Groups []*forward.Model
	// Progress, unless nil, is called with the bytes loaded and the total.
	Progress func(done, total int64)
}

// Load streams the weights to their destination. Errors wrap a kind of package fault, unless
// ctx was canceled.
func Load(ctx context.Context, o LoadOptions) (err error) {
	up, err := newUploader(o.Machine, o.Space)
	if err != nil {
		return fault.Of(fault.ErrDevice, err)
	}
	defer func() { err = errors.Join(err, fault.Of(fault.ErrDevice, up.close(ctx))) }()
	src, to := o.Source, &sink{ctx: ctx, arena: o.Arena, up: up, store: o.Store}
	if !o.Machine.Capabilities().KeepsData {
		src, to.up = zeroSource{src}, nil
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

// loading marks an error of loading as one of the device or of the model, or, if ctx was
// canceled, as neither.
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

// sink receives weights from models.Load.
type sink struct {
	ctx   context.Context
	arena device.Memory
	// up is nil if the machine keeps no data.
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

// zeroSource is a source whose weights are all zero, for machines that keep no data.
type zeroSource struct{ models.Source }

func (zeroSource) Prefetch(string, int64, int64) {}

func (zeroSource) Read(_ string, _, n int64, read func(data []byte) error) error {
	if n > int64(len(zeros)) {
		return read(make([]byte, n))
	}
	return read(zeros[:n])
}

// zeros has as many bytes as models.Load reads at a time, except for very long rows.
var zeros [8 << 20]byte
