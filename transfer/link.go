package transfer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/transfer/dispatch"
)

// link makes the copies from one memory to another: each chunk is enqueued on a stream,
// followed by an event. The engine's lock guards it.
type link struct {
	engine *Engine
	pair   device.Pair
	// number of the link in the core.
	number     int
	chunkBytes int64
	stream     device.Stream
	// batches is the stream, where it copies many pieces by one operation; nil otherwise.
	batches device.BatchCopier
	// dst and src are the pieces of the chunk that is being launched, add appends one.
	dst, src []device.Range
	add      func(dst, src device.Range) error
	slots    []slot
	// kernel launches kernels in place of copies, on a stream of its own; nil: none. All chunks
	// of a request are on one stream, so those that have landed are its first.
	kernel *kernelLane
	// relay is the relay that carries chunks over the link, or, of a hop, to which it belongs; nil: none.
	relay *relay
	hop   bool
	// refused: the stream has refused a chunk, and was not recovered since.
	refused bool
	// recovery clears the error of the stream.
	recovery device.Work
	// pacer says when the chunks on the stream are due.
	pacer pacer

	stats PathStats
	rate  linkRate
	// busy: a chunk is in flight, since that time.
	busy  bool
	since time.Duration
	// landedAt is when the latest chunk landed, while activity is recorded.
	landedAt time.Duration
	// recorded is the index of its latest activity, which may have been taken since.
	recorded int
}

// slot is one chunk that may be in flight: the event behind it, and the work that runs
// when the event has completed. With Options.Timed there is an event before it, too; both
// belong to the engine.
type slot struct {
	chunk        dispatch.Chunk
	via          dispatch.Via
	event, start device.Event
	onEnd        device.Work
	// due is onEnd.Due.
	due *device.Due
	// began is when the chunk was enqueued, while activity is recorded.
	began time.Duration
	// signals: the device signals Done behind the chunk.
	signals bool
}

func newLink(e *Engine, pair device.Pair, d dispatch.Link) (l *link, err error) {
	l = &link{engine: e, pair: pair, chunkBytes: d.ChunkBytes, pacer: pacer{profile: d.BytesPerSecond}, stats: PathStats{From: pair.From, To: pair.To}}
	defer func() {
		if err != nil {
			if l.kernel != nil {
				e.tables.used = l.kernel.first // no other link was made meanwhile
			}
			_ = l.release() // the first error is the one that matters
		}
	}()
	// Copies between GPUs are faster on a stream of the source than on one of the
	// destination.
	space := pair.From
	if space == device.Host {
		space = pair.To
	}
	if err = l.open(space, fmt.Sprintf("copy %s to %s", pair.From, pair.To)); err != nil {
		return l, err
	}
	if k := e.o.Kernel; k != nil && k.Paths[pair].Below > 0 {
		if l.kernel, err = newKernelLane(e, pair, d.Slots()); err != nil {
			return l, err
		}
	}
	return l, l.addSlots(d.Slots())
}

// newHop makes a hop of a relay. Its stream is the relay's, in both directions: if that GPU is
// lost, the other one's streams are not.
func newHop(e *Engine, b *relay, pair device.Pair, d dispatch.Link) (*link, error) {
	l := &link{engine: e, pair: pair, chunkBytes: d.ChunkBytes, pacer: pacer{profile: d.BytesPerSecond}, relay: b, hop: true, stats: PathStats{From: pair.From, To: pair.To}}
	err := l.open(b.gpu, fmt.Sprintf("relay %s to %s", pair.From, pair.To))
	if err == nil {
		err = l.addSlots(len(b.buffers))
	}
	if err != nil {
		return nil, errors.Join(err, l.release())
	}
	return l, nil
}

// open opens the stream.
func (l *link) open(space device.Space, name string) (err error) {
	if l.stream, err = l.engine.o.Machine.NewStream(space, device.StreamOptions{Name: name}); err != nil {
		return err
	}
	if l.pair.From != device.Host || l.pair.To != device.Host {
		l.batches, _ = l.stream.(device.BatchCopier)
	}
	l.add = func(dst, src device.Range) error {
		l.dst, l.src = append(l.dst, dst), append(l.src, src)
		return nil
	}
	l.recovery = device.Work{Name: "recover from a failed chunk", Host: true, Run: func(device.Access) error { l.recovered(); return nil }}
	return nil
}

