package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/transfer/dispatch"
)

// Options describe an engine.
type Options struct {
	// Machine whose memories are copied between.
	Machine device.Machine
	// ChunkBytes is the maximum size of a chunk. Default: what the path copies in 160 us,
	// by its rate in the topology, at least 8 MiB: the launch costs little beside it, and
	// a copy of higher priority waits about equally long on every path.
	ChunkBytes int64
	// Depth is the number of chunks in flight on each link, of which the device copies the
	// first; more if they are small. A copy of higher priority waits for these, at most
	// Depth * ChunkBytes. Default: 2.
	Depth int
	// Window is how long the chunks behind the first take at the path's rate, at least, where
	// there is so much to copy: longer than the host needs from the end of a chunk until it
	// has enqueued another, or the link idles. It is shortened to Depth - 1 chunks. Default:
	// 80 us; half a chunk where the topology has no rate.
	Window time.Duration
	// BatchBelow is the mean size of the pieces of a chunk below which they are copied as one
	// batch: the larger they are, the less each one's latency weighs. Default: 32 MiB.
	BatchBelow int64
	// Multipath is how copies use several PCIe links, see Engine.AddRelay.
	Multipath Multipath
	// Kernel copies small pieces, where it is faster than the copy engines. Default: none.
	Kernel *Kernel
	// Timed: copies have Times, which costs the device timed events around each chunk.
	Timed bool
	// Trace records what copies are for. Default: none.
	Trace *trace.Writer
	// Log of retried chunks and failed copies. Default: discarded.
	Log *slog.Logger
}

const (
	minChunkBytes     = 8 << 20
	defaultBatchBelow = 32 << 20
	defaultChunkTime  = 160 * time.Microsecond
	defaultDepth      = 2
	defaultWindow     = 80 * time.Microsecond
	// partTime is about what each part of a batch takes beside its bytes: 1,000 blocks of 4 KiB
	// took 2.2 ms from the host, and 1.2 from a peer, on H200.
	partTime = 2 * time.Microsecond
)

