package transfer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
)

// link makes the copies from one memory to another.
//
// Chunks go onto the stream copies, each followed by an event. For each there is
// one piece of work on the host stream owner, which waits for the event, settles
// what became of the chunk, and gives the device the next. Waiting is done inside
// that work and not by the stream, because a stream that waits for an event of a
// failed copy fails with it and would never get to the work.
//
// Requests that wait for After points have a host stream for as long as they do, the
// same one for those with the same points: any order of points is possible, so none
// may stand behind others.
//
// The lock is never held while something waits: on a machine with virtual time
// whoever waits may run other work of the same link.
type link struct {
	o      Options
	pair   device.Pair
	copies device.Stream
	owner  device.Executor
	reap   device.Work

	mu    sync.Mutex
	queue queue
	// flying are the chunks with the device, in order; the one in front is that of
	// the next work on owner. Of spare events there are enough for Depth chunks.
	flying []flight
	spare  []device.Event
	// blocked are the streams that wait for After points.
	blocked []*waiting
	// waiters are all host streams made for this, idle those that wait for nothing,
	// broken those whose points have failed, and they with them.
	waiters, idle, broken []*waiting
	// requests are there to be used again.
	requests []*request
	// marks are fences for request.mark that no request uses.
	marks []device.Point
	// recovering: the stream is being drained after a failure and takes no chunks.
	recovering bool
	// dead is why no request can succeed any more.
	dead      error
	closed    bool
	stats     PathStats
	busySince time.Duration
}

// flight is a chunk with the device.
type flight struct {
	chunk
	event device.Event
	// retried: it failed once already.
	retried bool
	// dropped: it is not with the device any more, because its request failed.
	dropped bool
}

// waiting is a stream that waits for After points, with the requests that have
// them, and what it does then.
type waiting struct {
	after  []device.Point
	reqs   []*request
	stream device.Executor
	start  device.Work
}

func newLink(o Options, pair device.Pair) (l *link, err error) {
	name := fmt.Sprintf("%s to %s", pair.From, pair.To)
	l = &link{o: o, pair: pair, stats: PathStats{From: pair.From, To: pair.To}}
	defer func() {
		if err != nil {
			_ = l.release() // the first error is the one that matters
		}
	}()
	// A GPU's copies are faster from the source's stream than from the target's.
	space := pair.From
	if space == device.Host {
		space = pair.To
	}
	if l.copies, err = o.Machine.NewStream(space, device.StreamOptions{Name: "copy " + name}); err != nil {
		return l, err
	}
	if l.owner, err = l.newHostStream("owner of " + name); err != nil {
		return l, err
	}
	for range o.Depth {
		ev, err := o.Machine.NewEvent()
		if err != nil {
			return l, err
		}
		l.spare = append(l.spare, ev)
	}
	l.reap = device.Work{Name: "settle a chunk", Host: true, Run: func(device.Access) error { l.settle(); return nil }}
	return l, nil
}

func (l *link) newHostStream(name string) (device.Executor, error) {
	s, err := l.o.Machine.NewStream(device.Host, device.StreamOptions{Name: name})
	if err != nil {
		return nil, err
	}
	x, ok := s.(device.Executor)
	if !ok {
		return nil, errors.Join(errors.New("a host stream of this machine runs no Go work"), s.Close())
	}
	return x, nil
}

// submit takes a request.
func (l *link) submit(asked Request) (*Ticket, error) {
	l.mend()
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return nil, device.ErrClosed
	case l.dead != nil:
		return nil, l.dead
	}
	mark, err := l.takeMark()
	if err != nil {
		return nil, err
	}
	r := l.request(asked)
	if r.ready = len(r.after) == 0; !r.ready {
		if err := l.block(r); err != nil {
			l.marks = append(l.marks, mark)
			return nil, err
		}
	}
	r.mark = device.Point{Fence: mark.Fence, Value: mark.Value + 1}
	l.queue.push(r)
	l.pump()
	return &r.ticket, nil
}

// request is a new one, or one that was given up.
func (l *link) request(asked Request) *request {
	var r *request
	if n := len(l.requests); n > 0 {
		r, l.requests = l.requests[n-1], l.requests[:n-1]
	} else {
		r = &request{}
		r.ticket = Ticket{link: l, req: r}
	}
	r.Request, r.after = asked, append(r.after, asked.After...)
	r.After = nil
	return r
}

// recycle takes a request back that has ended well: nothing refers to it any more, while
// one that has failed may still stand with a stream that waits.
func (l *link) recycle(r *request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !r.ended || r.failure != nil || r.err != nil {
		return
	}
	clear(r.after)
	*r = request{ticket: r.ticket, after: r.after[:0]}
	l.requests = append(l.requests, r)
}

