package events

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/events/zmtp"
)

const (
	maxConnections = 256              // of an endpoint
	maxTopics      = 64               // that a subscriber subscribes to
	retry          = time.Second      // after a connection that could not be made, or ended
	replayTimeout  = 10 * time.Second // for one batch
)

// replayEnd is the number behind the last batch of a replay: -1.
const replayEnd = math.MaxUint64

// Options describe a publisher.
type Options struct {
	Config Config
	// Topic is used where the Config has none.
	Topic string
	// BlockTokens is the number of tokens of a block of the GPU.
	BlockTokens int
	// Log of subscribers. Default: discarded.
	Log *slog.Logger
	// Now is the time of batches. Default: time.Now.
	Now func() time.Time
}

// Stats count from Open on.
type Stats struct {
	// Batches and Events were published; Events counts those of a batch, not blocks.
	Batches, Events int64
	// Dropped batches found the queue full.
	Dropped int64
	// Missed batches were not sent to a subscriber that was too far behind, each counted for each subscriber.
	Missed int64
	// Subscribers that are connected.
	Subscribers int64
	// Replays that were asked for.
	Replays int64
}

// Publisher publishes events. Any goroutine may use it.
type Publisher struct {
	o       Options
	topic   []byte
	history *history
	ctx     context.Context
	cancel  context.CancelFunc
	done    sync.WaitGroup
	wake    chan struct{} // capacity 1

	listeners []net.Listener

	mu    sync.Mutex
	queue []batch
	// cleared: batches were dropped, or there was none.
	cleared bool

	dropped, missed, subscribers, replays atomic.Int64
}

// Open opens the sockets of the configuration, which is valid and enabled.
func Open(o Options) (*Publisher, error) {
	o.Config = o.Config.EnsureDefaults()
	if o.Config.Topic == "" {
		o.Config.Topic = o.Topic
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	p := &Publisher{
		o: o, topic: []byte(o.Config.Topic), history: newHistory(o.Config.BufferSteps),
		wake: make(chan struct{}, 1), cleared: true,
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	if o.Config.Publisher == Null {
		return p, nil
	}
	if err := p.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("--kv-events-config: %w", err), p.Close())
	}
	p.done.Go(p.encode)
	p.Publish(nil)
	return p, nil
}

func (p *Publisher) open() error {
	if e := p.o.Config.endpoint(); e.bind {
		if err := p.listen(e, p.subscriber); err != nil {
			return fmt.Errorf("endpoint: %w", err)
		}
	} else {
		p.done.Go(func() { p.connect(e) })
	}
	if p.o.Config.ReplayEndpoint == "" {
		return nil
	}
	e, err := parseEndpoint(p.o.Config.ReplayEndpoint)
	if err == nil {
		err = p.listen(e, p.replay)
	}
	if err != nil {
		return fmt.Errorf("replay_endpoint: %w", err)
	}
	return nil
}

// listen serves the connections of an endpoint.
func (p *Publisher) listen(e endpoint, serve func(net.Conn) error) error {
	if e.network == "unix" { // what a killed process has left
		if i, err := os.Lstat(e.address); err == nil && i.Mode()&os.ModeSocket != 0 {
			if c, err := net.Dial(e.network, e.address); err == nil {
				return errors.Join(fmt.Errorf("listen unix %s: another process listens there", e.address), c.Close())
			}
			if err := os.Remove(e.address); err != nil {
				return err
			}
		}
	}
	l, err := new(net.ListenConfig).Listen(p.ctx, e.network, e.address)
	if err != nil {
		return err
	}
	p.listeners = append(p.listeners, l)
	p.done.Go(func() {
		free := make(chan struct{}, maxConnections)
		for p.ctx.Err() == nil {
			c, err := l.Accept()
			if err != nil {
				p.pause(retry / 10)
				continue
			}
			select {
			case free <- struct{}{}:
			default:
				p.o.Log.Warn("KV events: connection refused: there are too many", "address", l.Addr(), "connections", maxConnections, "peer", c.RemoteAddr())
				_ = c.Close()
				continue
			}
			p.done.Go(func() {
				defer func() { <-free }()
				p.serve(c, serve)
			})
		}
	})
	return nil
}

// serve serves a connection until it ends, or Close is called.
func (p *Publisher) serve(c net.Conn, serve func(net.Conn) error) {
	stop := context.AfterFunc(p.ctx, func() { _ = c.Close() })
	err := serve(c)
	stop()
	_ = c.Close()
	if errors.Is(err, zmtp.ErrProtocol) {
		p.o.Log.Warn("KV events: connection closed", "peer", c.RemoteAddr(), "err", err)
	}
}

// connect is a publisher to an endpoint that a subscriber has bound.
func (p *Publisher) connect(e endpoint) {
	for p.ctx.Err() == nil {
		c, err := (&net.Dialer{Timeout: zmtp.HandshakeTimeout}).DialContext(p.ctx, e.network, e.address)
		if err == nil {
			p.serve(c, p.subscriber)
		} else {
			p.o.Log.Debug("KV events: not connected", "endpoint", e.address, "err", err)
		}
		p.pause(retry)
	}
}

