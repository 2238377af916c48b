package experts

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/residency"
	"github.com/moeserve/moeserve/transfer"
)

// Use is what a layer's products need.
type Use struct {
	// Slots is the layer's slot table, [experts] U64, valid on the compute stream
	// from Open to Done.
	Slots kernels.Tensor
	// Waves hold every expert of the layer once: residents first. They are valid
	// until Done.
	Waves []Wave
}

// Wave is a list of experts to be launched together.
type Wave struct {
	// Experts is the list, [n] I32 in device memory.
	Experts kernels.Tensor
	// Await must be reached before the launch; empty for residents.
	Await []transfer.Point
}

// Wait holds s back until the wave's experts have arrived.
func (w Wave) Wait(s device.Stream) error {
	for _, p := range w.Await {
		if err := s.Await(p.Fence, p.Value); err != nil {
			return fmt.Errorf("experts: wait for a wave: %w", err)
		}
	}
	return nil
}

// Prefetch submits the copies of what the layer misses into ring slots that no
// layer prefetched or open holds. What finds no slot is left to Open. It never
// waits, and does nothing for a layer that has everything, or no experts.
func (s *Store) Prefetch(layer int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	position, ok := s.position[layer]
	if !ok {
		return nil
	}
	if err := s.usable(); err != nil {
		return err
	}
	if _, err := s.bring(position, transfer.Prefetch); err != nil {
		return fmt.Errorf("experts: prefetch layer %d: %w", layer, err)
	}
	return nil
}

// Open readies a layer for one use on the compute stream: it fetches what no
// Prefetch has, makes the fetches under way urgent, and puts the update of the slot
// table on the stream. ctx bounds a wait that only a host two uses of the layer
// ahead of the device can meet.
func (s *Store) Open(ctx context.Context, layer int, compute device.Stream) (Use, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	use, err := s.openLayer(ctx, layer, compute)
	if err != nil {
		return Use{}, fmt.Errorf("experts: open layer %d: %w", layer, err)
	}
	return use, nil
}

func (s *Store) openLayer(ctx context.Context, layer int, compute device.Stream) (Use, error) {
	position, ok := s.position[layer]
	if !ok {
		return Use{}, errors.New("it has no experts")
	}
	if err := s.usable(); err != nil {
		return Use{}, err
	}
	l := &s.layers[position]
	if l.open {
		return Use{}, errors.New("it is open already; Done comes first")
	}
	whole, err := s.bring(position, transfer.Needed)
	if err != nil {
		return Use{}, err
	}
	if !whole {
		return Use{}, fmt.Errorf("the ring of %d slots is held by other layers that were prefetched or opened and have not seen Done", len(s.slots))
	}
	for _, f := range l.fetches {
		f.ticket.Promote(transfer.Needed)
	}
	if err := s.updateRow(ctx, position, compute); err != nil {
		return Use{}, err
	}
	resident := len(l.use.Waves) - len(l.waves)
	for w, r := range l.waves {
		await := l.use.Waves[resident+w].Await[:0]
		for i := r[0]; i < r[1]; i++ {
			if p := s.slots[l.slot[i]].arrival; !p.None() && !slices.Contains(await, p) {
				await = append(await, p)
			}
		}
		l.use.Waves[resident+w].Await = await
	}
	l.open = true
	s.stats.Hits[Local] += int64(s.plan.Experts - len(l.missing))
	s.stats.Hits[Ring] += l.hits
	s.stats.Misses += l.misses
	s.stats.Prefetched += l.prefetched
	return l.use, nil
}

// usable says why no layer can be prefetched or opened.
func (s *Store) usable() error {
	switch {
	case s.closed:
		return device.ErrClosed
	case !s.sealed:
		return errors.New("the store is not sealed")
	}
	if err := s.failure(); err != nil {
		return fmt.Errorf("a fetch has failed and the store was not reset: %w", err)
	}
	return nil
}

