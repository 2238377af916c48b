package server

import (
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// Events passes on what happens in a node to the clients that follow /debug/events. Its
// methods are safe for concurrent use.
//
// Each follower has a buffer of its own. One that reads too slowly loses the events that
// find it full, and reads in their place how many they were; Publish never waits.
type Events struct {
	// followed is the number of followers, so that nothing is done without any.
	followed atomic.Int32

	mu        sync.Mutex
	followers map[*follower]struct{}
}

// NewEvents makes a stream without followers.
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
	// heartbeat is the interval of comments on a stream without events, so that proxies do not
	// close it.
	heartbeat = 15 * time.Second
)

// follower is a client that reads the stream.
type follower struct {
	mu     sync.Mutex
	buffer []event
	lost   int
	wake   chan struct{} // has room for one
}

// Followed reports whether anybody follows, so that events need not be made for nobody.
func (e *Events) Followed() bool { return e.followed.Load() > 0 }

// Publish sends an event to all followers. data must have a JSON form and not change any
// more. It does not block.
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
	f.noteLost()
	f.buffer = append(f.buffer, v)
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// noteLost puts the number of lost events in their place. f.mu is held.
func (f *follower) noteLost() {
	if f.lost > 0 {
		f.buffer = append(f.buffer, event{lostName, lostEvents{lostName, f.lost}})
		f.lost = 0
	}
}

// drain returns what has come, in order.
func (f *follower) drain() []event {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.noteLost()
	events := f.buffer
	f.buffer = nil
	return events
}

// follow begins to buffer events; false at maxFollowers.
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
			Message: "too many clients follow the events; close another stream",
		}
	}
	defer s.o.Events.unfollow(f)
	timer := time.NewTicker(heartbeat)
	defer timer.Stop()
	// The first comment shows that nothing is missed from now on.
	err := w.comment("events")
	for err == nil {
		select {
		case <-r.Context().Done():
			return nil
		case <-timer.C:
			err = w.comment("heartbeat")
		case <-f.wake:
			for _, v := range f.drain() {
				if err = w.named(v.name, v.data); err != nil {
					break
				}
			}
		}
	}
	return nil // the client has gone
}

// residency writes where every expert is.
func (s *Server) residency(w *response, r *http.Request) error {
	m, err := s.inURL(r)
	if err != nil {
		return err
	}
	if m.Residency == nil {
		return &Error{Status: http.StatusNotFound, Type: invalidRequest, Code: "unknown_url", Message: "This server has no residency of experts."}
	}
	w.json(http.StatusOK, m.Residency())
	return nil
}

// kv writes where KV blocks are.
func (s *Server) kv(w *response, r *http.Request) error {
	m, err := s.inURL(r)
	if err != nil {
		return err
	}
	if m.KV == nil {
		return &Error{Status: http.StatusNotFound, Type: invalidRequest, Code: "unknown_url", Message: "This server has no account of KV blocks."}
	}
	w.json(http.StatusOK, m.KV())
	return nil
}
