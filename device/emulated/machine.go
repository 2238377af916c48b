package emulated

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Machine is an emulated host with its GPUs. One lock guards all its state; the lock is
// released while bytes move and Work runs.
//
// On the wall clock each stream has a goroutine (stream.loop) that takes operations off its
// queue. A virtual machine has no such goroutines: the goroutine that waits drives it (see
// wait).
type Machine struct {
	o    Options
	topo *device.Topology
	wall device.WallClock
	// turns holds the loops of a virtual clock.
	turns loops

	mu      sync.Mutex
	spaces  []*space
	memory  index
	streams []*stream
	// loops counts the stream goroutines, for Close.
	loops  sync.WaitGroup
	closed bool
	// aborting makes streams drop their queued operations.
	aborting bool

	// now is the virtual clock; fluid computes when copies and Work end.
	now   time.Duration
	fluid fluid
	rng   *rand.Rand
	// driver is the goroutine that drives a virtual machine; 0: none.
	driver uintptr
	// waiters are the host's waits in progress on a virtual machine.
	waiters []*waiter
	// change is closed and replaced when a goroutine asleep in wait may be able to
	// continue; sleepers counts these goroutines.
	change   chan struct{}
	sleepers int
	// calls counts the host's calls of the machine, so that poll can detect two consecutive
	// polls.
	calls      uint64
	candidates []*stream
	faults     []*Fault
	// anyLost: some GPU was lost.
	anyLost atomic.Bool
	check   *checker
	// undefined: with Options.LikeCUDA, a stream has run on behind a failed wait.
	undefined bool
}

// space holds the accounting of one memory space.
type space struct {
	id    device.Space
	usage device.Usage
	lost  bool
}

var _ device.Machine = (*Machine)(nil)

// Open returns an emulated machine; its dynamic type is *Machine.
func Open(o Options) (device.Machine, error) {
	m, err := New(o)
	if err != nil {
		return nil, err
	}
	return m, nil
}

// New is Open for callers that inject faults or read findings.
func New(o Options) (*Machine, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o = o.EnsureDefaults()
	m := &Machine{
		o: o, topo: o.topology(), wall: device.WallClock{Opened: time.Now()},
		rng: rand.New(rand.NewPCG(o.Seed, 0)), change: make(chan struct{}),
	}
	for _, s := range m.topo.Spaces() {
		i, _ := m.topo.Info(s)
		m.spaces = append(m.spaces, &space{id: s, usage: device.Usage{Capacity: i.MemoryBytes}})
	}
	for _, l := range m.topo.Links {
		m.fluid.rates = append(m.fluid.rates, l.BytesPerSecond)
	}
	// One more resource per space: its processor, which provides one second per second.
	for range m.spaces {
		m.fluid.rates = append(m.fluid.rates, 1)
	}
	m.addTraffic()
	if o.Check {
		m.check = newChecker(m)
	}
	return m, nil
}

// Topology implements device.Machine.
func (m *Machine) Topology() *device.Topology { return m.topo }

// Capabilities implements device.Machine.
func (m *Machine) Capabilities() device.Capabilities {
	return device.Capabilities{KeepsData: !m.o.NoData, Emulated: true, Timed: m.o.Virtual || m.o.Pace, CopyErrorsLoseDevice: m.o.CopyErrorsLoseDevice}
}

