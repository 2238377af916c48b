package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
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
	// ChunkBytes is the size of a chunk. Default: what the path moves in 160 us, by its
	// rate in the topology, at least 8 MiB: then its start costs little, and an urgent
	// copy waits about as long on every path.
	ChunkBytes int64
	// Depth is how many chunks of one link are with the device at a time; small ones may
	// be more. Default: 2.
	Depth int
	// Trace prints what copies are of. Default: none.
	Trace *trace.Writer
	// Log hears of chunks tried again and copies that failed. Default: none.
	Log *slog.Logger
}

const (
	leastChunkBytes  = 8 << 20
	defaultChunkTime = 160 * time.Microsecond
	defaultDepth     = 2
)

// EnsureDefaults returns o with its defaults filled in, but for ChunkBytes, whose
// default each path has for itself.
func (o Options) EnsureDefaults() Options {
	if o.Depth == 0 {
		o.Depth = defaultDepth
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

// Validate reports the first option that makes no sense.
func (o Options) Validate() error {
	switch {
	case o.Machine == nil:
		return errors.New("transfer: Options.Machine is not set")
	case o.ChunkBytes < 0:
		return fmt.Errorf("transfer: chunks of %d bytes; they must have at least one", o.ChunkBytes)
	case o.Depth <= 0:
		return fmt.Errorf("transfer: depth %d; at least one chunk must be under way", o.Depth)
	}
	return nil
}

// Engine copies between the memories of one machine. Its methods may be called
// from any goroutine.
//
// What goes when is decided by the core. The engine does what it asks for: it gives
// chunks to the streams of the links, from whichever goroutine reports the event that
// calls for it, and learns of the ends of chunks and of After points on one host stream,
// of all links.
type Engine struct {
	o Options
	// ends is the host stream that learns of ends and points, and recovers streams.
	ends device.Watcher

	// mu is never held while something waits: on a machine with virtual time whoever
	// waits may run other work of the engine.
	mu   sync.Mutex
	core dispatch.Core
	// links by their number in the core.
	links []*link
	// waits, tickets and marks, fences for Ticket.end at the value that they have, are
	// there to be used again; worn marks are not, see lastMark.
	waits      []*wait
	tickets    []*Ticket
	doneFences []device.Point
	exhausted  []device.Point
	closed     bool
}

// lastMark is the value from which on a fence is not used for another Ticket.end: somebody
// may still hold the end of its first ticket, which half a round later would count as not
// reached.
const lastMark = 1 << 30

// wait is what is done when a point is reached.
type wait struct {
	point device.Point
	work  device.Work
}

// New starts an engine. Links come into being with their first request.
func New(o Options) (*Engine, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	s, err := o.Machine.NewStream(device.Host, device.StreamOptions{Name: "transfer worker"})
	if err != nil {
		return nil, fmt.Errorf("transfer: %w", err)
	}
	w, ok := s.(device.Watcher)
	if !ok {
		return nil, errors.Join(errors.New("transfer: a host stream of this machine watches for nothing"), s.Close())
	}
	return &Engine{o: o, ends: w}, nil
}

// Submit queues a copy and returns at once. An error means that nothing was
// queued and Done will not be raised: bad arguments, no path
// (device.ErrUnreachable), a lost device (device.ErrLost), a closed engine
// (device.ErrClosed).
func (e *Engine) Submit(r Request) (*Ticket, error) {
	err := r.validate(e.o.Machine)
	var t *Ticket
	if err == nil {
		t, err = e.submit(&r)
	}
	if err != nil {
		return nil, fmt.Errorf("transfer: %s: %w", r.name(), err)
	}
	return t, nil
}

func (e *Engine) submit(r *Request) (*Ticket, error) {
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
	if err = e.core.Submit(&t.req, r.After); err == nil {
		err = e.act()
	}
	if err != nil {
		t.end.Value-- // it was not raised
		e.doneFences = append(e.doneFences, t.end)
		e.recycle(t)
		return nil, err
	}
	return t, nil
}

// ticket is that of a request: a new one, or one that was given up.
func (e *Engine) ticket(r *Request) (*Ticket, error) {
	var mark device.Point
	if n := len(e.doneFences); n > 0 {
		mark, e.doneFences = e.doneFences[n-1], e.doneFences[:n-1]
	} else {
		f, err := e.o.Machine.NewFence("end of a copy")
		if err != nil {
			return nil, err
		}
		mark.Fence = f
	}
	var t *Ticket
	if n := len(e.tickets); n > 0 {
		t, e.tickets = e.tickets[n-1], e.tickets[:n-1]
	} else {
		t = &Ticket{engine: e}
		t.req.Owner = t
	}
	pair := r.pair()
	t.req.From, t.req.To, t.req.Class = pair.From, pair.To, uint8(r.Priority)
	for i := range r.count() {
		p := r.at(i)
		t.req.Add(dispatch.Piece{Dst: p.Dst.Range, Src: p.Src.Range, Apart: p.Apart})
	}
	t.label, t.done = r.Label, r.Done
	t.traced, t.priority = e.o.Trace.Request(r.Done), r.Priority
	t.end = device.Point{Fence: mark.Fence, Value: mark.Value + 1}
	return t, nil
}

// recycle takes a ticket back that nobody refers to: of a copy that has landed, or was not
// queued.
func (e *Engine) recycle(t *Ticket) {
	t.req.Reset()
	*t = Ticket{engine: e, req: t.req}
	e.tickets = append(e.tickets, t)
}

// link returns the link of the pair, and makes it where it is new.
func (e *Engine) link(pair device.Pair) (*link, error) {
	if l := e.existing(pair); l != nil {
		return l, nil
	}
	path, err := e.o.Machine.Topology().Path(pair.From, pair.To)
	if err != nil {
		return nil, err
	}
	chunk := e.o.ChunkBytes
	if chunk == 0 {
		chunk = max(leastChunkBytes, int64(path.BytesPerSecond*defaultChunkTime.Seconds())>>20<<20)
	}
	d := dispatch.Link{From: pair.From, To: pair.To, ChunkBytes: chunk, Depth: e.o.Depth}
	l, err := newLink(e, pair, d.Slots())
	if err != nil {
		return nil, err
	}
	l.number = e.core.AddLink(d)
	l.rate = rate{bytesPerSecond: path.BytesPerSecond, measured: path.BytesPerSecond > 0}
	e.links = append(e.links, l)
	return l, nil
}

// existing is the link of the pair, nil where it has had no request.
func (e *Engine) existing(pair device.Pair) *link {
	for _, l := range e.links {
		if l.pair == pair {
			return l
		}
	}
	return nil
}

// act does what the core asks for. An error says why a request was withdrawn, which only
// one that was submitted just now can be. The lock is held.
func (e *Engine) act() (err error) {
	for a, ok := e.core.Next(); ok; a, ok = e.core.Next() {
		switch a.Kind {
		case dispatch.Await:
			if failed := e.await(a.Point); failed != nil {
				e.core.Withdraw(a.Request, a.Point)
				err = failed
			}
		case dispatch.Launch:
			e.links[a.Link].launch(a.Slot, a.Chunk)
		case dispatch.Recover:
			e.links[a.Link].startRecovery()
		case dispatch.Retry:
			e.links[a.Link].stats.Retries++
			e.o.Log.Warn("retrying a failed chunk", "copy", a.Chunk.Request.Owner.(*Ticket).name(), "err", a.Err)
		case dispatch.Finish:
			e.finish(a.Request.Owner.(*Ticket), a.Err)
		}
	}
	for _, l := range e.links {
		l.account()
	}
	return err
}

// await watches for a point.
func (e *Engine) await(p device.Point) error {
	var w *wait
	if n := len(e.waits); n > 0 {
		w, e.waits = e.waits[n-1], e.waits[:n-1]
	} else {
		w = &wait{}
		w.work = device.Work{
			Name: "wait for slot", Host: true,
			Run:    func(device.Access) error { e.passed(w, nil); return nil },
			Failed: func(err error) { e.passed(w, fmt.Errorf("%w: %w", ErrAfter, err)) },
		}
	}
	w.point = p
	reached, err := e.ends.Watch(p, w.work)
	if reached {
		e.core.Reached(p)
	}
	if reached || err != nil {
		e.unused(w)
	}
	return err
}

func (e *Engine) unused(w *wait) {
	w.point = device.Point{}
	e.waits = append(e.waits, w)
}

// passed runs on ends when a point is reached, or has failed.
func (e *Engine) passed(w *wait, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err != nil {
		e.core.PointFailed(w.point, err)
	} else {
		e.core.Reached(w.point)
	}
	e.unused(w)
	_ = e.act() // nothing was submitted
}

// finish raises or fails Done, and lets those go on who wait for the ticket.
func (e *Engine) finish(t *Ticket, err error) {
	l := e.existing(t.pair())
	if err == nil {
		err = t.done.Fence.Raise(t.done.Value)
	}
	switch {
	case err == nil && t.req.Skipped():
	case err == nil:
		l.stats.Copies++
		l.stats.Bytes += t.req.Bytes()
	default:
		t.err = fmt.Errorf("transfer: %s: %w", t.name(), err)
		l.stats.Failed++
		if !errors.Is(err, ErrCanceled) {
			e.o.Log.Error("copy failed", "copy", t.name(), "err", err)
		}
		if err := t.done.Fence.Fail(t.done.Value, t.err); err != nil {
			t.err = errors.Join(t.err, fmt.Errorf("transfer: %s: nobody could be told: %w", t.name(), err))
		}
	}
	if err := t.end.Fence.Raise(t.end.Value); err != nil {
		t.err = errors.Join(t.err, err)
	}
	e.unmark(t.end)
}

// unmark takes a fence back of which no ticket will raise this value any more.
func (e *Engine) unmark(p device.Point) {
	if p.Value < lastMark {
		e.doneFences = append(e.doneFences, p)
	} else {
		e.exhausted = append(e.exhausted, p)
	}
}

// PathStats is what one link has done.
type PathStats struct {
	From, To device.Space
	// Copies and Bytes that have landed.
	Copies, Bytes int64
	// Retries of chunks, and copies that Failed or were canceled.
	Retries, Failed int64
	// Busy is for how long a chunk was with the device, on the machine's clock.
	Busy time.Duration
}

// Path says what the link of one pair of memories has done so far.
func (e *Engine) Path(pair device.Pair) PathStats {
	e.mu.Lock()
	defer e.mu.Unlock()
	if l := e.existing(pair); l != nil {
		return l.snapshot()
	}
	return PathStats{From: pair.From, To: pair.To}
}

// Stats says what every link has done so far, in the order of (From, To).
func (e *Engine) Stats() []PathStats {
	e.mu.Lock()
	defer e.mu.Unlock()
	var stats []PathStats
	for _, l := range e.links {
		stats = append(stats, l.snapshot())
	}
	slices.SortFunc(stats, func(a, b PathStats) int {
		return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To))
	})
	return stats
}

// Close fails what was not started, with device.ErrClosed, waits for what was, and
// releases the streams.
func (e *Engine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return fmt.Errorf("transfer: %w", device.ErrClosed)
	}
	e.closed = true
	e.core.CancelAll(device.ErrClosed)
	_ = e.act() // nothing was submitted
	var errs []error
	for r := e.core.Begun(); r != nil && errs == nil; r = e.core.Begun() {
		end := r.Owner.(*Ticket).end
		e.mu.Unlock()
		if err := end.Await(context.Background()); err != nil {
			errs = append(errs, err)
		}
		e.mu.Lock()
	}
	links, marks := e.links, append(e.doneFences, e.exhausted...)
	e.mu.Unlock()
	defer e.mu.Lock()
	// Now nothing runs on it but what was watched for, and points of no interest.
	errs = append(errs, e.ends.Close())
	for _, l := range links {
		errs = append(errs, l.release())
	}
	for _, m := range marks {
		errs = append(errs, m.Fence.Close())
	}
	return errors.Join(errs...)
}