func (p *Publisher) pause(d time.Duration) {
	select {
	case <-time.After(d):
	case <-p.ctx.Done():
	}
}

// subscriber sends a subscriber the batches that come.
func (p *Publisher) subscriber(c net.Conn) error {
	conn, err := zmtp.Handshake(c, zmtp.Pub)
	if err != nil {
		return err
	}
	p.subscribers.Add(1)
	defer p.subscribers.Add(-1)
	r := &reader{topics: map[string]int{}}
	var ended sync.WaitGroup
	var read error
	ended.Go(func() {
		read = p.subscriptions(conn, r)
		p.history.leave(r)
		_ = conn.Close()
	})
	defer ended.Wait()
	defer conn.Close() //nolint:errcheck // has the reader end
	for {
		n, payload, missed, ok := p.history.await(r, p.o.Config.HWM)
		p.missed.Add(int64(missed))
		if !ok {
			ended.Wait()
			return read
		}
		if err := conn.Write(p.topic, number(n), payload); err != nil {
			return nil //nolint:nilerr // the subscriber has left
		}
	}
}

// subscriptions reads what a subscriber subscribes to.
func (p *Publisher) subscriptions(conn *zmtp.Conn, r *reader) error {
	for {
		frames, err := conn.Read()
		if err != nil {
			return err
		}
		if f := frames[0]; len(frames) == 1 && len(f) > 0 && f[0] <= 1 {
			p.history.change(r, string(p.topic), string(f[1:]), f[0] == 1)
		}
	}
}

// replay sends kept batches to those who ask for them: from the number on that is a request's last frame. What
// comes before that frame, a REQ or DEALER socket's empty one, comes before the topic in each reply. Behind the last
// batch comes an empty one with the number -1.
func (p *Publisher) replay(c net.Conn) error {
	conn, err := zmtp.Handshake(c, zmtp.Router)
	if err != nil {
		return err
	}
	for {
		frames, err := conn.Read()
		if err != nil {
			return err
		}
		last := len(frames) - 1
		if len(frames[last]) != 8 {
			return fmt.Errorf("%w: a replay is asked for with a number of %d bytes; it must have 8", zmtp.ErrProtocol, len(frames[last]))
		}
		p.replays.Add(1)
		send := func(n uint64, payload []byte) error {
			if err := c.SetWriteDeadline(p.deadline()); err != nil {
				return err
			}
			return conn.Write(append(frames[:last:last], p.topic, number(n), payload)...)
		}
		for next := binary.BigEndian.Uint64(frames[last]); ; {
			n, payload, ok := p.history.from(next)
			if !ok {
				break
			}
			if err := send(n, payload); err != nil {
				return err
			}
			next = n + 1
		}
		if err := send(replayEnd, nil); err != nil {
			return err
		}
	}
}

// deadline is that of sending one batch of a replay: by the wall clock, whatever Options.Now is.
func (p *Publisher) deadline() time.Time { return time.Now().Add(replayTimeout) }

func number(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

// Publish publishes events as one batch; none: what no batch has said yet. It takes them, and never waits.
func (p *Publisher) Publish(events []kvcache.Event) {
	if p.o.Config.Publisher == Null {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.queue) == p.o.Config.MaxQueueSize {
		p.dropped.Add(1)
		p.cleared = true
		return
	}
	p.queue = append(p.queue, batch{seconds: float64(p.o.Now().UnixNano()) / 1e9, events: events, cleared: p.cleared})
	p.cleared = false
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// encode encodes the queue's batches.
func (p *Publisher) encode() {
	e := newEncoder(p.o.BlockTokens)
	var taken []batch
	for {
		select {
		case <-p.wake:
		case <-p.ctx.Done():
			return
		}
		p.mu.Lock()
		taken, p.queue = p.queue, taken[:0]
		p.mu.Unlock()
		for i, b := range taken {
			p.history.add(e.encode(b), len(b.events))
			taken[i] = batch{}
		}
	}
}

// Addrs are the addresses that are bound: of the endpoint, unless it is one to connect to, and of the
// replay endpoint, if there is one.
func (p *Publisher) Addrs() (addrs []net.Addr) {
	for _, l := range p.listeners {
		addrs = append(addrs, l.Addr())
	}
	return addrs
}

// Topic is that of all messages.
func (p *Publisher) Topic() string { return string(p.topic) }

// Stats returns the counters.
func (p *Publisher) Stats() Stats {
	batches, events := p.history.added()
	return Stats{
		Batches: batches, Events: events, Dropped: p.dropped.Load(), Missed: p.missed.Load(),
		Subscribers: p.subscribers.Load(), Replays: p.replays.Load(),
	}
}

// Close closes the sockets. What is queued is not published.
func (p *Publisher) Close() error {
	p.cancel()
	p.history.close()
	var errs []error
	for _, l := range p.listeners {
		if err := l.Close(); !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	p.done.Wait()
	return errors.Join(errs...)
}
