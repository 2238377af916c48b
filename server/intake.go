package server

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"
)

// intake reads the bodies of requests before these count as admitted. It limits how slowly a body
// comes, and the memory of all bodies whose requests are not prepared yet.
type intake struct {
	// limit in bytes of one body, and of all together. The first freeBytes of a body do not count
	// for the latter, which large bodies so exhaust for each other only; their number is bounded by
	// that of connections.
	limit, total int64
	// timeout for a body.
	timeout time.Duration

	mu      sync.Mutex
	used    int64
	reading map[*bodyReader]struct{}
	closed  bool
}

const (
	freeBytes = 64 << 10
	// A body may take firstBytes, and a second more for each minRate bytes of it that came.
	firstBytes = 5 * time.Second
	minRate    = 4 << 10
	// largeBody is the size from which a body's memory is returned to the system early, and manyBodies
	// the size of smaller ones together.
	largeBody  = 1 << 20
	manyBodies = 64 << 20
)

// bodyReader reads one body.
type bodyReader struct {
	in    *intake
	body  io.Reader
	w     *response
	start time.Time
	// read of the body, and what of that counts for the total.
	read, counted int64
}

var (
	errBodiesFull = &Error{
		Status: http.StatusTooManyRequests, Type: rateLimit, Code: "too_many_requests", RetryAfter: retrySoon,
		Message: "too many large requests are being read; retry later",
	}
	errEnough = errors.New("the body is too long")
)

// Read implements io.Reader.
func (b *bodyReader) Read(p []byte) (int, error) {
	if err := b.continues(); err != nil {
		return 0, err
	}
	n, err := b.body.Read(p)
	b.read += int64(n)
	if b.read > b.in.limit {
		return n, errEnough
	}
	if err2 := b.count(); err2 != nil {
		return n, err2
	}
	return n, err
}

// continues sets the deadline of the next part of the body.
func (b *bodyReader) continues() error {
	b.in.mu.Lock()
	defer b.in.mu.Unlock()
	if b.in.closed {
		return errStopping
	}
	allowed := min(firstBytes+time.Duration(b.read)*time.Second/minRate, b.in.timeout)
	b.w.readUntil(b.start.Add(allowed))
	return nil
}

// count adds what came to the memory of all bodies.
func (b *bodyReader) count() error {
	b.in.mu.Lock()
	defer b.in.mu.Unlock()
	more := b.read - freeBytes - b.counted
	if more <= 0 {
		return nil
	}
	if b.in.used+more > b.in.total {
		return errBodiesFull
	}
	b.in.used += more
	b.counted += more
	return nil
}

// release gives back the memory of a body, which is no longer used.
func (b *bodyReader) release() {
	b.in.mu.Lock()
	defer b.in.mu.Unlock()
	b.in.used -= b.counted
	b.counted = 0
}

// take reads a body. The caller releases it, whatever the error.
func (in *intake) take(w *response, r *http.Request) ([]byte, *bodyReader, error) {
	b := &bodyReader{in: in, body: r.Body, w: w, start: time.Now()}
	if r.ContentLength > in.limit {
		return nil, b, in.tooLarge()
	}
	in.mu.Lock()
	in.reading[b] = struct{}{}
	in.mu.Unlock()
	data, err := io.ReadAll(b)
	in.mu.Lock()
	delete(in.reading, b)
	in.mu.Unlock()
	var network net.Error
	switch {
	case err == nil:
		// From now on the connection is watched for a disconnect, however long the response takes.
		w.unread = false
		w.readUntil(time.Time{})
		return data, b, nil
	case errors.Is(err, errEnough):
		return nil, b, in.tooLarge()
	case errors.Is(err, errStopping), in.isClosed():
		return nil, b, notNow(errStopping)
	case errors.As(err, &network) && network.Timeout():
		w.unread = false // it has had its time
		w.Header().Set("Connection", "close")
		return nil, b, &Error{
			Status: http.StatusRequestTimeout, Type: invalidRequest, Code: "timeout",
			Message: fmt.Sprintf("The body did not arrive in time: within %v, and %v and a second for every %d bytes of it.", in.timeout, min(firstBytes, in.timeout), minRate),
		}
	case errors.Is(err, errBodiesFull):
		return nil, b, errBodiesFull
	}
	return nil, b, badRequest("", "", "The body cannot be read: %v.", err)
}

func (in *intake) tooLarge() *Error {
	return &Error{
		Status: http.StatusRequestEntityTooLarge, Type: invalidRequest, Code: "request_too_large",
		Message: fmt.Sprintf("The body exceeds the maximum of %d bytes.", in.limit),
	}
}

func (in *intake) isClosed() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.closed
}

// close ends the reading of all bodies.
func (in *intake) close() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.closed = true
	for b := range in.reading {
		b.w.readUntil(time.Unix(1, 0))
	}
}
