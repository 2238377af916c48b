package load

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/transfer"
)

// staging is the pinned memory through which resident experts are copied to the device.
type staging interface {
	// write copies rows of one matrix to their place in the extent dst of the expert.
	// Several goroutines may call it.
	write(of id, dst device.Region, part kernels.Part, row int, data []byte) error
	// flush waits until everything has arrived.
	flush(ctx context.Context) error
	close() error
}

// buffer is a staging buffer. Whoever has acquired it owns its fields.
type buffer struct {
	offset, bytes int64
	done          device.Point
	ticket        *transfer.Ticket // the latest copy from or to it
	// failed is why a copy was not made: what it was of is lost.
	failed error
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
		s.buffers = append(s.buffers, &buffer{offset: int64(i) * bytes, bytes: bytes, done: device.Point{Fence: f, Value: f.Value()}})
	}
	return s, nil
}

// waitIdle waits until no copy from or to b is in progress, or ctx is done.
func (b *buffer) waitIdle(ctx context.Context) error {
	if b.ticket == nil {
		return b.failed
	}
	err := b.ticket.Wait(ctx)
	if b.ticket.Ended() {
		b.failed, b.ticket = cmp.Or(b.failed, b.ticket.Err()), nil
		return b.failed
	}
	return err
}

// toDevice starts the copy of b's first bytes to dst, fromDevice the copy back.
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
	b.failed = cmp.Or(b.failed, err)
	return err
}

// flush waits for every buffer's copy and returns the first error: what breaks one
// breaks the others too.
func (s *stage) flush(ctx context.Context) error {
	var first error
	for _, b := range s.buffers {
		if err := b.waitIdle(ctx); first == nil {
			first = err
		}
	}
	return first
}

func (s *stage) close() error {
	// The error of a failed copy was reported, or belongs to an aborted loading.
	_ = s.flush(context.Background())
	errs := []error{s.memory.Free()}
	for _, b := range s.buffers {
		errs = append(errs, b.done.Fence.Close())
	}
	return errors.Join(errs...)
}

// pieces is the staging of row-major layouts, where the rows of a matrix are bytes at a
// known offset: they are copied through buffers of any size, piece by piece.
type pieces struct {
	stage
	free chan *buffer // in the order in which their copies started
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
		err := b.waitIdle(context.Background())
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

// extents is the staging of layouts that only the backend knows: an expert is packed in a
// whole extent of staging memory. If more experts are incomplete than there are extents,
// the least recently used one is stored to its place as it is, and loaded back when more
// of its rows are received.
type extents struct {
	stage

	mu      sync.Mutex
	changed sync.Cond
	// slots are the buffers and what they hold; clock orders their last uses.
	slots   []extent
	begun   map[id]bool // experts that were in a buffer before
	storing map[id]bool // experts that are being copied to their places
	clock   uint64
}

type extent struct {
	*buffer
	of       id
	occupied bool // by an expert
	dst      device.Region
	users    int
	used     uint64
	// moving: one goroutine is assigning the buffer to another expert.
	moving bool
}

func newExtents(o Options) (*extents, error) {
	s, err := newStage(o, int(o.StagingBytes/o.Layout.Size))
	if err != nil {
		return nil, err
	}
	x := &extents{stage: s, begun: map[id]bool{}, storing: map[id]bool{}}
	x.changed.L = &x.mu
	for _, b := range s.buffers {
		x.slots = append(x.slots, extent{buffer: b})
	}
	return x, nil
}

func (x *extents) write(of id, dst device.Region, part kernels.Part, row int, data []byte) error {
	h, err := x.acquire(of, dst)
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

// acquire returns the buffer of an expert, for the caller to pack into.
func (x *extents) acquire(of id, dst device.Region) (*extent, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for {
		h := x.find(of)
		if h == nil && !x.storing[of] {
			if h = x.victim(); h != nil {
				if err := x.assign(h, of, dst); err != nil {
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
	for i := range x.slots {
		if h := &x.slots[i]; h.occupied && h.of == of {
			return h
		}
	}
	return nil
}

// victim is the least recently used buffer, nil while all are in use.
func (x *extents) victim() *extent {
	var v *extent
	for i := range x.slots {
		if h := &x.slots[i]; h.users == 0 && !h.moving && (v == nil || h.used < v.used) {
			v = h
		}
	}
	return v
}

// assign stores the expert in h to its place and loads back what was received of another
// expert. The lock is released meanwhile.
func (x *extents) assign(h *extent, of id, dst device.Region) error {
	full, old, oldID := h.occupied, h.dst, h.of
	reload := x.begun[of]
	if full {
		x.storing[oldID] = true
	}
	h.of, h.dst, h.occupied, h.moving = of, dst, true, true
	x.begun[of] = true
	x.mu.Unlock()
	err := func() error {
		if full {
			if err := x.toDevice(h.buffer, old); err != nil {
				return err
			}
			if err := h.waitIdle(context.Background()); err != nil {
				return err
			}
		}
		if reload {
			if err := x.fromDevice(h.buffer, dst); err != nil {
				return err
			}
		}
		return h.waitIdle(context.Background())
	}()
	x.mu.Lock()
	h.moving = false
	delete(x.storing, oldID)
	if err != nil {
		h.occupied = false
	}
	x.changed.Broadcast()
	return err
}

func (x *extents) flush(ctx context.Context) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	var first error
	for i := range x.slots {
		if h := &x.slots[i]; h.occupied {
			if err := x.toDevice(h.buffer, h.dst); first == nil {
				first = err
			}
			h.occupied = false
		}
	}
	if err := x.stage.flush(ctx); first == nil {
		first = err
	}
	return first
}
