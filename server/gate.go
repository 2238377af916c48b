package server

import (
	"net/http"
	"sync"
)

// gate limits the number of requests in progress, and admits none once it is closed.
type gate struct {
	limit int

	mu     sync.Mutex
	inside int
	idle   chan struct{} // not nil once the gate is closed; closed once no request is inside
}

// check says whether a request would be admitted now.
func (g *gate) check() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.refusal()
}

// enter is followed by leave unless it returns an error.
func (g *gate) enter() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	err := g.refusal()
	if err == nil {
		g.inside++
	}
	return err
}

func (g *gate) refusal() error {
	if g.idle != nil {
		return notNow(errStopping)
	}
	if g.inside >= g.limit {
		return &Error{
			Status: http.StatusTooManyRequests, Type: rateLimit, Code: "too_many_requests", RetryAfter: retrySoon,
			Message: "too many requests in progress; retry later",
		}
	}
	return nil
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inside--
	if g.idle != nil && g.inside == 0 {
		close(g.idle)
	}
}

// close admits no more requests. The channel is closed when the last one has left.
func (g *gate) close() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.idle == nil {
		g.idle = make(chan struct{})
		if g.inside == 0 {
			close(g.idle)
		}
	}
	return g.idle
}

func (g *gate) isClosed() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.idle != nil
}

func (g *gate) count() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.inside
}