// Now implements device.Clock.
func (m *Machine) Now() time.Duration {
	if !m.o.Virtual {
		return m.wall.Now()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.now
}

// clock is Now with the lock held.
func (m *Machine) clock() time.Duration {
	if m.o.Virtual {
		return m.now
	}
	return m.wall.Now()
}

// Usage implements device.Machine.
func (m *Machine) Usage(s device.Space) (device.Usage, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	sp, err := m.space("usage", s)
	if err != nil {
		return device.Usage{}, err
	}
	if sp.lost {
		return device.Usage{}, sp.lostErr("usage", "")
	}
	return sp.usage, nil
}

// space returns the state of s, if the machine is open and has s.
func (m *Machine) space(op string, s device.Space) (*space, error) {
	if m.closed {
		return nil, &device.Error{Op: op, Space: s, Detail: "the machine", Err: device.ErrClosed}
	}
	if s < 0 || int(s) >= len(m.spaces) {
		return nil, &device.Error{Op: op, Space: s, Detail: fmt.Sprintf("unknown memory space; the machine has %d GPUs", len(m.spaces)-1)}
	}
	return m.spaces[s], nil
}

func (sp *space) lostErr(op, detail string) error {
	return &device.Error{Op: op, Space: sp.id, Detail: detail, Err: device.ErrLost}
}

// Close implements device.Machine. It lets all operations that can still run finish, and
// drops those that wait for an event or a fence that is never signaled. The error names the
// dropped ones too and, if Options.Report is unset, the findings of the check.
func (m *Machine) Close() error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return &device.Error{Op: "close", Space: device.Host, Detail: "the machine", Err: device.ErrClosed}
	}
	m.settle()
	var problems []string
	for _, s := range m.streams {
		if s.pending() {
			problems = append(problems, "closed while "+m.describe(s))
		}
	}
	m.closed, m.aborting = true, true
	for _, s := range m.streams {
		s.wake()
	}
	for _, w := range m.waiters {
		w.fire(&device.Error{Op: "wait", Space: device.Host, Detail: "the machine", Err: device.ErrClosed})
	}
	m.notify()
	m.mu.Unlock()
	m.loops.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.streams {
		for s.q.n > 0 {
			m.drop(s, s.q.pop())
		}
		m.releaseWaiters(s)
	}
	m.streams = nil
	for _, mem := range slices.Concat(m.memory.live, m.memory.suspended) {
		problems = append(problems, fmt.Sprintf("memory %q (%d bytes on %s) was not freed", mem.label, mem.bytes, mem.space.id))
		mem.free = true
		if !mem.suspended {
			mem.space.usage.Allocated -= mem.rounded
		}
		if err := mem.unmap(); err != nil {
			problems = append(problems, err.Error())
		}
	}
	m.memory.live, m.memory.suspended = nil, nil
	for _, t := range m.memory.freed {
		if err := t.unmap(); err != nil {
			problems = append(problems, err.Error())
		}
	}
	m.memory.freed = nil
	if m.check != nil && m.o.Report == nil {
		for _, f := range m.check.findings {
			problems = append(problems, f.String())
		}
	}
	if len(problems) > 0 {
		return &device.Error{Op: "close", Space: device.Host, Err: errors.New(strings.Join(problems, "; "))}
	}
	return nil
}

// settle waits until no stream can continue by itself. The lock is held on entry and
// return, and released while waiting.
func (m *Machine) settle() {
	if m.o.Virtual {
		// The waiter is never fired: the wait ends when nothing can run.
		_ = m.wait(context.Background(), &waiter{ready: make(chan struct{}, 1), settle: true})
		return
	}
	for {
		i := slices.IndexFunc(m.streams, func(s *stream) bool { return s.busy || m.runnable(s) })
		if i < 0 {
			return
		}
		w := &waiter{ready: make(chan struct{}, 1)}
		m.streams[i].settlers = append(m.streams[i].settlers, w)
		m.mu.Unlock()
		<-w.ready
		m.mu.Lock()
	}
}

// Trace describes one operation that ended.
type Trace struct {
	Stream string
	Space  device.Space
	// Op is "copy", "launch", "record", "signal" or "wait" (for an event or a fence).
	Op string
	// Name is the Work's name, Bytes the size of the copy.
	Name  string
	Bytes int64
	// Host reports that the operation is Work with Host set.
	Host bool
	// Note is the stream's annotation when the operation was enqueued.
	Note any
	// Start of a wait is the time from which nothing else blocked it.
	Start, End time.Duration
	// Err is the error with which the operation failed or was skipped.
	Err error
}

// OtherBandwidth returns the fraction of a memory's bandwidth that other processes use.
func (m *Machine) OtherBandwidth(s device.Space) float64 {
	i, _ := s.GPU()
	return m.o.Busy[i]
}