// EnsureDefaults returns o with its defaults set, except ChunkBytes, whose default
// differs by path.
func (o Options) EnsureDefaults() Options {
	if o.Depth == 0 {
		o.Depth = defaultDepth
	}
	if o.Window == 0 {
		o.Window = defaultWindow
	}
	if o.BatchBelow == 0 {
		o.BatchBelow = defaultBatchBelow
	}
	o.Multipath = o.Multipath.ensureDefaults(o.Depth)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

// Validate reports the first invalid option.
func (o Options) Validate() error {
	switch {
	case o.Machine == nil:
		return errors.New("transfer: Options.Machine is not set")
	case o.ChunkBytes < 0:
		return fmt.Errorf("transfer: invalid chunk size of %d bytes: must be at least 1", o.ChunkBytes)
	case o.Depth <= 0:
		return fmt.Errorf("transfer: invalid depth %d: must be at least 1", o.Depth)
	case o.Window < 0:
		return fmt.Errorf("transfer: invalid window %v: must be positive", o.Window)
	case o.BatchBelow < 0:
		return fmt.Errorf("transfer: invalid batches of pieces below %d bytes: must be at least 1", o.BatchBelow)
	}
	if err := o.Multipath.validate(); err != nil || o.Kernel == nil {
		return err
	}
	return o.Kernel.validate()
}

// Engine copies between the memories of one machine. Its methods may be called
// from any goroutine.
//
// The core decides what is copied when. The engine carries out its actions, on the
// goroutine that reports an event: it enqueues chunks on the streams of the links. It
// learns of completed chunks and reached After points of all links on one host stream.
type Engine struct {
	o Options
	// watcher is the host stream that watches for completed chunks and After points, and
	// recovers streams.
	watcher device.Watcher

	// mu is never held during a wait: on a machine with virtual time a wait may run other
	// work of the engine.
	mu   sync.Mutex
	core dispatch.Core
	// links by their number in the core.
	links []*link
	// relays by their link with the host, those that were removed, too.
	relays map[device.Pair]*relay
	// Freelists. doneFences are fences for Ticket.end, with the value that each has
	// reached; exhausted ones are not used again, see maxTickets.
	freeWaits   []*pointWait
	freeTickets []*Ticket
	doneFences  []device.Point
	exhausted   []device.Point
	// events are timed events, of Options.Timed; freeEvents those that are not in use.
	events, freeEvents []device.Event
	// tables of copy kernels.
	tables *tables
	// signals: devices can signal that copies have landed.
	signals bool
	// signaling are the tickets whose Done a device signals, by its fence. Until that has happened no
	// other value of the fence is set: the device's would follow it.
	signaling map[device.Fence]*Ticket
	// firstValue is the value at which the machine's fences begin, known with the first one.
	firstValue uint32
	closed     bool
	// activity is what links do, while somebody wants to know.
	activity activity
}

// maxTickets is the number of tickets for which a fence is used as Ticket.end: fence
// values wrap around, and a caller may still hold the end of the fence's first ticket,
// which would count as not reached half the range later.
const maxTickets = 1 << 30

// pointWait is a watched point and the work that runs when it is reached.
type pointWait struct {
	point device.Point
	work  device.Work
}

// New starts an engine. A link is created by its first request.
func New(o Options) (*Engine, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	s, err := o.Machine.NewStream(device.Host, device.StreamOptions{Name: "transfer worker"})
	if err != nil {
		return nil, fmt.Errorf("transfer: %w", err)
	}
	e := &Engine{o: o, signals: o.Machine.Capabilities().CopyErrorsLoseDevice, signaling: map[device.Fence]*Ticket{}}
	e.core.Yields, e.core.Preferred, e.core.NoDirectFirst = o.Multipath.Wait, o.Multipath.Preferred, o.Multipath.NoDirectFirst
	var ok bool
	if e.watcher, ok = s.(device.Watcher); !ok {
		return nil, errors.Join(errors.New("transfer: host streams of this machine cannot watch fences and events"), s.Close())
	}
	if e.tables, err = newTables(&e.o); err != nil {
		return nil, errors.Join(fmt.Errorf("transfer: %w", err), s.Close())
	}
	return e, nil
}

// Submit queues a copy and returns at once. An error means that nothing was queued and
// Done will not be signaled: invalid arguments, no path (device.ErrUnreachable), a lost
// device (device.ErrLost), a closed engine (device.ErrClosed).
func (e *Engine) Submit(r Request) (*Ticket, error) {
	var began time.Duration
	if e.o.Timed {
		began = e.o.Machine.Now()
	}
	err := r.validate(e.o.Machine)
	var t *Ticket
	if err == nil {
		t, err = e.submit(&r, began)
	}
	if err != nil {
		return nil, fmt.Errorf("transfer: %s: %w", r.name(), err)
	}
	return t, nil
}

func (e *Engine) submit(r *Request, began time.Duration) (*Ticket, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, device.ErrClosed
	}
	if _, err := e.link(r.pair()); err != nil {
		return nil, err
	}
	t, err := e.ticket(r)
	if err != nil {
		return nil, err
	}
	t.timing.times.Submitted = began
	e.tick()
	if err = e.core.Submit(&t.req, r.After); err == nil {
		err = e.doActions()
	}
	if err != nil {
		e.unusedEnd(t.end)
		e.recycle(t)
		return nil, err
	}
	return t, nil
}

// ticket returns a ticket for a request, from the freelist if possible.
func (e *Engine) ticket(r *Request) (*Ticket, error) {
	end, err := e.endPoint()
	if err != nil {
		return nil, err
	}
	var t *Ticket
	if n := len(e.freeTickets); n > 0 {
		t, e.freeTickets = e.freeTickets[n-1], e.freeTickets[:n-1]
	} else {
		t = &Ticket{engine: e}
		t.req.Owner = t
	}
	pair := r.pair()
	t.req.From, t.req.To, t.req.Class, t.req.Done = pair.From, pair.To, uint8(r.Priority), r.Done
	t.req.TakesTurns = r.Priority == KVStore || r.Priority == KVLoad
	for i := range r.numPieces() {
		t.req.Add(r.piece(i).dispatched())
	}
	l := e.findLink(pair)
	if t.req.Bytes() < minRelayedPiece*int64(len(t.req.Pieces)) || !e.shares(l, t.req.Bytes()) {
		t.unit, t.req.ChunkPieces = l.kernel.takes(r.Priority, &t.req, l.chunkBytes)
	}
	t.req.Direct = t.unit > 0 // kernels run on the link's own GPU
	t.label, t.done = r.Label, r.Done
	t.traced, t.priority = e.o.Trace.Request(r.Done), r.Priority
	t.inOrder = r.DoneInOrder && e.signals
	t.end = end
	return t, nil
}

