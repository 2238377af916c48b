// Package zmtp speaks the part of ZeroMQ's wire protocol that a publisher of events needs: ZMTP 3.0 with the NULL
// mechanism, frames of bounded size. Who connects may be anybody: nothing that it sends, or does not send, ends the
// process or holds up other connections. (Of the Go libraries, go-zeromq/zmq4 v0.17.0 allocates whatever length a
// frame claims, shakes hands with one client at a time, and sends to subscribers one after another.)
//
// Source: https://rfc.zeromq.org/spec/23 (ZMTP 3.0), /spec/29 (PUB and SUB), /spec/28 (REQ, DEALER and ROUTER).
package zmtp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"
)

// The types of sockets.
const (
	Pub    = "PUB"
	Sub    = "SUB"
	XSub   = "XSUB"
	Router = "ROUTER"
	Req    = "REQ"
	Dealer = "DEALER"
)

// peers are the sockets that one of a type may be connected with.
var peers = map[string][]string{
	Pub:    {Sub, XSub},
	Router: {Req, Dealer, Router},
}

// What is read of a peer at most: bytes of a frame, and frames of a message.
const (
	maxFrame  = 4 << 10
	maxFrames = 16
)

// HandshakeTimeout is the time that a peer has for the handshake.
const HandshakeTimeout = 5 * time.Second

// Flags of a frame.
const (
	more    = 1
	long    = 2
	command = 4
)

// ErrProtocol is the error of a peer that does not speak the protocol.
var ErrProtocol = errors.New("zmtp: the peer does not follow the protocol")

func violation(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, args...))
}

// Conn is a connection behind its handshake. One goroutine may read while another writes.
type Conn struct {
	c    net.Conn
	peer string
	// Reused between calls.
	header  [9]byte
	heads   []byte
	buffers net.Buffers
}

// Handshake makes the handshake for a socket of a type, Pub or Router, and returns the connection. The
// caller closes c, also after an error.
func Handshake(c net.Conn, socket string) (*Conn, error) {
	if err := c.SetDeadline(time.Now().Add(HandshakeTimeout)); err != nil {
		return nil, err
	}
	greeting := make([]byte, 64)
	greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
	copy(greeting[12:], "NULL")
	if _, err := c.Write(greeting); err != nil {
		return nil, err
	}
	theirs := make([]byte, 64)
	if _, err := io.ReadFull(c, theirs[:10]); err != nil {
		return nil, err
	}
	if theirs[0] != 0xff || theirs[9]&1 == 0 {
		return nil, violation("no greeting")
	}
	if _, err := io.ReadFull(c, theirs[10:]); err != nil {
		return nil, err
	}
	if theirs[10] < 3 {
		return nil, violation("version %d; it must be 3 or later", theirs[10])
	}
	if mechanism, _, _ := bytes.Cut(theirs[12:32], []byte{0}); string(mechanism) != "NULL" {
		return nil, violation("mechanism %q; it must be NULL", mechanism)
	}
	conn := &Conn{c: c}
	if err := conn.writeReady(socket); err != nil {
		return nil, err
	}
	if err := conn.readReady(socket); err != nil {
		return nil, err
	}
	return conn, c.SetDeadline(time.Time{})
}

func (c *Conn) writeReady(socket string) error {
	body := append([]byte{5}, "READY"...)
	for _, p := range [][2]string{{"Socket-Type", socket}, {"Identity", ""}} {
		body = append(append(body, byte(len(p[0]))), p[0]...)
		body = append(binary.BigEndian.AppendUint32(body, uint32(len(p[1]))), p[1]...)
	}
	_, err := c.c.Write(append([]byte{command, byte(len(body))}, body...))
	return err
}

func (c *Conn) readReady(socket string) error {
	flags, body, err := c.readFrame()
	if err != nil {
		return err
	}
	name, properties, ok := parseCommand(body)
	if flags&command == 0 || !ok || name != "READY" {
		return violation("no READY")
	}
	for len(properties) > 0 {
		n := int(properties[0])
		if len(properties) < 1+n+4 {
			return violation("READY ends in a property")
		}
		key := string(properties[1 : 1+n])
		size := binary.BigEndian.Uint32(properties[1+n:])
		properties = properties[1+n+4:]
		if uint64(size) > uint64(len(properties)) {
			return violation("READY ends in the value of %q", key)
		}
		if key == "Socket-Type" {
			c.peer = string(properties[:size])
		}
		properties = properties[size:]
	}
	if !slices.Contains(peers[socket], c.peer) {
		return violation("a %q socket connects with a %s", c.peer, socket)
	}
	return nil
}

// parseCommand splits the body of a command.
func parseCommand(body []byte) (name string, data []byte, ok bool) {
	if len(body) == 0 || len(body) < 1+int(body[0]) {
		return "", nil, false
	}
	n := 1 + int(body[0])
	return string(body[1:n]), body[n:], true
}

// Peer is the type of the peer's socket.
func (c *Conn) Peer() string { return c.peer }

// Read returns the frames of the next message. It passes over commands: ZMTP 3.0, which the handshake has announced, has
// none behind it.
func (c *Conn) Read() (frames [][]byte, err error) {
	for {
		flags, body, err := c.readFrame()
		if err != nil {
			return nil, err
		}
		if flags&command != 0 {
			continue // none of ZMTP 3.0 means anything behind the handshake
		}
		if frames = append(frames, body); flags&more == 0 {
			return frames, nil
		}
		if len(frames) == maxFrames {
			return nil, violation("a message of more than %d frames", maxFrames)
		}
	}
}

func (c *Conn) readFrame() (flags byte, body []byte, err error) {
	h := c.header[:2]
	if _, err := io.ReadFull(c.c, h); err != nil {
		return 0, nil, err
	}
	flags, size := h[0], uint64(h[1])
	if flags&^(more|long|command) != 0 {
		return 0, nil, violation("flags %#x of a frame", flags)
	}
	if flags&long != 0 {
		if _, err := io.ReadFull(c.c, c.header[2:]); err != nil {
			return 0, nil, err
		}
		size = binary.BigEndian.Uint64(c.header[1:])
	}
	if size > maxFrame {
		return 0, nil, violation("a frame of %d bytes; at most %d are read", size, maxFrame)
	}
	body = make([]byte, size)
	_, err = io.ReadFull(c.c, body)
	return flags, body, err
}

// Write writes a message. It waits as long as the peer does not read.
func (c *Conn) Write(frames ...[]byte) error {
	c.heads = slices.Grow(c.heads[:0], 9*len(frames)) // buffers has parts of it
	c.buffers = c.buffers[:0]
	for i, f := range frames {
		from := len(c.heads)
		var flags byte
		if i < len(frames)-1 {
			flags = more
		}
		if len(f) < 256 {
			c.heads = append(c.heads, flags, byte(len(f)))
		} else {
			c.heads = binary.BigEndian.AppendUint64(append(c.heads, flags|long), uint64(len(f)))
		}
		c.buffers = append(c.buffers, c.heads[from:], f)
	}
	all := c.buffers
	_, err := all.WriteTo(c.c)
	return err
}

// Close closes the connection: Read and Write end.
func (c *Conn) Close() error { return c.c.Close() }
