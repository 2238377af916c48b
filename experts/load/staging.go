package load

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/transfer"
)

// staging is the pinned memory through which local experts reach the device.
type staging interface {
	// write brings rows of one matrix to their place in the extent dst of the
	// expert. Several goroutines may call it.
	write(of id, dst device.Region, part kernels.Part, row int, data []byte) error
	// flush waits until everything has arrived.
	flush(ctx context.Context) error
	close() error
}

// buffer is a piece of staging memory. Its fields are for whoever holds it.
type buffer struct {
	offset, bytes int64
	done          device.Point
	ticket        *transfer.Ticket // the latest copy from or to it
}

// stage is what the two kinds of staging share.
type stage struct {
	o       Options
	memory  device.Memory
	buffers []*buffer
}

func newStage(o Options, n int) (stage, error) {
	s := stage{o: o}
	var err error
	if s.memory, err = o.Machine.Alloc(device.Host, o.StagingBytes, "expert staging"); err != nil {
		return s, err
	}
	bytes := o.StagingBytes / int64(n)
	for i := range n {
		f, err := o.Machine.NewFence(fmt.Sprintf("expert staging %d", i))
		if err != nil {
			return s, errors.Join(err, s.close())
		}
		s.buffers = append(s.buffers, &buffer{offset: int64(i) * bytes, bytes: bytes, done: device.Point{Fence: f}})
	}
	return s, nil
}

// settled waits until nothing moves from or to b, or ctx is done.
func (b *buffer) settled(ctx context.Context) error {
	if b.ticket == nil {
		return nil
	}
	err := b.ticket.Wait(ctx)
	if b.ticket.Ended() {
		b.ticket = nil
	}
	return err
}

// toDevice starts the copy of b's first bytes to dst, fromDevice that back.
func (s *stage) toDevice(b *buffer, dst device.Region) error {
	return s.submit(b, transfer.Request{
		Src: s.memory.Region(b.offset, dst.Bytes), Dst: dst, Label: transfer.Text("load experts"),
	})
}

func (s *stage) fromDevice(b *buffer, src device.Region) error {
	return s.submit(b, transfer.Request{
		Src: src, Dst: s.memory.Region(b.offset, src.Bytes), Label: transfer.Text("load experts"),
	})
}

func (s *stage) submit(b *buffer, r transfer.Request) (err error) {
	b.done.Value++
	r.Priority, r.Done = transfer.Demand, b.done
	b.ticket, err = s.o.Transfer.Submit(r)
	return err
}

// flush waits for every buffer's copy and returns the first error: what breaks one
// breaks the others too.
func (s *stage) flush(ctx context.Context) error {
	var first error
	for _, b := range s.buffers {
		if err := b.settled(ctx); first == nil {
			first = err
		}
	}
	return first
}

func (s *stage) close() error {
	// A copy that failed has been told of, or belongs to a loading that was given up.
	_ = s.flush(context.Background())
	errs := []error{s.memory.Free()}
	for _, b := range s.buffers {
		errs = append(errs, b.done.Fence.Close())
	}
	return errors.Join(errs...)
}

// pieces is the staging of row-major layouts, where rows of a matrix are bytes at a
// known place: they go through buffers of any size, piece by piece.
type pieces struct {
	stage
	free chan *buffer // the one whose copy began first is in front
}

func newPieces(o Options) (*pieces, error) {
	s, err := newStage(o, buffers)
	if err != nil {
		return nil, err
	}
	p := &pieces{stage: s, free: make(chan *buffer, len(s.buffers))}
	for _, b := range s.buffers {
		p.free <- b
	}
	return p, nil
}

func (p *pieces) write(_ id, dst device.Region, part kernels.Part, row int, data []byte) error {
	shape := p.o.Layout.ExpertShape
	at := int64(row) * int64(RowBytes(shape, part))
	for before := range part {
		at += int64(Rows(shape, before)) * int64(RowBytes(shape, before))
	}
	for len(data) > 0 {
		b := <-p.free
		n := min(int64(len(data)), b.bytes)
		err := b.settled(context.Background())
		if err == nil {
			copy(p.memory.Write(b.offset, n), data)
			err = p.toDevice(b, dst.Slice(at, n))
		}
		p.free <- b
		if err != nil {
			return err
		}
		at, data = at+n, data[n:]
	}
	return nil
}

