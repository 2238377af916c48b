package pipeline

import (
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Cause is why the compute stream stalled within a step.
type Cause uint8

// The causes.
const (
	// ExpertCopy: a wave's experts had not arrived.
	ExpertCopy Cause = iota
	// RouterSync: the host had to read what a router selected, or would select, before it
	// could continue.
	RouterSync
	// CPUAttention: the host had not computed attention yet.
	CPUAttention
	// KVCopy: the input or the output of attention on the host was being copied.
	KVCopy
	// LaunchBound: the stream ran out of work between two actions of the plan, while the host
	// waited for nothing.
	LaunchBound
	// KVLoad: KV blocks that the step reads had not been loaded.
	KVLoad
	// CPUExperts: the CPU had not computed its experts yet.
	CPUExperts

	causes = int(CPUExperts) + 1
)

var causeNames = [causes]string{"expert-copy", "router-sync", "cpu-attention", "kv-copy", "launch-bound", "kv-load", "cpu-experts"}

func (c Cause) String() string { return causeNames[c] }

// MarshalText returns the cause's name.
func (c Cause) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// Stalls are the compute stream's stall times, by Cause.
type Stalls [causes]time.Duration

// ByName returns the stalls in seconds by the names of their causes; all causes are present.
func (s Stalls) ByName() map[string]float64 {
	m := make(map[string]float64, causes)
	for c, d := range s {
		m[Cause(c).String()] = d.Seconds()
	}
	return m
}

// Sum returns the sum over all causes.
func (s Stalls) Sum() time.Duration {
	var sum time.Duration
	for _, d := range s {
		sum += d
	}
	return sum
}

// minStall is the maximum time between two consecutive events without a stall; shorter times
// are not counted.
const minStall = 2 * time.Microsecond

// meter measures stalls. It records events around operations that may hold the compute stream
// back, and reads their times when the step has ended, so that during the step it costs only
// the events. A nil meter only enqueues.
type meter struct {
	machine device.Machine
	stream  device.Stream
	// events are as many as any step so far has needed; the first used of them are in this
	// step.
	events []device.Event
	used   int
	spans  []span
	// last is behind the latest action that launched kernels; nil if no stall can start
	// there. layerEnd: that action ended a layer. perAction: every action of a layer is
	// checked, not only its end.
	last                device.Event
	layerEnd, perAction bool

	// failed is why the stalls of the present step cannot be measured. Such a step counts
	// none; at most every logInterval it is logged.
	failed error
	log    *slog.Logger
	logged time.Duration

	// began and ended are when the latest step did.
	began, ended time.Duration

	mu    sync.Mutex
	total Stalls
}

// span is a part of the compute stream's time, between two consecutive events of the stream.
type span struct {
	cause    Cause
	from, to device.Event
	// since and until, if set, are where the cause began and ended, on other streams: the
	// rest of the span is KVCopy.
	since, until device.Event
}

// begin starts a step.
func (m *meter) begin() {
	m.used, m.spans, m.last, m.perAction, m.failed = 0, m.spans[:0], nil, false, nil
	m.began = m.machine.Now()
}

// record records an event on a stream. The event is nil where none could be made: nothing is
// measured then.
func (m *meter) record(s device.Stream) (device.Event, error) {
	if m.used == len(m.events) {
		ev, err := m.machine.NewEvent()
		if err != nil {
			m.failed = err
			return nil, nil
		}
		m.events = append(m.events, ev)
	}
	ev := m.events[m.used]
	m.used++
	return ev, s.Record(ev)
}

// wait measures how long operations hold the stream back: enqueue puts them on it. For since
// and until, which may be nil, see span.
func (m *meter) wait(cause Cause, since, until device.Event, enqueue func() error) error {
	if m == nil {
		return enqueue()
	}
	from, err := m.record(m.stream)
	if err != nil {
		return err
	}
	if err := enqueue(); err != nil {
		return err
	}
	to, err := m.record(m.stream)
	m.count(span{cause: cause, from: from, to: to, since: since, until: until})
	return err
}

// count adds a span whose events could be made.
func (m *meter) count(s span) {
	if s.from != nil && s.to != nil {
		m.spans = append(m.spans, s)
	}
}

// afterAction and beforeAction are called around each action of a plan. If the stream has run
// out of work between two actions, its idle time is a stall; actions that launch no kernels
// do not count. While the stream always has work, only the ends of layers are checked, which
// costs one event per layer. Once it has run out, all actions of the next layer are checked.
func (m *meter) afterAction(k Kind) (err error) {
	if m == nil {
		return nil
	}
	if k.endsLayer() || m.perAction && k.launchesKernels() {
		m.last, err = m.record(m.stream)
		m.layerEnd = k.endsLayer()
	}
	return err
}

func (m *meter) beforeAction(k Kind) error {
	if m == nil || m.last == nil || !k.launchesKernels() {
		return nil
	}
	last := m.last
	m.last = nil
	// Errors are reported when the step ends.
	dry, err := last.Query()
	if m.layerEnd {
		m.perAction = dry
	}
	if !dry || err != nil {
		return nil
	}
	return m.stallSince(LaunchBound, last)
}

// afterRouterSync is called after the host has waited for a router; idle was recorded before
// the wait; nil: it could not be made. If the stream has run out of work since, it stalls until the next operation is
// enqueued.
func (m *meter) afterRouterSync(idle device.Event) error {
	m.last = nil
	if idle == nil {
		return nil
	}
	if dry, err := idle.Query(); !dry || err != nil {
		return nil
	}
	return m.stallSince(RouterSync, idle)
}

// stallSince counts a stall from an event of the stream to the next operation enqueued.
func (m *meter) stallSince(cause Cause, from device.Event) error {
	to, err := m.record(m.stream)
	m.count(span{cause: cause, from: from, to: to})
	return err
}

// logInterval is the minimum time between two messages that stalls could not be measured.
const logInterval = time.Minute

// end adds the stalls of a successful step to the total, and returns them. After an error,
// which end logs, the step counts none.
func (m *meter) end() (step Stalls, err error) {
	m.ended = m.machine.Now()
	err = m.failed
	for i := 0; i < len(m.spans) && err == nil; i++ {
		err = m.spans[i].each(func(s Stall) { step[s.Cause] += s.End - s.Begin })
	}
	if err != nil {
		if now := m.machine.Now(); m.logged == 0 || now-m.logged >= logInterval {
			m.logged = max(now, 1)
			m.log.Warn("a step's stalls are not measured", "err", err)
		}
		return Stalls{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for c, d := range step {
		m.total[c] += d
	}
	return step, nil
}

// each calls stall for the parts of the span, by their causes.
func (s *span) each(stall func(Stall)) error {
	var times [4]time.Duration
	for i, ev := range [...]device.Event{s.from, s.to, s.since, s.until} {
		if ev == nil {
			times[i] = times[i-2] // the cause lasts for the whole span
			continue
		}
		var err error
		if times[i], err = ev.Time(); err != nil {
			return err
		}
	}
	from, end := times[0], times[1]
	if end-from < minStall {
		return nil
	}
	since := min(max(times[2], from), end)
	until := min(max(times[3], since), end)
	for _, p := range [...]Stall{{KVCopy, from, since}, {s.cause, since, until}, {KVCopy, until, end}} {
		if p.Begin < p.End {
			stall(p)
		}
	}
	return nil
}

func (m *meter) stalls() Stalls {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.total
}

func (m *meter) close() error {
	var errs []error
	for _, ev := range m.events {
		errs = append(errs, ev.Close())
	}
	return errors.Join(errs...)
}

// Stall is one time for which the compute stream stalled, on the machine's clock.
type Stall struct {
	Cause      Cause
	Begin, End time.Duration
}

// LatestStep returns when the latest step began and ended, and appends its stalls to buffer, in order. They
// are read from the devices' events; an error means that they are not known. The goroutine that calls Step
// may call it between two steps.
func (p *Pipeline) LatestStep(buffer []Stall) (began, ended time.Duration, stalls []Stall, err error) {
	m := &p.meter
	err = m.failed
	for i := 0; i < len(m.spans) && err == nil; i++ {
		err = m.spans[i].each(func(s Stall) { buffer = append(buffer, s) })
	}
	return m.began, m.ended, buffer, err
}

// Stalls returns the compute stream's stall times in successful steps since New. It may be
// called from any goroutine.
func (p *Pipeline) Stalls() Stalls { return p.meter.stalls() }