// takeMark returns a fence at the value that it has.
func (l *link) takeMark() (device.Point, error) {
	if n := len(l.marks); n > 0 {
		m := l.marks[n-1]
		l.marks = l.marks[:n-1]
		return m, nil
	}
	f, err := l.o.Machine.NewFence(fmt.Sprintf("end of a copy from %s to %s", l.pair.From, l.pair.To))
	return device.Point{Fence: f}, err
}

// block has a host stream wait for the request's After points, and then makes it
// ready, or fails it.
func (l *link) block(r *request) error {
	for _, w := range l.blocked {
		if slices.Equal(w.after, r.after) {
			w.reqs = append(w.reqs, r)
			return nil
		}
	}
	w, err := l.waiting()
	if err != nil {
		return err
	}
	w.after, w.reqs = append(w.after[:0], r.after...), append(w.reqs, r)
	for _, p := range r.after {
		if err = w.stream.Await(p.Fence, p.Value); err != nil {
			w.reqs = w.reqs[:0] // the stream still waits for the points before
			break
		}
	}
	if err = errors.Join(err, w.stream.Execute(w.start)); err == nil {
		l.blocked = append(l.blocked, w)
	}
	return err
}

// waiting is a stream that waits for nothing.
func (l *link) waiting() (*waiting, error) {
	if n := len(l.idle); n > 0 {
		w := l.idle[n-1]
		l.idle = l.idle[:n-1]
		return w, nil
	}
	s, err := l.newHostStream(fmt.Sprintf("wait to copy %s to %s", l.pair.From, l.pair.To))
	if err != nil {
		return nil, err
	}
	w := &waiting{stream: s}
	w.start = device.Work{
		Name: "start a copy", Host: true,
		Run:    func(device.Access) error { l.unblock(w, nil); return nil },
		Failed: func(err error) { l.unblock(w, fmt.Errorf("%w: %w", ErrAfter, err)) },
	}
	l.waiters = append(l.waiters, w)
	return w, nil
}

// unblock runs on w's stream when all its points are reached, or one has failed.
func (l *link) unblock(w *waiting, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.blocked = slices.DeleteFunc(l.blocked, func(x *waiting) bool { return x == w })
	for _, r := range w.reqs {
		if err != nil {
			l.fail(r, err)
		}
		r.ready = !r.ended
	}
	clear(w.reqs)
	w.reqs = w.reqs[:0]
	if err == nil {
		l.idle = append(l.idle, w)
	} else {
		l.broken = append(l.broken, w)
	}
	l.pump()
}

// mend clears the errors of broken streams, which have nothing left to do.
func (l *link) mend() {
	l.mu.Lock()
	broken := l.broken
	l.broken = nil
	l.mu.Unlock()
	for _, w := range broken {
		// The error is the one that its requests have failed with.
		_ = w.stream.Recover(context.Background())
	}
	if len(broken) > 0 {
		l.mu.Lock()
		l.idle = append(l.idle, broken...)
		l.mu.Unlock()
	}
}

// pump gives the device chunks until Depth are with it. The lock is held.
func (l *link) pump() {
	for l.dead == nil && !l.recovering && len(l.flying) < l.o.Depth {
		c, ok := l.queue.next(l.o.ChunkBytes)
		if !ok {
			break
		}
		f := flight{chunk: c, event: l.spare[len(l.spare)-1]}
		err := l.launch(f)
		if err == nil {
			err = l.owner.Execute(l.reap)
		}
		if err != nil {
			l.refused(c.req, err)
			continue
		}
		l.spare = l.spare[:len(l.spare)-1]
		if len(l.flying) == 0 {
			l.busySince = l.o.Machine.Now()
		}
		l.flying = append(l.flying, f)
		c.req.flying++
	}
}

// launch puts a chunk and its event on the stream.
func (l *link) launch(f flight) error {
	r := f.req
	if err := l.copies.Copy(r.Dst.Range.Slice(f.offset, f.n), r.Src.Range.Slice(f.offset, f.n)); err != nil {
		return err
	}
	return l.copies.Record(f.event)
}

// refused fails a request whose chunk the device did not take.
func (l *link) refused(r *request, err error) {
	if errors.Is(err, device.ErrLost) {
		l.die(err)
	}
	l.fail(r, err)
}

// settle waits for the chunk in front and does what follows from its end. It runs
// on owner, once for every chunk that was launched.
func (l *link) settle() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for !l.flying[0].dropped {
		event := l.flying[0].event
		l.mu.Unlock()
		err := event.Synchronize(context.Background())
		l.mu.Lock()
		if err == nil {
			l.flying[0].req.landed += l.flying[0].n
			break
		}
		l.again(err)
	}
	l.land()
}