// bring takes a reference on every missing expert of the layer: on its slot where
// it is still there, else on a free one, to which it is copied. False: some found no
// slot.
func (s *Store) bring(position int, p transfer.Priority) (whole bool, err error) {
	l := &s.layers[position]
	for i, e := range l.missing {
		if n := l.slot[i]; n >= 0 && !l.refs[i].Held() && s.slots[n].holds == (ID{position, e}) {
			if ref, ok := s.slots[n].cell.Acquire(); ok {
				l.refs[i] = ref
				l.hits++
			}
		}
	}
	whole = true
	for _, wave := range l.waves {
		for i := wave[0]; i < wave[1] && whole; {
			if l.refs[i].Held() {
				i++
				continue
			}
			n := 0
			var after []transfer.Point
			first := -1
			for i+n < wave[1] && !l.refs[i+n].Held() {
				at, ok := s.freeSlot()
				if !ok {
					whole = false
					break
				}
				if first >= 0 && at != first+n {
					break
				}
				if first < 0 {
					first = at
				}
				after = s.occupy(at, ID{position, l.missing[i+n]}, after)
				l.refs[i+n], _ = s.slots[at].cell.Acquire()
				l.slot[i+n] = at
				n++
			}
			if n == 0 {
				break
			}
			if err := s.fetch(position, i, n, first, after, p); err != nil {
				return false, err
			}
			i += n
		}
	}
	return whole, nil
}

// freeSlot is the first slot from s.next on that nobody holds.
func (s *Store) freeSlot() (int, bool) {
	for k := range s.slots {
		at := (s.next + k) % len(s.slots)
		if _, _, references := s.slots[at].cell.State(); references == 0 {
			return at, true
		}
	}
	return 0, false
}

// occupy makes a free slot that of id and adds to after until when former readers
// may read it.
func (s *Store) occupy(at int, id ID, after []transfer.Point) []transfer.Point {
	sl := &s.slots[at]
	exclusive, ok := sl.cell.BeginExclusive()
	if !ok {
		panic(fmt.Sprintf("experts: ring slot %d is held exclusively by somebody else", at))
	}
	for _, p := range exclusive.Points() {
		if !slices.Contains(after, transfer.Point(p)) {
			after = append(after, transfer.Point(p))
		}
	}
	exclusive.Replace()
	sl.holds = id
	s.next = (at + 1) % len(s.slots)
	return after
}

// fetch copies missing experts [i, i+n) of the layer into the slots from first on.
func (s *Store) fetch(position, i, n, first int, after []transfer.Point, p transfer.Priority) error {
	l, size := &s.layers[position], s.plan.Layout.Size
	sl := &s.slots[first]
	sl.value++
	f := &fetch{}
	for k := range n {
		f.slots = append(f.slots, first+k)
		s.slots[first+k].arrival = transfer.Point{Fence: sl.landed, Value: sl.value}
		s.counts[position][l.missing[i+k]]++
	}
	// An expert that lies in peer memory would be taken from there; in host memory
	// the experts of a wave lie side by side.
	bytes := int64(n) * size
	ticket, err := s.o.Transfer.Submit(transfer.Request{
		From: device.Host, Src: s.host.Range(s.offset[position][l.missing[i]], bytes),
		To: s.o.Space, Dst: s.ring.Range(int64(first)*size, bytes),
		Priority: p, After: after, Done: sl.arrival,
		Label: fmt.Sprintf("layer %d experts %d to %d", s.plan.Layers[position], l.missing[i], l.missing[i+n-1]),
	})
	if err != nil {
		s.err = err
		s.fetches = append(s.fetches, f)
		return err
	}
	f.ticket = ticket
	s.fetches = append(s.fetches, f)
	l.fetches = append(l.fetches, f)
	l.misses += int64(n)
	if p == transfer.Prefetch {
		l.prefetched += int64(n)
	}
	s.stats.Fetched[Host] += bytes
	return nil
}

// updateRow puts the layer's addresses into its row of the slot table, if they are
// not there.
func (s *Store) updateRow(ctx context.Context, position int, compute device.Stream) error {
	l := &s.layers[position]
	l.sent = -1
	for i, e := range l.missing {
		l.want[e] = uint64(s.ring.Range(int64(l.slot[i])*s.plan.Layout.Size, s.plan.Layout.Size).Addr)
	}
	if slices.Equal(l.want, l.image) {
		return nil
	}
	row := l.turn
	if v := l.rows[row]; v != 0 {
		if err := s.passed.Await(ctx, v); err != nil {
			return fmt.Errorf("wait for an earlier update of the slot table: %w", err)
		}
		l.rows[row] = 0
	}
	bytes := int64(s.plan.Experts) * slotBytes
	from := s.rowAt(row, position)
	putRow(s.upload.Write(from, bytes), l.want)
	if err := compute.Copy(s.table.Range(s.rowAt(0, position), bytes), s.upload.Range(from, bytes)); err != nil {
		return fmt.Errorf("update the slot table: %w", err)
	}
	l.image = append(l.image[:0], l.want...)
	l.sent, l.turn = row, (row+1)%uploadRows
	return nil
}

