package events_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/events"
)

const topic = "kv@node@model"

func open(t *testing.T, c events.Config) *events.Publisher {
	t.Helper()
	c.Enabled = true
	p, err := events.Open(events.Options{Config: c, Topic: topic, BlockTokens: 2})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// subscribe connects a subscriber of another implementation of ZeroMQ.
func subscribe(t *testing.T, p *events.Publisher) zmq4.Socket {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	s := zmq4.NewSub(ctx)
	t.Cleanup(func() { cancel(); _ = s.Close() })
	if err := s.Dial("tcp://" + p.Addrs()[0].String()); err != nil {
		t.Fatal(err)
	}
	if err := s.SetOption(zmq4.OptionSubscribe, "kv@"); err != nil {
		t.Fatal(err)
	}
	return s
}

// message is a decoded message.
type message struct {
	number uint64
	events []map[string]any
}

func decode(t *testing.T, number, payload []byte) message {
	t.Helper()
	var b []any
	if err := msgpack.Unmarshal(payload, &b); err != nil || len(b) != 3 || len(number) != 8 {
		t.Fatalf("%d fields of batch %x: %v", len(b), number, err)
	}
	if s, ok := b[0].(float64); !ok || math.Abs(float64(time.Now().Unix())-s) > 600 {
		t.Errorf("the batch's time is %v", b[0])
	}
	m := message{number: binary.BigEndian.Uint64(number)}
	for _, e := range b[1].([]any) {
		m.events = append(m.events, e.(map[string]any))
	}
	return m
}

func receive(t *testing.T, s zmq4.Socket) message {
	t.Helper()
	m, err := s.Recv()
	if err != nil || len(m.Frames) != 3 || string(m.Frames[0]) != topic {
		t.Fatalf("message %q: %v", m.Frames, err)
	}
	return decode(t, m.Frames[1], m.Frames[2])
}

// first publishes until a subscriber, whose subscription takes its time, gets something, and returns that.
func first(t *testing.T, p *events.Publisher, s zmq4.Socket) message {
	t.Helper()
	done := make(chan struct{})
	defer func() { done <- struct{}{} }()
	go func() {
		for {
			select {
			case <-done:
				return
			case <-time.After(10 * time.Millisecond):
				p.Publish(nil)
			}
		}
	}()
	return receive(t, s)
}

func key(n byte) kvcache.Key { return kvcache.Key{1, n} }

// TestMessages: what a subscriber of another implementation decodes.
func TestMessages(t *testing.T) {
	p := open(t, events.Config{Endpoint: "tcp://127.0.0.1:*"})
	s := subscribe(t, p)
	at := first(t, p, s).number
	p.Publish([]kvcache.Event{
		{Medium: "GPU", Stored: []kvcache.Key{key(1), key(2)}, Parent: key(9), Tokens: []int32{1, 200, 3, 150_000}},
		{Medium: "GPU", Stored: []kvcache.Key{key(8)}, Parent: key(7)}, // of a prompt with a salt
		{Medium: "CPU", Stored: []kvcache.Key{key(1), key(2)}},
		{Medium: "PEER_GPU", Removed: []kvcache.Key{key(3), key(4)}},
	})
	var m message
	for len(m.events) == 0 {
		m = receive(t, s)
		if at++; m.number != at {
			t.Fatalf("batch %d follows batch %d", m.number, at-1)
		}
	}
	bytes := func(keys ...kvcache.Key) (all []any) {
		for _, k := range keys {
			all = append(all, k[:])
		}
		return all
	}
	want := []map[string]any{
		{
			"type": "BlockStored", "block_hashes": bytes(key(1), key(2)), "parent_block_hash": bytes(key(9))[0],
			"token_ids": []any{int8(1), uint8(200), int8(3), uint32(150_000)}, "block_size": int8(2), "medium": "GPU", "lora_id": nil, "lora_name": nil,
		},
		{
			"type": "BlockStored", "block_hashes": bytes(key(8)), "parent_block_hash": nil,
			"token_ids": []any{}, "block_size": int8(2), "medium": "GPU", "lora_id": nil, "lora_name": nil,
		},
		{
			"type": "BlockStored", "block_hashes": bytes(key(1), key(2)), "parent_block_hash": nil,
			"token_ids": []any{}, "block_size": int8(2), "medium": "CPU", "lora_id": nil, "lora_name": nil,
		},
		{"type": "BlockRemoved", "block_hashes": bytes(key(3), key(4)), "medium": "PEER_GPU"},
	}
	if got := fmt.Sprintf("%#v", m.events); got != fmt.Sprintf("%#v", want) {
		t.Errorf("got  %s\nwant %#v", got, want)
	}
	if st := p.Stats(); st.Events != 4 || st.Subscribers != 1 || st.Dropped != 0 || st.Missed != 0 || st.Batches != int64(at)+1 {
		t.Errorf("%+v", st)
	}
}

// replayed are the batches from a number on, asked for as REQ and DEALER sockets do.
func replayed(t *testing.T, p *events.Publisher, from uint64) (all []message) {
	t.Helper()
	s := zmq4.NewDealer(t.Context())
	defer s.Close()
	if err := s.Dial("tcp://" + p.Addrs()[1].String()); err != nil {
		t.Fatal(err)
	}
	if err := s.SendMulti(zmq4.NewMsgFrom(nil, binary.BigEndian.AppendUint64(nil, from))); err != nil {
		t.Fatal(err)
	}
	for {
		m, err := s.Recv()
		if err != nil || len(m.Frames) != 4 || len(m.Frames[0]) > 0 || string(m.Frames[1]) != topic {
			t.Fatalf("%q: %v", m.Frames, err)
		}
		if binary.BigEndian.Uint64(m.Frames[2]) == math.MaxUint64 && len(m.Frames[3]) == 0 {
			return all
		}
		all = append(all, decode(t, m.Frames[2], m.Frames[3]))
	}
}

// published waits for batches to be encoded.
func published(t *testing.T, p *events.Publisher, batches int64) {
	t.Helper()
	for p.Stats().Batches < batches {
		if t.Context().Err() != nil {
			t.Fatal("not published")
		}
		time.Sleep(time.Millisecond)
	}
}

// TestReplay: batches can be had again as long as they are kept; the first of a process clears what was known.
func TestReplay(t *testing.T) {
	p := open(t, events.Config{Endpoint: "tcp://127.0.0.1:*", ReplayEndpoint: "@tcp://127.0.0.1:*", BufferSteps: 4})
	p.Publish([]kvcache.Event{{Medium: "GPU", Stored: []kvcache.Key{key(1)}}})
	p.Publish([]kvcache.Event{{Medium: "GPU", Removed: []kvcache.Key{key(1)}}})
	published(t, p, 3)
	all := replayed(t, p, 0)
	var kinds []any
	for i, m := range all {
		if m.number != uint64(i) {
			t.Errorf("batch %d comes as %d", m.number, i)
		}
		for _, e := range m.events {
			kinds = append(kinds, e["type"])
		}
	}
	if want := []any{"AllBlocksCleared", "BlockStored", "BlockRemoved"}; !slices.Equal(kinds, want) {
		t.Errorf("%v, want %v", kinds, want)
	}
	for range 3 {
		p.Publish(nil)
	}
	published(t, p, 6)
	for from, want := range map[uint64][]uint64{0: {2, 3, 4, 5}, 4: {4, 5}, 6: nil, math.MaxUint64 - 1: nil} {
		var got []uint64
		for _, m := range replayed(t, p, from) {
			got = append(got, m.number)
		}
		if !slices.Equal(got, want) {
			t.Errorf("from batch %d on %d are kept, want %d", from, got, want)
		}
	}
	if n := p.Stats().Replays; n != 5 {
		t.Errorf("%d replays, want 5", n)
	}
}

// TestSlowSubscriber: one that does not read holds up neither the engine nor another one.
func TestSlowSubscriber(t *testing.T) {
	p := open(t, events.Config{Endpoint: "tcp://127.0.0.1:*", HWM: 8, BufferSteps: 16})
	c, err := net.Dial("tcp", p.Addrs()[0].String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	greeting := make([]byte, 64)
	greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
	copy(greeting[12:], "NULL")
	hello := append(greeting, "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB\x00\x01\x01"...)
	if _, err := c.Write(hello[:64+2+25]); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("\x00\x01\x01")); err != nil { // subscribes to all, and reads nothing
		t.Fatal(err)
	}
	s := subscribe(t, p)
	at := first(t, p, s).number
	large := []kvcache.Event{{Medium: "GPU", Stored: make([]kvcache.Key, 20_000)}}
	for range 200 { // 140 MB: more than sockets take
		p.Publish(large)
		for {
			m := receive(t, s)
			if at++; m.number != at {
				t.Fatalf("batch %d follows batch %d", m.number, at-1)
			}
			if len(m.events) == 1 && m.events[0]["type"] == "BlockStored" {
				break
			}
		}
	}
	// Those that are kept are fewer than those that it has not read.
	_ = c.(*net.TCPConn).SetReadBuffer(1 << 20)
	b := make([]byte, 1<<20)
	for p.Stats().Missed == 0 {
		if _, err := c.Read(b); err != nil {
			t.Fatal(err)
		}
	}
}

// TestQueueFull: with more batches than are encoded the engine goes on, and the next batch clears what
// subscribers know.
func TestQueueFull(t *testing.T) {
	p := open(t, events.Config{Endpoint: "tcp://127.0.0.1:*", ReplayEndpoint: "tcp://127.0.0.1:*", MaxQueueSize: 1, BufferSteps: 1000})
	published(t, p, 1)
	n := byte(0)
	for p.Stats().Dropped == 0 {
		n++
		p.Publish([]kvcache.Event{{Medium: "GPU", Stored: []kvcache.Key{key(n)}}})
	}
	// Batches accepted before one was dropped can still be waiting, so it is not the next one that says so.
	for cleared := false; !cleared; {
		if t.Context().Err() != nil {
			t.Fatal("nothing says that events were dropped")
		}
		p.Publish([]kvcache.Event{{Medium: "GPU", Removed: []kvcache.Key{key(0)}}})
		time.Sleep(time.Millisecond)
		for _, m := range replayed(t, p, 1) {
			if m.events[0]["type"] == "AllBlocksCleared" {
				cleared = true
				if len(m.events) != 2 {
					t.Errorf("the batch has events %v", m.events)
				}
			}
		}
	}
}

// TestConnects: an endpoint of another host is connected to, again and again.
func TestConnects(t *testing.T) {
	path := filepath.Join(t.TempDir(), "router")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p := open(t, events.Config{Endpoint: ">ipc://" + path})
	for range 2 {
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
	}
	if p.Addrs() != nil {
		t.Errorf("%v is bound", p.Addrs())
	}
}

// TestSocketFile: what a killed process has left is replaced; what another one listens on is not.
func TestSocketFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "events")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	c := events.Config{Enabled: true, Endpoint: "ipc://" + path}
	if _, err := events.Open(events.Options{Config: c}); err == nil || !strings.Contains(err.Error(), "another process listens") {
		t.Fatal(err)
	}
	_ = l.Close()
	p := open(t, c)
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if p.Stats().Subscribers != 0 {
		t.Error("a subscriber before its handshake")
	}
}

