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

// link makes the copies from one memory to another: each chunk goes onto the stream
// copies, followed by an event. The engine's lock guards it.
type link struct {
	engine *Engine
	pair   device.Pair
	// number is that of the core.
	number int
	copies device.Stream
	// enqueue is copies.Copy.
	enqueue func(dst, src device.Range) error
	slots   []slot
	// recovery clears the error of the stream.
	recovery device.Work

	stats PathStats
	rate  rate
	// busy since then.
	busy  bool
	since time.Duration
}

// slot is one chunk that can be with the device: the event behind it, and what is done
// when that has passed.
type slot struct {
	event device.Event
	ended device.Work
}

func newLink(e *Engine, pair device.Pair, slots int) (l *link, err error) {
	l = &link{engine: e, pair: pair, stats: PathStats{From: pair.From, To: pair.To}}
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
	if l.copies, err = e.o.Machine.NewStream(space, device.StreamOptions{Name: fmt.Sprintf("copy %s to %s", pair.From, pair.To)}); err != nil {
		return l, err
	}
	l.enqueue = l.copies.Copy
	for i := range slots {
		ev, err := e.o.Machine.NewEvent()
		if err != nil {
			return l, err
		}
		l.slots = append(l.slots, slot{event: ev, ended: device.Work{
			Name: "complete transfer", Host: true,
			Run:    func(device.Access) error { l.ended(i, nil); return nil },
			Failed: func(err error) { l.ended(i, err) },
		}})
	}
	l.recovery = device.Work{Name: "recover from a failed chunk", Host: true, Run: func(device.Access) error { l.recovered(); return nil }}
	return l, nil
}

// launch puts a chunk and its event on the stream.
func (l *link) launch(i int, c dispatch.Chunk) {
	e := l.engine
	if !l.busy {
		l.busy, l.since = true, e.o.Machine.Now()
	}
	if t := c.Request.Owner.(*Ticket); t.traced != nil {
		trace.Annotate(l.copies, t.note(c.Last()))
	}
	s := &l.slots[i]
	err := c.Each(l.enqueue)
	if err == nil {
		err = l.copies.Record(s.event)
	}
	passed := false
	if err == nil {
		passed, err = e.ends.WatchEvent(s.event, s.ended)
	}
	switch {
	case err != nil:
		e.core.Refused(l.number, i, err)
	case passed:
		e.core.Landed(l.number, i)
	}
}

// ended runs on the engine's host stream when the event behind a chunk has passed.
func (l *link) ended(i int, err error) {
	e := l.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	if err != nil {
		e.core.Failed(l.number, i, err)
	} else {
		e.core.Landed(l.number, i)
	}
	_ = e.act() // nothing was submitted
}

// startRecovery has the stream's error cleared on the engine's host stream: that may wait.
func (l *link) startRecovery() {
	if err := l.engine.ends.Execute(l.recovery); err != nil {
		l.engine.core.Recovered(l.number, err)
	}
}

func (l *link) recovered() {
	err := l.copies.Recover(context.Background())
	e := l.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	e.core.Recovered(l.number, err)
	_ = e.act() // nothing was submitted
}

// account notes when the link has nothing to do any more.
func (l *link) account() {
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

// release closes what there is.
func (l *link) release() error {
	var errs []error
	if l.copies != nil {
		errs = append(errs, l.copies.Close())
	}
	for _, s := range l.slots {
		errs = append(errs, s.event.Close())
	}
	return errors.Join(errs...)
}