// Done says that everything that reads the layer has been enqueued on the compute
// stream, and puts there the fence that lets its slots be overwritten.
func (s *Store) Done(layer int, compute device.Stream) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	position, ok := s.position[layer]
	if !ok || !s.layers[position].open {
		return fmt.Errorf("experts: done with layer %d: it is not open", layer)
	}
	l := &s.layers[position]
	l.open = false
	if len(l.missing) == 0 {
		return nil
	}
	if err := compute.Raise(s.passed, s.passedValue+1); err != nil {
		return fmt.Errorf("experts: done with layer %d: %w", layer, err)
	}
	s.passedValue++
	if l.sent >= 0 {
		l.rows[l.sent] = s.passedValue
	}
	for i := range l.refs {
		l.refs[i].ReleaseAt(residency.Point{Fence: s.passed, Value: s.passedValue})
	}
	l.endUse()
	s.forgetEnded()
	return nil
}

func (l *layer) endUse() {
	l.fetches = l.fetches[:0]
	l.hits, l.misses, l.prefetched = 0, 0, 0
}

// forgetEnded drops the fetches that have landed.
func (s *Store) forgetEnded() {
	s.fetches = slices.DeleteFunc(s.fetches, func(f *fetch) bool {
		return f.ticket != nil && f.ticket.Ended() && f.ticket.Err() == nil
	})
}

// Err is the first failure of a fetch since the last Reset, or nil. After the end
// of a step nothing of the step can still fail.
func (s *Store) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.failure(); err != nil {
		return fmt.Errorf("experts: %w", err)
	}
	return nil
}

func (s *Store) failure() error {
	for _, f := range s.fetches {
		if s.err != nil {
			break
		}
		s.err = f.ticket.Err()
	}
	return s.err
}

// cancel ends the fetches of which nothing is with the device yet.
func (s *Store) cancel() {
	for _, f := range s.fetches {
		if f.ticket != nil {
			f.ticket.Cancel()
		}
	}
}

// Reset makes the store usable again after a step was dropped: it ends the use of
// all layers, waits for the copies under way or cancels them, and forgets the
// experts that did not arrive whole. The compute stream has been recovered; nothing
// of the step runs. An error means that ctx was done, and that Reset may be called
// again.
func (s *Store) Reset(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cancel()
	for _, f := range s.fetches {
		if f.ticket == nil {
			continue
		}
		if err := f.ticket.Wait(ctx); !f.ticket.Ended() {
			return fmt.Errorf("experts: reset: %w", err)
		}
	}
	for i := range s.layers {
		l := &s.layers[i]
		for k := range l.refs {
			if l.refs[k].Held() {
				l.refs[k].Release()
			}
		}
		l.open, l.image, l.sent, l.rows = false, nil, -1, [uploadRows]uint32{}
		l.endUse()
	}
	lost := 0
	for _, f := range s.fetches {
		failed := f.ticket == nil || f.ticket.Err() != nil
		if failed {
			s.stats.Failed++
		}
		for _, at := range f.slots {
			if failed {
				s.slots[at].holds = nothing
				lost++
			}
		}
	}
	for i := range s.slots {
		sl := &s.slots[i]
		exclusive, ok := sl.cell.BeginExclusive()
		if !ok {
			panic(fmt.Sprintf("experts: ring slot %d is held exclusively by somebody else", i))
		}
		exclusive.Settle()
		sl.arrival = transfer.Point{}
		if sl.holds == nothing {
			exclusive.Invalidate()
		} else {
			exclusive.End()
		}
	}
	if s.err != nil {
		s.log.Warn("experts were reset", "error", s.err, "slots_lost", lost)
	}
	s.fetches, s.err = nil, nil
	return nil
}