// addSlots makes slots until there are n.
func (l *link) addSlots(n int) (err error) {
	for i := len(l.slots); i < n; i++ {
		s := slot{due: new(device.Due)}
		if s.event, s.start, err = l.events(); err != nil {
			return err
		}
		s.onEnd = device.Work{
			Name: "complete transfer", Host: true, Due: s.due,
			Run:    func(device.Access) error { l.chunkEnded(i, nil); return nil },
			Failed: func(err error) { l.chunkEnded(i, err) },
		}
		l.slots = append(l.slots, s)
	}
	return nil
}

// events returns the events of a slot.
func (l *link) events() (end, start device.Event, err error) {
	if !l.engine.o.Timed {
		end, err = l.engine.o.Machine.NewUntimedEvent()
		return end, nil, err
	}
	if start, err = l.engine.timedEvent(); err == nil {
		end, err = l.engine.timedEvent()
	}
	return end, start, err
}

// launch enqueues a chunk, or a part of its way, and its event.
func (l *link) launch(i int, c dispatch.Chunk, via dispatch.Via) {
	e := l.engine
	now := e.o.Machine.Now()
	if !l.busy {
		l.busy, l.since = true, now
	}
	s := &l.slots[i]
	s.chunk, s.via = c, via
	if c.Request.Owner.(*Ticket).unit > 0 {
		s.due.NotBefore.Store(0) // on the kernels' stream
		s.due.Pending.Store(0)
	} else {
		l.pacer.launch(now, c.Bytes, s.due)
	}
	e.activity.launched(l, i)
	err := l.enqueue(i)
	passed := false
	if err == nil {
		passed, err = l.watch(i)
	}
	switch {
	case err != nil:
		c.Request.Owner.(*Ticket).inOrder, l.refused = false, true
		l.pacer.drop(now, s.due)
		e.core.Refused(l.number, i, err)
	case passed:
		l.landed(i)
	}
}

// enqueue enqueues the chunk of a slot and its event on one of the link's streams.
func (l *link) enqueue(i int) error {
	s := &l.slots[i]
	t := s.chunk.Request.Owner.(*Ticket)
	s.signals = false
	on := l.stream
	if t.unit > 0 {
		on = l.kernel.stream
	}
	if t.traced != nil {
		trace.Annotate(on, t.note(s))
	}
	if s.start != nil && s.begins() {
		t.timing.times.Enqueued = l.engine.o.Machine.Now()
		if err := on.Record(s.start); err != nil {
			return err
		}
	}
	if err := l.copy(i, t.unit); err != nil {
		return err
	}
	t.relayed = t.relayed || s.via.Hop != dispatch.Direct
	if !t.inOrder || t.relayed || l.refused || !s.chunk.Last() {
		return on.Record(s.event)
	}
	if l.engine.pendingSignal(t.done.Fence) != nil {
		return on.Record(s.event) // the device's value would follow that of this one
	}
	if past, _ := t.done.Ended(); past {
		return on.Record(s.event) // a later request with the fence has failed
	}
	// All chunks before it are on the same stream.
	if err := on.SignalFence(t.done.Fence, t.done.Value); err != nil {
		return err
	}
	t.signaled, s.signals = true, true
	l.engine.signaling[t.done.Fence] = t
	if s.start != nil {
		return on.Record(s.event)
	}
	return nil
}

// watch learns of the end of a slot's chunk: true if it has landed already. Done, where the device
// signals it, is a word in memory, and an event a query of the driver. Neither is looked at before the chunk
// is due.
func (l *link) watch(i int) (landed bool, err error) {
	s := &l.slots[i]
	if s.signals && s.start == nil {
		return l.engine.watcher.Watch(s.chunk.Request.Owner.(*Ticket).done, s.onEnd)
	}
	return l.engine.watcher.WatchEvent(s.event, s.onEnd)
}