// land takes the chunk in front out and lets the next one go.
func (l *link) land() {
	f := l.flying[0]
	l.flying = slices.Delete(l.flying, 0, 1)
	l.spare = append(l.spare, f.event)
	if len(l.flying) == 0 {
		l.stats.Busy += l.o.Machine.Now() - l.busySince
	}
	switch r := f.req; {
	case r.flying > 1:
		r.flying--
	case r.failure != nil:
		r.flying = 0
		l.end(r, r.failure)
	default:
		r.flying = 0
		if r.landed == r.Src.Bytes {
			l.end(r, nil)
		}
	}
	l.pump()
}

// again deals with the failure of the chunk in front: it clears the stream, and
// launches again what stood there, the chunk itself if that was its first failure.
// The lock is held, and released meanwhile.
func (l *link) again(cause error) {
	l.recovering = true
	l.mu.Unlock()
	err := l.copies.Recover(context.Background())
	l.mu.Lock()
	l.recovering = false
	front := &l.flying[0]
	switch {
	case errors.Is(err, device.ErrLost) || errors.Is(cause, device.ErrLost):
		l.die(cause)
	case front.retried:
		l.fail(front.req, cause)
	case front.req.failure == nil:
		front.retried = true
		l.stats.Retries++
		l.o.Logger.Warn("a chunk failed and is tried again", "copy", front.req.name(), "offset", front.offset, "error", cause)
	}
	for i := range l.flying { // what stood behind it on the stream did not run
		f := &l.flying[i]
		if f.req.failure == nil {
			if err := l.launch(*f); err != nil {
				l.refused(f.req, err)
			}
		}
		f.dropped = f.req.failure != nil
	}
}

// die fails every request: nothing can succeed any more.
func (l *link) die(cause error) {
	if l.dead != nil {
		return
	}
	l.dead = cause
	for _, f := range l.flying {
		l.fail(f.req, cause)
	}
	for _, r := range l.queue.all() {
		l.fail(r, cause)
	}
}

// fail lets nothing more of the request go to the device and ends it as soon as
// nothing of it is there.
func (l *link) fail(r *request, err error) {
	if r.ended || r.failure != nil {
		return
	}
	r.failure = err
	l.queue.remove(r)
	if r.flying == 0 {
		l.end(r, err)
	}
}

// end raises or fails Done, and lets those go on who wait for the ticket.
func (l *link) end(r *request, err error) {
	r.ended = true
	if err == nil {
		err = r.Done.Fence.Raise(r.Done.Value)
	}
	switch {
	case err == nil && r.forgone:
	case err == nil:
		l.stats.Copies++
		l.stats.Bytes += r.Src.Bytes
	default:
		r.err = fmt.Errorf("transfer: %s: %w", r.name(), err)
		l.stats.Failed++
		if !errors.Is(err, ErrCanceled) {
			l.o.Logger.Error("a copy failed", "copy", r.name(), "error", err)
		}
		if err := r.Done.Fence.Fail(r.Done.Value, r.err); err != nil {
			r.err = errors.Join(r.err, fmt.Errorf("transfer: %s: nobody could be told: %w", r.name(), err))
		}
	}
	if err := r.mark.Fence.Raise(r.mark.Value); err != nil {
		r.err = errors.Join(r.err, err)
	}
	l.marks = append(l.marks, r.mark)
}

func (l *link) cancel(r *request) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.ended || r.issued > 0 {
		return false
	}
	l.fail(r, ErrCanceled)
	return true
}

func (l *link) forgo(r *request) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.ended || r.failure != nil || r.issued > 0 || !r.ready {
		return false
	}
	l.queue.remove(r)
	r.forgone = true
	l.end(r, nil)
	return true
}

func (l *link) snapshot() PathStats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stats
	if len(l.flying) > 0 {
		s.Busy += l.o.Machine.Now() - l.busySince
	}
	return s
}

// close ends what was not started, waits for the rest and releases everything.
func (l *link) close() error {
	l.mu.Lock()
	l.closed = true
	for _, r := range l.queue.all() {
		if r.issued == 0 {
			l.fail(r, device.ErrClosed)
		}
	}
	var err error
	for len(l.flying) > 0 && err == nil {
		l.mu.Unlock()
		err = l.owner.Synchronize(context.Background())
		l.mu.Lock()
	}
	l.mu.Unlock()
	return errors.Join(err, l.release())
}

// release closes what there is.
func (l *link) release() error {
	var errs []error
	stop := func(s device.Stream) { errs = append(errs, s.Close()) }
	if l.copies != nil {
		stop(l.copies)
	}
	if l.owner != nil {
		stop(l.owner)
	}
	for _, w := range l.waiters {
		stop(w.stream)
	}
	for _, ev := range l.spare {
		errs = append(errs, ev.Close())
	}
	for _, m := range l.marks {
		errs = append(errs, m.Fence.Close())
	}
	return errors.Join(errs...)
}