// TestSilentPeer: one that connects and says nothing keeps nobody else from connecting, nor the publisher from ending.
func TestSilentPeer(t *testing.T) {
	p := open(t, events.Config{Endpoint: "tcp://127.0.0.1:*"})
	for range 20 {
		c, err := net.Dial("tcp", p.Addrs()[0].String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	first(t, p, subscribe(t, p))
}

// TestNull: the publisher that drops all.
func TestNull(t *testing.T) {
	p := open(t, events.Config{Publisher: events.Null})
	p.Publish([]kvcache.Event{{Medium: "GPU", Stored: []kvcache.Key{key(1)}}})
	if p.Stats() != (events.Stats{}) || p.Addrs() != nil {
		t.Errorf("%+v, %v", p.Stats(), p.Addrs())
	}
}

func TestConfig(t *testing.T) {
	for text, want := range map[string]string{
		`{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "buffer_steps": 10, "hwm": 5, "max_queue_size": 3, "topic": "kv@a@b"}`: "",
		`{"endpoint": "ipc:///tmp/events"}`:             "",
		`{"endpoint": "tcp://router.example:5557"}`:     "",
		`{"endpoint": "tcp://[::]:5557"}`:               "",
		``:                                              "EOF",
		`{} {}`:                                         "unexpected text",
		`{"enable": true}`:                              `unknown field "enable"`,
		`{"publisher": "nats"}`:                         `publisher is "nats"; it must be "zmq" or "null"`,
		`{"endpoint": "5557"}`:                          `endpoint is "5557"; it must be tcp://HOST:PORT or ipc://PATH`,
		`{"endpoint": "@>tcp://a:1"}`:                   "it must be tcp://HOST:PORT",
		`{"endpoint": "tcp://router"}`:                  "it must have a port",
		`{"endpoint": "tcp://a*:1"}`:                    `"a*" is no host`,
		`{"endpoint": ">tcp://*:1"}`:                    `"*" is no host`,
		`{"endpoint": "ipc://"}`:                        "it must have a path",
		`{"replay_endpoint": "tcp://*:5557"}`:           "as is endpoint",
		`{"buffer_steps": -1}`:                          "buffer_steps is -1; it must be from 1 to 10,000,000",
		`{"topic": "` + strings.Repeat("a", 256) + `"}`: "topic has 256 bytes",
	} {
		_, err := events.ParseConfig([]byte(text))
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "--kv-events-config")) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// TestAddressInUse: an endpoint that cannot be bound is an error that names it.
func TestAddressInUse(t *testing.T) {
	p := open(t, events.Config{Endpoint: "tcp://127.0.0.1:*"})
	for _, c := range []events.Config{
		{Endpoint: "@tcp://" + p.Addrs()[0].String()},
		{Endpoint: "tcp://127.0.0.1:*", ReplayEndpoint: "tcp://" + p.Addrs()[0].String()},
	} {
		_, err := events.Open(events.Options{Config: c})
		var op *net.OpError
		if !errors.As(err, &op) || !strings.Contains(err.Error(), "endpoint: listen tcp "+p.Addrs()[0].String()) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// BenchmarkPublish is what the engine pays for a step of 64 sequences that each fill a block: with the encoding, which
// another goroutine does, at a share of the steps.
func BenchmarkPublish(b *testing.B) {
	p, err := events.Open(events.Options{
		Config:      events.Config{Enabled: true, Endpoint: "tcp://127.0.0.1:*", MaxQueueSize: 1000},
		BlockTokens: 16,
	})
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	var list []kvcache.Event
	for range 64 {
		list = append(list, kvcache.Event{Medium: "GPU", Stored: []kvcache.Key{{byte(rand.Uint32())}}, Tokens: make([]int32, 16)})
	}
	b.ReportAllocs()
	for b.Loop() {
		p.Publish(list)
	}
	b.ReportMetric(float64(p.Stats().Dropped)/float64(b.N), "dropped/op")
}