// endPoint returns a fence value that no other user waits for.
func (e *Engine) endPoint() (device.Point, error) {
	var p device.Point
	if n := len(e.doneFences); n > 0 {
		p, e.doneFences = e.doneFences[n-1], e.doneFences[:n-1]
	} else {
		f, err := e.o.Machine.NewFence("end of a copy")
		if err != nil {
			return device.Point{}, err
		}
		p = device.Point{Fence: f, Value: f.Value()}
		e.firstValue = p.Value
	}
	p.Value++
	return p, nil
}

// unusedEnd takes back a point of endPoint that will not be signaled.
func (e *Engine) unusedEnd(p device.Point) {
	p.Value--
	e.doneFences = append(e.doneFences, p)
}

// recycle puts a ticket on the freelist: of a copy that has landed and was released, or
// that was not queued.
func (e *Engine) recycle(t *Ticket) {
	t.req.Reset()
	e.putEvents(t)
	*t = Ticket{engine: e, req: t.req}
	e.freeTickets = append(e.freeTickets, t)
}

// link returns the link of the pair, which it creates if necessary.
func (e *Engine) link(pair device.Pair) (*link, error) {
	if l := e.findLink(pair); l != nil {
		return l, nil
	}
	path, err := e.o.Machine.Topology().Path(pair.From, pair.To)
	if err != nil {
		return nil, err
	}
	d := e.o.dispatched(pair, path.BytesPerSecond)
	l, err := newLink(e, pair, d)
	if err != nil {
		return nil, err
	}
	l.number = e.core.AddLink(d)
	l.rate = linkRate{bytesPerSecond: path.BytesPerSecond, measured: path.BytesPerSecond > 0}
	e.links = append(e.links, l)
	e.connect(l)
	return l, nil
}

// dispatched describes the link of a pair to the core; rate is that of its path, 0 if it is
// unknown.
func (o *Options) dispatched(pair device.Pair, rate float64) dispatch.Link {
	l := dispatch.Link{From: pair.From, To: pair.To, ChunkBytes: o.ChunkBytes, Depth: o.Depth}
	o.Multipath.describe(&l, pair, rate)
	if l.ChunkBytes == 0 {
		l.ChunkBytes = defaultChunkBytes(rate)
	}
	if l.WindowBytes = l.ChunkBytes / 2; rate > 0 {
		l.WindowBytes = int64(math.Ceil(rate * o.Window.Seconds()))
	}
	l.PartBytes = int64(rate * partTime.Seconds())
	l.WindowBytes = min(l.WindowBytes, int64(l.Depth-1)*l.ChunkBytes)
	return l
}

func defaultChunkBytes(rate float64) int64 {
	return max(minChunkBytes, int64(rate*defaultChunkTime.Seconds())>>20<<20)
}

// PerBatch is how many of many pieces of a size, in bytes, are one operation of the device on a
// path of a rate, in bytes per second, with default options: they have one latency. 1: each is by
// itself.
func PerBatch(rate float64, bytes int64) int {
	if bytes >= defaultBatchBelow {
		return 1
	}
	return int(min(max(1, defaultChunkBytes(rate)/bytes), dispatch.DefaultChunkPieces))
}

// findLink returns the link of the pair, nil before its first request.
func (e *Engine) findLink(pair device.Pair) *link {
	for _, l := range e.links {
		if l.pair == pair && !l.hop {
			return l
		}
	}
	return nil
}

// doActions carries out the core's actions. An error is why a request was withdrawn; only
// the one that was just submitted can be. The lock is held.
func (e *Engine) doActions() (err error) {
	for a, ok := e.core.Next(); ok; a, ok = e.core.Next() {
		switch a.Kind {
		case dispatch.Await:
			if failed := e.watchPoint(a.Point); failed != nil {
				e.core.Withdraw(a.Request, a.Point)
				err = failed
			}
		case dispatch.Launch:
			e.links[a.Link].launch(a.Slot, a.Chunk, a.Via)
		case dispatch.Recover:
			e.links[a.Link].startRecovery()
		case dispatch.Retry:
			l := e.links[a.Link]
			if l.hop {
				l = l.relay.link
			}
			l.stats.Retries++
			e.o.Log.Warn("retrying a failed chunk", "copy", a.Chunk.Request.Owner.(*Ticket).name(), "err", a.Err)
		case dispatch.Finish:
			e.finish(a.Request.Owner.(*Ticket), a.Err)
		case dispatch.Retire:
			e.retired(e.links[a.Link], a.Err)
		case dispatch.Drained:
			if failed := e.drained(e.links[a.Link]); failed != nil {
				e.o.Log.Error("a relay that was removed cannot be reported", "err", failed)
			}
		}
	}
	for _, l := range e.links {
		l.accountBusy()
	}
	return err
}

