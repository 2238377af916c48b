package server

import (
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// Events passes on what happens in a node to those who follow it at /debug/events.
// Its methods may be called from any goroutine.
//
// Each follower has a buffer of its own. Whoever reads too slowly loses the events
// that find it full, and is told in their place how many they were; nobody who
// publishes waits.
type Events struct {
	// followed is how many follow, so that nothing is done for none.
	followed atomic.Int32

	mu        sync.Mutex
	followers map[*follower]struct{}
}

// NewEvents makes a stream that nobody follows yet.
func NewEvents() *Events { return &Events{followers: map[*follower]struct{}{}} }

// event is one of a stream: its name, and what has its JSON form.
type event struct {
	name string
	data any
}

// lostEvents stands for events that a follower has lost.
type lostEvents struct {
	Event string `json:"event"`
	Count int    `json:"count"`
}

const (
	lostName = "lost"
	// maxFollowers at once, and maxBuffered events for each of them.
	maxFollowers = 16
	maxBuffered  = 1024
	// heartbeat is how often those who follow hear of a stream where nothing happens,
	// so that proxies do not cut it.
	heartbeat = 15 * time.Second
)

// follower is one who reads.
type follower struct {
	mu     sync.Mutex
	buffer []event
	lost   int
	wake   chan struct{} // has room for one
}

// Publish tells those who follow of an event. data must have a JSON form and not
// change any more. It does not block.
func (e *Events) Publish(name string, data any) {
	if e.followed.Load() == 0 {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for f := range e.followers {
		f.put(event{name, data})
	}
}

func (f *follower) put(v event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.buffer) >= maxBuffered {
		f.lost++
		return
	}
	f.tellLost()
	f.buffer = append(f.buffer, v)
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// tellLost puts the number of lost events in their place. f.mu is held.
func (f *follower) tellLost() {
	if f.lost > 0 {
		f.buffer = append(f.buffer, event{lostName, lostEvents{lostName, f.lost}})
		f.lost = 0
	}
}

// take returns what has come, in order.
func (f *follower) take() []event {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tellLost()
	events := f.buffer
	f.buffer = nil
	return events
}

// follow begins to keep events; false where too many follow already.
func (e *Events) follow() (*follower, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.followers) >= maxFollowers {
		return nil, false
	}
	f := &follower{wake: make(chan struct{}, 1)}
	e.followers[f] = struct{}{}
	e.followed.Add(1)
	return f, true
}

func (e *Events) unfollow(f *follower) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.followers, f)
	e.followed.Add(-1)
}

// events streams what happens until the client leaves or the server ends.
func (s *Server) events(w *response, r *http.Request) error {
	f, ok := s.o.Events.follow()
	if !ok {
		return &Error{
			Status: http.StatusTooManyRequests, Type: rateLimit, Code: "too_many_requests", RetryAfter: retrySoon,
			Message: "too many follow the events already; end another stream",
		}
	}
	defer s.o.Events.unfollow(f)
	timer := time.NewTicker(heartbeat)
	defer timer.Stop()
	// What comes first says that nothing is missed from here on.
	err := w.comment("events")
	for err == nil {
		select {
		case <-r.Context().Done():
			return nil
		case <-timer.C:
			err = w.comment("still here")
		case <-f.wake:
			for _, v := range f.take() {
				if err = w.named(v.name, v.data); err != nil {
					break
				}
			}
		}
	}
	return nil // nobody reads
}

// residency shows where every expert is.
func (s *Server) residency(w *response, _ *http.Request) error {
	m, err := s.current()
	if err != nil {
		return err
	}
	if m.Residency == nil {
		return &Error{Status: http.StatusNotFound, Type: invalidRequest, Code: "unknown_url", Message: "This server does not know where experts are."}
	}
	w.json(http.StatusOK, m.Residency())
	return nil
}
