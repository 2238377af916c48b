package pipeline

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Cause is why the compute stream stood still within a step.
type Cause uint8

// The causes.
const (
	// ExpertCopy: a wave's experts had not arrived.
	ExpertCopy Cause = iota
	// RouterSync: the host had to see what a router chose, or would choose, before it
	// could go on.
	RouterSync
	// CPUAttention: the host had not attended yet.
	CPUAttention
	// KVCopy: what the host attends with, or what came of it, was on its way.
	KVCopy
	// LaunchBound: all that was enqueued had run between two actions of the plan, and the
	// host waited for nothing.
	LaunchBound
	// KVLoad: keys and values from elsewhere had not arrived where the step reads them.
	KVLoad

	causes = int(KVLoad) + 1
)

var causeNames = [causes]string{"expert-copy", "router-sync", "cpu-attention", "kv-copy", "launch-bound", "kv-load"}

func (c Cause) String() string { return causeNames[c] }

// MarshalText writes the cause's name.
func (c Cause) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// Stalls is for how long the compute stream stood still, by Cause.
type Stalls [causes]time.Duration

// ByName are the stalls in seconds by the names of their causes, all of which are there.
func (s Stalls) ByName() map[string]float64 {
	m := make(map[string]float64, causes)
	for c, d := range s {
		m[Cause(c).String()] = d.Seconds()
	}
	return m
}

// Sum of all causes.
func (s Stalls) Sum() time.Duration {
	var sum time.Duration
	for _, d := range s {
		sum += d
	}
	return sum
}

// leastStall is what lies between two events of which nothing holds the second back:
// less is not a stall.
const leastStall = 2 * time.Microsecond

// meter counts stalls. It puts events around what the compute stream may have to wait
// for, and reads their times when the step has ended: on the way it costs the two
// events and no more. A nil meter counts nothing of what is enqueued.
type meter struct {
	machine device.Machine
	stream  device.Stream
	// events are enough for the longest step so far, of which used are in this one.
	events []device.Event
	used   int
	spans  []span
	// last is behind the last action that computes; nil where nothing counts from there.
	// atEnd says that a layer has ended there, closely that layers are looked at closely.
	last           device.Event
	atEnd, closely bool

	mu    sync.Mutex
	total Stalls
}

// span is a part of the compute stream's time: from one event to the next of the stream.
type span struct {
	cause    Cause
	from, to device.Event
	// since and until, where they are set, are where the cause began and ended, on other
	// streams: the rest is KVCopy.
	since, until device.Event
}

// begin starts a step.
func (m *meter) begin() { m.used, m.spans, m.last, m.closely = 0, m.spans[:0], nil, false }

// mark records an event on a stream.
func (m *meter) mark(s device.Stream) (device.Event, error) {
	if m.used == len(m.events) {
		ev, err := m.machine.NewEvent()
		if err != nil {
			return nil, fmt.Errorf("pipeline: count stalls: %w", err)
		}
		m.events = append(m.events, ev)
	}
	ev := m.events[m.used]
	m.used++
	return ev, s.Record(ev)
}

// wait counts what holds the stream back in the operations that enqueue puts on it: by
// a cause, which since and until are about as span says, or are nil.
func (m *meter) wait(cause Cause, since, until device.Event, enqueue func() error) error {
	if m == nil {
		return enqueue()
	}
	from, err := m.mark(m.stream)
	if err != nil {
		return err
	}
	if err := enqueue(); err != nil {
		return err
	}
	to, err := m.mark(m.stream)
	m.spans = append(m.spans, span{cause: cause, from: from, to: to, since: since, until: until})
	return err
}

// pause comes behind each action of a plan, resume before it: where the stream has run
// dry meanwhile, that counts. Actions that give the device nothing to compute do not. As
// long as the stream does not run dry, only the ends of layers are looked at, so that a
// layer costs one event; where it does, the next layer is looked at closely.
func (m *meter) pause(k Kind) (err error) {
	if m == nil {
		return nil
	}
	if k.endsLayer() || m.closely && k.computes() {
		m.last, err = m.mark(m.stream)
		m.atEnd = k.endsLayer()
	}
	return err
}

func (m *meter) resume(k Kind) error {
	if m == nil || m.last == nil || !k.computes() {
		return nil
	}
	last := m.last
	m.last = nil
	// What has failed is found out when the step ends.
	dry, err := last.Query()
	if m.atEnd {
		m.closely = dry
	}
	if !dry || err != nil {
		return nil
	}
	return m.since(LaunchBound, last)
}

// asked comes behind a wait of the host for a router, from an event before it: where the
// stream has run dry meanwhile, that counts until it is given more.
func (m *meter) asked(idle device.Event) error {
	m.last = nil
	if dry, err := idle.Query(); !dry || err != nil {
		return nil
	}
	return m.since(RouterSync, idle)
}

// since counts from an event of the stream to what is enqueued next.
func (m *meter) since(cause Cause, from device.Event) error {
	to, err := m.mark(m.stream)
	m.spans = append(m.spans, span{cause: cause, from: from, to: to})
	return err
}

// end adds up a step that has ended well.
func (m *meter) end() (step Stalls, err error) {
	for _, s := range m.spans {
		if err := s.add(&step); err != nil {
			return step, fmt.Errorf("pipeline: count stalls: %w", err)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for c, d := range step {
		m.total[c] += d
	}
	return step, nil
}

// add counts one span.
func (s *span) add(to *Stalls) error {
	var times [4]time.Duration
	for i, ev := range [...]device.Event{s.from, s.to, s.since, s.until} {
		if ev == nil {
			times[i] = times[i-2] // the cause goes on for all of the span
			continue
		}
		var err error
		if times[i], err = ev.Time(); err != nil {
			return err
		}
	}
	from, end := times[0], times[1]
	if end-from < leastStall {
		return nil
	}
	since := min(max(times[2], from), end)
	until := min(max(times[3], since), end)
	to[KVCopy] += since - from + end - until
	to[s.cause] += until - since
	return nil
}

func (m *meter) stalls() Stalls {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.total
}

func (m *meter) release() error {
	var errs []error
	for _, ev := range m.events {
		errs = append(errs, ev.Close())
	}
	return errors.Join(errs...)
}

// Stalls is for how long, since New, steps that ended well have kept the compute
// stream standing still. It may be called from any goroutine.
func (p *Pipeline) Stalls() Stalls { return p.meter.stalls() }
