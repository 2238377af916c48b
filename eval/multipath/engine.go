package multipath

import (
	"context"
	"errors"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/transfer"
)

// tuning is how an engine is set; what is 0 has the engine's default.
type tuning struct {
	relays []device.Space
	// chunk, in bytes, and depth, the chunks in flight on each link, of both directions.
	chunk int64
	depth int
	// always: copies of any size use relays.
	always bool
	// waits: a link that others use too relays less (transfer.Multipath.Wait).
	waits bool
	// longest: a GPU's own copies have no precedence on its link (transfer.Multipath.NoDirectFirst).
	longest bool
}

// engine is a transfer engine with relays.
type engine struct {
	r *rig
	*transfer.Engine
	// done is a fence that copies signal, value the highest that one of them will.
	done  device.Fence
	value uint32
	// consumer is a stream that waits for copies, ended an event behind that.
	consumer device.Stream
	ended    device.Event
}

// relayBuffers is the number of buffers of a relay in each direction: one more than are in flight,
// as the host learns late that one is empty, and at least three.
func relayBuffers(depth int) int { return max(depth+1, 3) }

// engine opens engine number (0 or 1) for copies from and to a GPU. The caller closes it.
func (r *rig) engine(gpu device.Space, number int, t tuning) (_ *engine, err error) {
	e := &engine{r: r}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.close())
		}
	}()
	o := transfer.Options{Machine: r.o.Machine}
	o.Multipath.ChunkIn, o.Multipath.ChunkOut, o.Multipath.Depth = t.chunk, t.chunk, t.depth
	o.Multipath.Wait, o.Multipath.NoDirectFirst = t.waits, t.longest
	if t.always {
		o.Multipath.ThresholdIn, o.Multipath.ThresholdOut = 1, 1
	}
	if e.Engine, err = transfer.New(o); err != nil {
		return nil, err
	}
	chunk := t.chunk
	if chunk == 0 {
		chunk = r.o.relayBytes() / int64(relayBuffers(t.depth)) / align * align
	}
	for _, s := range t.relays {
		x := transfer.Relay{GPU: s}
		for i := range relayBuffers(t.depth) {
			x.In = append(x.In, r.relayBuffer(s, number, ToGPU, i, chunk))
			x.Out = append(x.Out, r.relayBuffer(s, number, FromGPU, i, chunk))
		}
		if err := e.AddRelay(x); err != nil {
			return nil, err
		}
	}
	if e.done, err = r.o.Machine.NewFence("copies measured"); err != nil {
		return nil, err
	}
	e.value = e.done.Value()
	if e.ended, err = r.o.Machine.NewEvent(); err != nil {
		return nil, err
	}
	e.consumer, err = r.o.Machine.NewStream(gpu, device.StreamOptions{Name: "consumer"})
	return e, err
}

func (e *engine) close() error {
	var errs []error
	if e.consumer != nil {
		errs = append(errs, e.consumer.Close())
	}
	if e.ended != nil {
		errs = append(errs, e.ended.Close())
	}
	if e.Engine != nil {
		errs = append(errs, e.Engine.Close())
	}
	if e.done != nil {
		errs = append(errs, e.done.Close())
	}
	return errors.Join(errs...)
}

// submit submits a copy; alone: none is pending before it.
func (e *engine) submit(dst, src device.Region, alone bool) (*transfer.Ticket, error) {
	e.value++
	return e.Submit(transfer.Request{
		Src: src, Dst: dst, Priority: transfer.Prefetch, Done: device.Point{Fence: e.done, Value: e.value}, DoneInOrder: alone, Label: transfer.Text("copy measured"),
	})
}

// timings are how long a copy took from before it was submitted: until the host saw that it had
// ended, and until a stream of the GPU that waits for it went on.
type timings struct{ host, device time.Duration }

// pending is a copy that was submitted.
type pending struct {
	*transfer.Ticket
	began time.Duration
}

// begin submits a copy that the consumer waits for. One at a time of an engine is pending.
func (e *engine) begin(dst, src device.Region) (*pending, error) {
	if err := e.consumer.WaitFence(e.done, e.value+1); err != nil {
		return nil, err
	}
	if err := e.consumer.Record(e.ended); err != nil {
		return nil, err
	}
	began := e.r.o.Machine.Now()
	t, err := e.submit(dst, src, true)
	if err != nil {
		return nil, errors.Join(err, e.done.Signal(e.value)) // the consumer waits for it
	}
	return &pending{t, began}, nil
}

