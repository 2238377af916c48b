package experts

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"sync"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/transfer"
)

// coverage says which rows of every expert's matrices have come.
type coverage struct {
	rows [3]int // of a part

	mu   sync.Mutex
	seen map[ID]*[3][]uint64 // bit sets of rows
	left int64               // rows that have not come, in all
}

func newCoverage(shape kernels.ExpertShape, experts int) *coverage {
	c := &coverage{seen: map[ID]*[3][]uint64{}}
	for p := range c.rows {
		c.rows[p] = rowsOf(shape, kernels.Part(p))
		c.left += int64(experts) * int64(c.rows[p])
	}
	return c
}

// rowsOf is how many rows a part has.
func rowsOf(s kernels.ExpertShape, p kernels.Part) int {
	if p == kernels.W2 {
		return s.Hidden
	}
	return s.Intermediate
}

// rowBytes is the size of one row of a part.
func rowBytes(s kernels.ExpertShape, p kernels.Part) int {
	if p == kernels.W2 {
		return s.Intermediate * s.DType.Size()
	}
	return s.Hidden * s.DType.Size()
}

// add notes rows [from, from+n), none of which may have come before.
func (c *coverage) add(id ID, part kernels.Part, from, n int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	sets := c.seen[id]
	if sets == nil {
		sets = new([3][]uint64)
		c.seen[id] = sets
	}
	if sets[part] == nil {
		sets[part] = make([]uint64, (c.rows[part]+63)/64)
	}
	set := sets[part]
	for row := from; row < from+n; row++ {
		if set[row/64]&(1<<(row%64)) != 0 {
			return fmt.Errorf("row %d of %v comes a second time", row, part)
		}
	}
	for row := from; row < from+n; row++ {
		set[row/64] |= 1 << (row % 64)
	}
	c.left -= int64(n)
	return nil
}

// missing describes the first part that is not whole, for the ids in order; nil if
// there is none.
func (c *coverage) missing(layers []int, experts int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left == 0 {
		return nil
	}
	for l, layer := range layers {
		for e := range experts {
			for p, rows := range c.rows {
				have := 0
				if sets := c.seen[ID{l, e}]; sets != nil {
					for _, w := range sets[p] {
						have += bits.OnesCount64(w)
					}
				}
				if have < rows {
					return fmt.Errorf("experts: layer %d expert %d: only %d of %d rows of %v have come (%d rows are missing in all)", layer, e, have, rows, kernels.Part(p), c.left)
				}
			}
		}
	}
	panic(fmt.Sprintf("experts: %d rows are missing, and no part lacks any", c.left))
}

// staging is the pinned memory through which local experts reach the device.
type staging interface {
	// write brings rows of one matrix to their place in the extent dst of the
	// expert id. Several goroutines may call it.
	write(id ID, dst device.Region, part kernels.Part, row int, data []byte) error
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

func newStage(o Options, buffers int) (stage, error) {
	s := stage{o: o}
	var err error
	if s.memory, err = o.Machine.Alloc(device.Host, o.Plan.StagingBytes, "expert staging"); err != nil {
		return s, err
	}
	bytes := o.Plan.StagingBytes / int64(buffers)
	for i := range buffers {
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
	r.Priority, r.Done = transfer.Needed, b.done
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
	s, err := newStage(o, stagingBuffers)
	if err != nil {
		return nil, err
	}
	p := &pieces{stage: s, free: make(chan *buffer, len(s.buffers))}
	for _, b := range s.buffers {
		p.free <- b
	}
	return p, nil
}

func (p *pieces) write(_ ID, dst device.Region, part kernels.Part, row int, data []byte) error {
	shape := p.o.Plan.Layout.ExpertShape
	at := int64(row) * int64(rowBytes(shape, part))
	for before := range part {
		at += int64(rowsOf(shape, before)) * int64(rowBytes(shape, before))
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
	begun   map[ID]bool // experts that have been in a buffer
	leaving map[ID]bool // experts that are on their way to their slots
	clock   uint64
}

type extent struct {
	*buffer
	id    ID
	full  bool // it holds something
	dst   device.Region
	users int
	used  uint64
	// moving: one goroutine is giving the buffer to another expert.
	moving bool
}

func newExtents(o Options) (*extents, error) {
	s, err := newStage(o, int(o.Plan.StagingBytes/o.Plan.Layout.Size))
	if err != nil {
		return nil, err
	}
	x := &extents{stage: s, begun: map[ID]bool{}, leaving: map[ID]bool{}}
	x.changed.L = &x.mu
	for _, b := range s.buffers {
		x.held = append(x.held, extent{buffer: b})
	}
	return x, nil
}

func (x *extents) write(id ID, dst device.Region, part kernels.Part, row int, data []byte) error {
	h, err := x.take(id, dst)
	if err != nil {
		return err
	}
	err = x.o.Backend.PackExpert(x.o.Plan.Layout, part, row, data, x.memory.Write(h.offset, x.o.Plan.Layout.Size))
	x.mu.Lock()
	defer x.mu.Unlock()
	h.users--
	x.changed.Broadcast()
	return err
}

// take returns the buffer that holds id, for the caller to pack into.
func (x *extents) take(id ID, dst device.Region) (*extent, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for {
		h := x.find(id)
		if h == nil && !x.leaving[id] {
			if h = x.victim(); h != nil {
				if err := x.move(h, id, dst); err != nil {
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

func (x *extents) find(id ID) *extent {
	for i := range x.held {
		if h := &x.held[i]; h.full && h.id == id {
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

// move puts what h holds to its slot and fetches what there is of id. The lock is
// released meanwhile.
func (x *extents) move(h *extent, id ID, dst device.Region) error {
	full, old, oldID := h.full, h.dst, h.id
	reload := x.begun[id]
	if full {
		x.leaving[oldID] = true
	}
	h.id, h.dst, h.full, h.moving = id, dst, true, true
	x.begun[id] = true
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