// begins and ends report whether the copy of the slot begins its request, and whether it ends the
// way of its chunk.
func (s *slot) begins() bool { return s.chunk.First() && s.via.Hop != dispatch.FromBuffer }
func (s *slot) ends() bool   { return s.via.Hop != dispatch.ToBuffer }

// landed reports the chunk of a slot as landed.
func (l *link) landed(i int) {
	s := &l.slots[i]
	if s.start != nil {
		l.keepTimes(s)
	}
	if s.via.Hop != dispatch.Direct && !l.hop {
		l.stats.RelayedCopies++
		l.stats.RelayedBytes += s.chunk.Bytes
	}
	l.pacer.land(l.engine.o.Machine.Now(), s.due)
	l.engine.activity.landed(l, i)
	l.engine.core.Landed(l.number, i)
}

// copy enqueues the copies of a slot's chunk: by a kernel, in blocks of unit bytes, if that is
// set, otherwise as one batch, if they are small and the stream can. They do not depend on each other, see
// Request.Pieces.
func (l *link) copy(i int, unit int64) error {
	l.dst, l.src = l.dst[:0], l.src[:0]
	_ = l.slots[i].chunk.Each(l.add) // which does not fail
	l.buffered(l.slots[i].via)
	if unit > 0 {
		return l.kernel.copy(i, l.dst, l.src, unit)
	}
	n := int64(len(l.dst))
	if l.batches != nil && n > 1 && l.slots[i].chunk.Bytes < l.engine.o.BatchBelow*n {
		err := l.batches.CopyBatch(l.dst, l.src)
		if !errors.Is(err, device.ErrNoBatches) {
			return err
		}
		l.batches = nil
	}
	for i := range l.dst {
		if err := l.stream.Copy(l.dst[i], l.src[i]); err != nil {
			return err
		}
	}
	return nil
}

// buffered replaces one end of the pieces by a relay's buffer, where they are contiguous.
func (l *link) buffered(via dispatch.Via) {
	if via.Hop == dispatch.Direct {
		return
	}
	buffer, ranges := l.engine.links[via.Relay].relay.buffers[via.Buffer], l.dst
	if via.Hop == dispatch.FromBuffer {
		ranges = l.src
	}
	at := int64(0)
	for i, r := range ranges {
		ranges[i] = buffer.Slice(at, r.Bytes)
		at += r.Bytes
	}
}

// chunkEnded runs on the watcher when the event behind a chunk has completed.
func (l *link) chunkEnded(i int, err error) {
	e := l.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tick()
	if err != nil {
		l.slots[i].chunk.Request.Owner.(*Ticket).inOrder = false
		l.pacer.drop(e.o.Machine.Now(), l.slots[i].due)
		e.core.Failed(l.number, i, err)
	} else {
		l.landed(i)
	}
	_ = e.doActions() // nothing was submitted
}

// startRecovery clears the stream's error on the watcher, since that may wait.
func (l *link) startRecovery() {
	if err := l.engine.watcher.Execute(l.recovery); err != nil {
		l.engine.core.Recovered(l.number, err)
	}
}

func (l *link) recovered() {
	err := l.stream.Recover(context.Background())
	if l.kernel != nil {
		err = errors.Join(err, l.kernel.stream.Recover(context.Background()))
	}
	e := l.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tick()
	l.refused = false
	e.core.Recovered(l.number, err)
	_ = e.doActions() // nothing was submitted
}

// accountBusy updates Busy when the link becomes idle.
func (l *link) accountBusy() {
	if l.busy && !l.engine.core.Busy(l.number) {
		l.busy = false
		l.stats.Busy += l.engine.o.Machine.Now() - l.since
	}
}

func (l *link) snapshot() PathStats {
	s := l.stats
	if l.busy {
		s.Busy += l.engine.o.Machine.Now() - l.since
	}
	return s
}

// release closes the streams and events that exist.
func (l *link) release() error {
	errs := []error{l.kernel.release()}
	if l.stream != nil {
		errs = append(errs, l.stream.Close())
	}
	for _, s := range l.slots {
		if s.start == nil {
			errs = append(errs, s.event.Close())
		}
	}
	return errors.Join(errs...)
}