// watchPoint watches a point.
func (e *Engine) watchPoint(p device.Point) error {
	var w *pointWait
	if n := len(e.freeWaits); n > 0 {
		w, e.freeWaits = e.freeWaits[n-1], e.freeWaits[:n-1]
	} else {
		w = &pointWait{}
		w.work = device.Work{
			Name: "wait for slot", Host: true,
			Run:    func(device.Access) error { e.pointEnded(w, nil); return nil },
			Failed: func(err error) { e.pointEnded(w, fmt.Errorf("%w: %w", ErrAfter, err)) },
		}
	}
	w.point = p
	reached, err := e.watcher.Watch(p, w.work)
	if reached {
		e.core.Reached(p)
	}
	if reached || err != nil {
		e.recycleWait(w)
	}
	return err
}

func (e *Engine) recycleWait(w *pointWait) {
	w.point = device.Point{}
	e.freeWaits = append(e.freeWaits, w)
}

// pointEnded runs on the watcher when a point is reached or has failed.
func (e *Engine) pointEnded(w *pointWait, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tick()
	if err != nil {
		e.core.PointFailed(w.point, err)
	} else {
		e.core.Reached(w.point)
	}
	e.recycleWait(w)
	_ = e.doActions() // nothing was submitted
}

// finish signals or fails Done, and signals the ticket's end.
func (e *Engine) finish(t *Ticket, err error) {
	l := e.findLink(t.pair())
	if err == nil {
		if !t.signaled {
			err = e.setDone(t, nil)
		}
	}
	switch {
	case err == nil && t.req.Skipped():
		l.stats.Bytes += t.req.Landed()
		l.stats.ByPriority[t.req.Class] += t.req.Landed()
		e.putEvents(t) // it has no times
	case err == nil:
		l.stats.Copies++
		l.stats.Bytes += t.req.Bytes()
		l.stats.ByPriority[t.req.Class] += t.req.Bytes()
		if e.o.Timed {
			t.timing.times.Done = e.o.Machine.Now()
		}
	default:
		t.err = fmt.Errorf("transfer: %s: %w", t.name(), err)
		e.putEvents(t) // it has no times
		l.stats.Failed++
		if !errors.Is(err, ErrCanceled) {
			e.o.Log.Error("copy failed", "copy", t.name(), "err", err)
		}
		if err := e.setDone(t, t.err); err != nil {
			t.err = errors.Join(t.err, fmt.Errorf("transfer: %s: cannot fail the Done fence: %w", t.name(), err))
		}
	}
	if e.signaling[t.done.Fence] == t {
		e.signalEnded(t)
	}
	if err := t.end.Fence.Signal(t.end.Value); err != nil {
		t.err = errors.Join(t.err, err)
	}
	e.releaseDoneFence(t.end)
}

// deferred is what becomes of a Done point once the device has signaled another one of its fence.
type deferred struct {
	done device.Point
	err  error
}

func (d deferred) set() error {
	if d.err == nil {
		return signal(d.done)
	}
	return d.done.Fence.Fail(d.done.Value, d.err)
}

// setDone signals or fails Done, once no device will signal another value of the fence.
func (e *Engine) setDone(t *Ticket, err error) error {
	d := deferred{t.done, err}
	if before := e.pendingSignal(t.done.Fence); before != nil && before != t {
		before.next = append(before.next, d)
		return nil
	}
	return d.set()
}

// pendingSignal is the ticket whose Done a device will yet signal, with a value of this fence.
func (e *Engine) pendingSignal(f device.Fence) *Ticket {
	t := e.signaling[f]
	if t == nil {
		return nil
	}
	if over, _ := t.done.Ended(); !over {
		return t
	}
	e.signalEnded(t)
	return nil
}

