package zmtp_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/kvcache/events/zmtp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// greeting is that of a peer of ZMTP 3.1, which libzmq is.
func greeting(mechanism string) []byte {
	g := make([]byte, 64)
	g[0], g[9], g[10], g[11] = 0xff, 0x7f, 3, 1
	copy(g[12:], mechanism)
	return g
}

// ready is a READY command with a socket's type.
func ready(socket string) []byte {
	body := append([]byte("\x05READY\x0bSocket-Type"), 0, 0, 0, byte(len(socket)))
	body = append(body, socket...)
	return append([]byte{4, byte(len(body))}, body...)
}

func frame(flags byte, body string) []byte {
	if len(body) < 256 {
		return append([]byte{flags, byte(len(body))}, body...)
	}
	return append(binary.BigEndian.AppendUint64([]byte{flags | 2}, uint64(len(body))), body...)
}

// TestHostile: whatever a peer sends is read as messages, or is an error; none of it is believed in what it says of
// lengths.
func TestHostile(t *testing.T) {
	hello := slices.Clip(append(greeting("NULL"), ready("SUB")...))
	long := bytes.Repeat([]byte("x"), 5000)
	for name, c := range map[string]struct {
		sent []byte
		want string // of the handshake's error, or else of the first message's
	}{
		"nothing":                {nil, "EOF"},
		"another protocol":       {[]byte("GET / HTTP/1.1\r\n\r\n" + strings.Repeat(" ", 64)), "no greeting"},
		"an old version":         {append([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 1}, make([]byte, 53)...), "version 1"},
		"a password":             {greeting("PLAIN"), `mechanism "PLAIN"`},
		"half a greeting":        {greeting("NULL")[:20], "EOF"},
		"no READY":               {append(greeting("NULL"), frame(0, "x")...), "no READY"},
		"an empty command":       {append(greeting("NULL"), 4, 0), "no READY"},
		"a wrong socket":         {append(greeting("NULL"), ready("REQ")...), `a "REQ" socket connects with a PUB`},
		"a cut property":         {append(greeting("NULL"), frame(4, "\x05READY\x0bSocket")...), "ends in a property"},
		"a cut value":            {append(greeting("NULL"), frame(4, "\x05READY\x0bSocket-Type\xff\xff\xff\xff")...), "ends in the value"},
		"flags":                  {append(hello, 0xf0, 0), "flags 0xf0"},
		"a long frame":           {append(hello, frame(0, string(long))...), "a frame of 5000 bytes"},
		"a frame without an end": {append(hello, 2, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff), "a frame of 9223372036854775807 bytes"},
		"endless frames":         {append(hello, bytes.Repeat(frame(1, "a"), 17)...), "more than 16 frames"},
		"a subscription":         {append(append(hello, frame(4, "\x04PING\x00\x00")...), frame(0, "\x01kv@")...), ""},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			var client sync.WaitGroup
			client.Go(func() {
				peer, err := net.Dial("tcp", l.Addr().String())
				if err != nil {
					t.Error(err)
					return
				}
				defer peer.Close()
				_, _ = peer.Write(c.sent)
				_ = peer.(*net.TCPConn).CloseWrite()
				_, _ = io.Copy(io.Discard, peer)
			})
			ours, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			conn, err := zmtp.Handshake(ours, zmtp.Pub)
			var frames [][]byte
			if err == nil {
				frames, err = conn.Read()
			}
			_ = ours.Close()
			client.Wait()
			switch {
			case c.want == "":
				if err != nil || len(frames) != 1 || string(frames[0]) != "\x01kv@" {
					t.Errorf("read %q, %v", frames, err)
				}
			case err == nil || !strings.Contains(err.Error(), c.want):
				t.Errorf("%v, want %q", err, c.want)
			case c.want != "EOF" && !errors.Is(err, zmtp.ErrProtocol):
				t.Errorf("%v is no ErrProtocol", err)
			}
		})
	}
}