// end waits for a copy.
func (e *engine) end(ctx context.Context, p *pending) (timings, error) {
	err := p.Wait(ctx)
	took := timings{host: max(e.r.o.Machine.Now()-p.began, 1)}
	p.Release()
	if err = errors.Join(err, e.consumer.Synchronize(ctx)); err != nil {
		return took, err
	}
	at, err := e.ended.Time()
	took.device = max(at-p.began, 1)
	return took, err
}

// copy makes a copy.
func (e *engine) copy(ctx context.Context, dst, src device.Region) (timings, error) {
	p, err := e.begin(dst, src)
	if err != nil {
		return timings{}, err
	}
	return e.end(ctx, p)
}

// native makes a copy over the GPU's own link by its driver alone.
func (r *rig) native(ctx context.Context, d Direction, dst, src device.Region) (timings, error) {
	s, err := r.stream(r.o.GPU, "native "+string(d))
	if err != nil {
		return timings{}, err
	}
	ended, err := r.timed(nativeMark)
	if err != nil {
		return timings{}, err
	}
	began := r.o.Machine.Now()
	if err := s.Copy(dst.Range, src.Range); err != nil {
		return timings{}, err
	}
	if err := s.Record(ended); err != nil {
		return timings{}, err
	}
	if err := s.Synchronize(ctx); err != nil {
		return timings{}, err
	}
	took := timings{host: max(r.o.Machine.Now()-began, 1)}
	at, err := ended.Time()
	took.device = max(at-began, 1)
	return took, err
}

// waited makes a copy as native does, and returns the time until a second stream of the GPU goes on, which
// waits for it by an event of the driver.
func (r *rig) waited(ctx context.Context, d Direction, dst, src device.Region) (time.Duration, error) {
	s, err := r.stream(r.o.GPU, "native "+string(d))
	if err != nil {
		return 0, err
	}
	second, err := r.stream(r.o.GPU, "native consumer")
	if err != nil {
		return 0, err
	}
	copied, err := r.event(0)
	if err != nil {
		return 0, err
	}
	ended, err := r.timed(nativeMark)
	if err != nil {
		return 0, err
	}
	began := r.o.Machine.Now()
	if err := s.Copy(dst.Range, src.Range); err != nil {
		return 0, err
	}
	if err := s.Record(copied); err != nil {
		return 0, err
	}
	if err := second.Wait(copied); err != nil {
		return 0, err
	}
	if err := second.Record(ended); err != nil {
		return 0, err
	}
	if err := second.Synchronize(ctx); err != nil {
		return 0, err
	}
	at, err := ended.Time()
	return max(at-began, 1), err
}

// with opens an engine for f alone.
func (r *rig) with(gpu device.Space, t tuning, f func(*engine) error) error {
	e, err := r.engine(gpu, 0, t)
	if err != nil {
		return err
	}
	return errors.Join(f(e), e.close())
}

// engineCell measures the rate of a copy of n bytes by an engine of its own, whose first copy
// does not count.
func (r *rig) engineCell(d Direction, n int64, t tuning) *cell {
	return &cell{run: func(ctx context.Context) (values []float64, err error) {
		err = r.with(r.o.GPU, t, func(e *engine) error {
			dst, src := r.ends(d, n)
			var took timings
			for range 2 {
				if took, err = e.copy(ctx, dst, src); err != nil {
					return err
				}
			}
			values = []float64{float64(n) / took.host.Seconds()}
			return nil
		})
		return values, err
	}}
}

// checkEngine checks the bytes of a copy by an engine once.
func (r *rig) checkEngine(ctx context.Context, d Direction, n int64, t tuning) error {
	return r.with(r.o.GPU, t, func(e *engine) error { return r.checkCopy(ctx, e, d, n) })
}

func (r *rig) checkCopy(ctx context.Context, e *engine, d Direction, n int64) error {
	return r.check(ctx, d, n, func() error {
		dst, src := r.ends(d, n)
		_, err := e.copy(ctx, dst, src)
		return err
	})
}