// signalEnded sets what waited for the signal of a ticket's Done.
func (e *Engine) signalEnded(t *Ticket) {
	delete(e.signaling, t.done.Fence)
	for _, d := range t.next {
		if err := d.set(); err != nil {
			e.o.Log.Error("a Done fence cannot be set", "err", err)
		}
	}
	t.next = nil
}

// signal signals p. Where requests share a fence, one with a higher value may have ended
// before: then the fence is past p already.
func signal(p device.Point) error {
	err := p.Fence.Signal(p.Value)
	if err == nil || errors.Is(err, device.ErrClosed) {
		return err
	}
	if ok, _ := p.Ended(); ok {
		return nil
	}
	return err
}

// await waits for a point that the engine signals, on the watcher's behalf where that sleeps.
func (e *Engine) await(ctx context.Context, p device.Point) error {
	if h, ok := e.watcher.(device.Helper); ok {
		return h.Await(ctx, p)
	}
	return p.Wait(ctx)
}

// releaseDoneFence puts a fence on the freelist once it has reached its ticket's value.
func (e *Engine) releaseDoneFence(p device.Point) {
	if p.Value-e.firstValue < maxTickets {
		e.doneFences = append(e.doneFences, p)
	} else {
		e.exhausted = append(e.exhausted, p)
	}
}

// PathStats are the counters of one link.
type PathStats struct {
	From, To device.Space
	// Copies and Bytes that have landed, and these bytes by the priority that the copy had in the end.
	Copies, Bytes int64
	ByPriority    [Priorities]int64
	// Retries of chunks, and copies that Failed or were canceled.
	Retries, Failed int64
	// Busy is the time during which a chunk was in flight, on the machine's clock.
	Busy time.Duration
	// RelayedCopies and RelayedBytes are the chunks that the link has carried for other GPUs; those
	// that relays carried for this one are among Bytes. Retired: the link or a hop of its relay failed
	// too often, or was lost, and carries nothing more for others.
	RelayedCopies, RelayedBytes int64
	Retired                     bool
	// Queued copies are under way on the link now, or wait for nothing but it, with so many bytes that have not landed.
	// Stats alone reads them.
	Queued      int
	QueuedBytes int64
}

// Path returns the counters of the link of a pair of memories.
func (e *Engine) Path(pair device.Pair) PathStats {
	e.mu.Lock()
	defer e.mu.Unlock()
	if l := e.findLink(pair); l != nil {
		return l.snapshot()
	}
	return PathStats{From: pair.From, To: pair.To}
}

// Stats returns the counters of all links, by (From, To). Hops between relays and other GPUs are
// no links of their own.
func (e *Engine) Stats() []PathStats {
	e.mu.Lock()
	defer e.mu.Unlock()
	var stats []PathStats
	for _, l := range e.links {
		if !l.hop {
			s := l.snapshot()
			s.Queued, s.QueuedBytes = e.core.Queued(l.number)
			stats = append(stats, s)
		}
	}
	slices.SortFunc(stats, func(a, b PathStats) int {
		return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To))
	})
	return stats
}

// Close fails copies that have not started with device.ErrClosed, waits for the others,
// and releases the streams.
func (e *Engine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return fmt.Errorf("transfer: %w", device.ErrClosed)
	}
	e.closed = true
	e.core.CancelAll(device.ErrClosed)
	_ = e.doActions() // nothing was submitted
	var errs []error
	for r := e.core.InFlight(); r != nil && errs == nil; r = e.core.InFlight() {
		end := r.Owner.(*Ticket).end
		e.mu.Unlock()
		if err := end.Wait(context.Background()); err != nil {
			errs = append(errs, err)
		}
		e.mu.Lock()
	}
	links, fences := e.links, append(e.doneFences, e.exhausted...)
	e.mu.Unlock()
	defer e.mu.Lock()
	// Nothing else runs on the watcher now, except watches of points that no request
	// needs.
	errs = append(errs, e.watcher.Close())
	for _, l := range links {
		errs = append(errs, l.release())
	}
	errs = append(errs, e.tables.free())
	for _, ev := range e.events {
		errs = append(errs, ev.Close())
	}
	for _, m := range fences {
		errs = append(errs, m.Fence.Close())
	}
	return errors.Join(errs...)
}