// extents is the staging of layouts that only the backend knows: an expert is
// packed in a whole extent of staging memory. Where more experts are begun than
// there are extents, the one longest unused goes to its slot as far as it came, and
// is brought back when more of it comes.
type extents struct {
	stage

	mu      sync.Mutex
	changed sync.Cond
	// held tells what each buffer holds; users pack into it; clock orders last uses.
	held    []extent
	begun   map[id]bool // experts that have been in a buffer
	leaving map[id]bool // experts that are on their way to their slots
	clock   uint64
}

type extent struct {
	*buffer
	of    id
	full  bool // it holds something
	dst   device.Region
	users int
	used  uint64
	// moving: one goroutine is giving the buffer to another expert.
	moving bool
}

func newExtents(o Options) (*extents, error) {
	s, err := newStage(o, int(o.StagingBytes/o.Layout.Size))
	if err != nil {
		return nil, err
	}
	x := &extents{stage: s, begun: map[id]bool{}, leaving: map[id]bool{}}
	x.changed.L = &x.mu
	for _, b := range s.buffers {
		x.held = append(x.held, extent{buffer: b})
	}
	return x, nil
}

func (x *extents) write(of id, dst device.Region, part kernels.Part, row int, data []byte) error {
	h, err := x.take(of, dst)
	if err != nil {
		return err
	}
	err = x.o.Packer.PackExpert(x.o.Layout, part, row, data, x.memory.Write(h.offset, x.o.Layout.Size))
	x.mu.Lock()
	defer x.mu.Unlock()
	h.users--
	x.changed.Broadcast()
	return err
}

// take returns the buffer that holds an expert, for the caller to pack into.
func (x *extents) take(of id, dst device.Region) (*extent, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for {
		h := x.find(of)
		if h == nil && !x.leaving[of] {
			if h = x.victim(); h != nil {
				if err := x.move(h, of, dst); err != nil {
					return nil, err
				}
			}
		}
		if h != nil && !h.moving {
			x.clock++
			h.users, h.used = h.users+1, x.clock
			return h, nil
		}
		x.changed.Wait()
	}
}

func (x *extents) find(of id) *extent {
	for i := range x.held {
		if h := &x.held[i]; h.full && h.of == of {
			return h
		}
	}
	return nil
}

// victim is the buffer longest unused, nil while all are in use.
func (x *extents) victim() *extent {
	var v *extent
	for i := range x.held {
		if h := &x.held[i]; h.users == 0 && !h.moving && (v == nil || h.used < v.used) {
			v = h
		}
	}
	return v
}

// move puts what h holds to its slot and fetches what there is of another expert. The lock is
// released meanwhile.
func (x *extents) move(h *extent, of id, dst device.Region) error {
	full, old, oldID := h.full, h.dst, h.of
	reload := x.begun[of]
	if full {
		x.leaving[oldID] = true
	}
	h.of, h.dst, h.full, h.moving = of, dst, true, true
	x.begun[of] = true
	x.mu.Unlock()
	err := func() error {
		if full {
			if err := x.toDevice(h.buffer, old); err != nil {
				return err
			}
			if err := h.settled(context.Background()); err != nil {
				return err
			}
		}
		if reload {
			if err := x.fromDevice(h.buffer, dst); err != nil {
				return err
			}
		}
		return h.settled(context.Background())
	}()
	x.mu.Lock()
	h.moving = false
	delete(x.leaving, oldID)
	if err != nil {
		h.full = false
	}
	x.changed.Broadcast()
	return err
}

func (x *extents) flush(ctx context.Context) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	var first error
	for i := range x.held {
		if h := &x.held[i]; h.full {
			if err := x.toDevice(h.buffer, h.dst); first == nil {
				first = err
			}
			h.full = false
		}
	}
	if err := x.stage.flush(ctx); first == nil {
		first = err
	}
	return first
}
