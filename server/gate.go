package server

import (
	"net/http"
	"sync"
)

// gate counts those inside, lets in so many at once, and none once it is closed.
type gate struct {
	most int

	mu     sync.Mutex
	inside int
	idle   chan struct{} // not nil once closed, closed once nobody is inside
}

// enter is followed by leave unless it returns an error.
func (g *gate) enter() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.idle != nil {
		return notNow(errStopping)
	}
	if g.inside >= g.most {
		return &Error{
			Status: http.StatusTooManyRequests, Type: rateLimit, Code: "too_many_requests", RetryAfter: retrySoon,
			Message: "too many requests are under way; try again soon",
		}
	}
	g.inside++
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

// close lets nobody in any more. The channel is closed when the last one has left.
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
