package server

import (
	"container/list"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"sync"
)

// connections is a listener that limits the number of open connections. At the limit a new one takes
// the place of the one that has been idle for the longest, and where none is idle, waits.
type connections struct {
	net.Listener
	limit int

	mu      sync.Mutex
	open    int
	waiting bool
	idle    *list.List // of *connection, the longest idle first
	// freed has an item when a connection was closed since Accept looked.
	freed chan struct{}
	done  chan struct{}
	end   func()
}

// connection is one of them.
type connection struct {
	net.Conn
	of    *connections
	close func() error
	place *list.Element // in of.idle; nil: it is not idle
}

func newConnections(l net.Listener, limit int) *connections {
	c := &connections{Listener: l, limit: limit, idle: list.New(), freed: make(chan struct{}, 1), done: make(chan struct{})}
	c.end = sync.OnceFunc(func() { close(c.done) })
	return c
}

// Accept implements net.Listener.
func (c *connections) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	for {
		ok, evicted := c.reserve()
		if ok {
			break
		}
		if evicted != nil {
			evicted.Close() //nolint:errcheck // nobody reads from it
		}
		select {
		case <-c.freed:
		case <-c.done:
			return nil, errors.Join(net.ErrClosed, conn.Close())
		}
	}
	one := &connection{Conn: conn, of: c}
	one.close = sync.OnceValue(func() error {
		err := conn.Close()
		c.busy(one)
		c.release()
		return err
	})
	return one, nil
}

// reserve takes a place for a connection. Where there is none it returns the connection to close
// for it, nil where none is idle.
func (c *connections) reserve() (ok bool, evicted *connection) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.waiting = c.open >= c.limit; !c.waiting {
		c.open++
		return true, nil
	}
	if first := c.idle.Front(); first != nil {
		evicted, _ = first.Value.(*connection)
	}
	return false, evicted
}

func (c *connections) release() {
	c.mu.Lock()
	c.open--
	c.mu.Unlock()
	select {
	case c.freed <- struct{}{}:
	default:
	}
}

// busy takes a connection from the idle ones.
func (c *connections) busy(one *connection) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if one.place != nil {
		c.idle.Remove(one.place)
		one.place = nil
	}
}

// changed is for http.Server.ConnState.
func (c *connections) changed(conn net.Conn, state http.ConnState) {
	if t, ok := conn.(*tls.Conn); ok {
		conn = t.NetConn()
	}
	one, ok := conn.(*connection)
	if !ok {
		return
	}
	if state != http.StateIdle {
		c.busy(one)
		return
	}
	c.mu.Lock()
	one.place = c.idle.PushBack(one)
	waiting := c.waiting
	c.mu.Unlock()
	if waiting {
		one.Close() //nolint:errcheck // nobody reads from it
	}
}

// Close implements net.Listener.
func (c *connections) Close() error {
	c.end()
	return c.Listener.Close()
}

// Close implements net.Conn.
func (c *connection) Close() error { return c.close() }

// CloseWrite lets a client read the end of a response that did not wait for its request.
func (c *connection) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return nil
}
