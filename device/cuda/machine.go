//go:build cuda

package cuda

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"gorgonia.org/cu"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda/internal/driver"
)

const (
	// minDriver is the minimum CUDA version of the driver, in the driver's numbering.
	minDriver = 12000
	// minComputeCapability is the minimum compute capability, major*10+minor, of the kernels.
	minComputeCapability = 80
	// maxGPUs is the maximum number of devices that memory can be mapped for.
	maxGPUs = 64
)

// Machine is a host with NVIDIA GPUs. It tracks streams, events, fences and memory until
// they are closed, and its Close closes the remaining ones.
type Machine struct {
	o Options
	device.WallClock
	gpus   []*gpu
	topo   *device.Topology
	words  words
	memory index
	// registers means that memory mapped by the host can be pinned in place and has the
	// same address on all devices.
	registers bool
	version   int

	// closed refuses all new operations; aborting and aborted end every host wait.
	closed, aborting atomic.Bool
	aborted          chan struct{}
	// waits is read-locked during host waits, so that Close releases nothing that a
	// waiting goroutine uses.
	waits sync.RWMutex

	// enqueuing holds an element while the driver takes one of the first operations of a stream, see begin.go.
	enqueuing chan struct{}

	// mu guards the fields below, changes of memory, and the accounts. Lock order: a
	// fence's or event's lock before mu, never after it.
	mu      sync.Mutex
	host    account
	streams map[*Stream]struct{}
	hosts   map[*hostStream]struct{}
	events  map[*event]struct{}
	fences  map[*fence]struct{}
	// suspended memory is in no index.
	suspended map[*memory]struct{}
}

var _ device.Machine = (*Machine)(nil)

// Open opens GPUs of this machine and returns a *Machine. The error wraps ErrUnavailable
// if CUDA cannot be used on this machine.
func Open(o Options) (device.Machine, error) {
	m, err := New(o)
	if err != nil {
		return nil, err
	}
	return m, nil
}

// New is Open for callers that need the methods this package adds to device.Machine.
func New(o Options) (*Machine, error) {
	o = o.EnsureDefaults()
	version, err := start(o.Driver)
	if err != nil {
		return nil, err
	}
	count, err := cu.NumDevices()
	if err != nil {
		return nil, failure("open", device.Host, code(err), "counting devices")
	}
	if len(o.GPUs) > maxGPUs {
		return nil, badArgument("open", device.Host, "%d GPUs asked for; %d is the most", len(o.GPUs), maxGPUs)
	}
	m := &Machine{
		o: o, WallClock: device.WallClock{Opened: time.Now()}, version: version, registers: true, aborted: make(chan struct{}), enqueuing: make(chan struct{}, 1),
		streams: map[*Stream]struct{}{}, hosts: map[*hostStream]struct{}{}, events: map[*event]struct{}{}, fences: map[*fence]struct{}{}, suspended: map[*memory]struct{}{},
	}
	for i, n := range o.GPUs {
		switch {
		case n < 0 || n >= count:
			return nil, badArgument("open", device.Host, "GPU %d asked for; this machine has %d, numbered from 0 (CUDA_VISIBLE_DEVICES may hide some)", n, count)
		case slices.Contains(o.GPUs[:i], n):
			return nil, badArgument("open", device.Host, "GPU %d asked for twice", n)
		}
		f, err := readFacts(cu.Device(n))
		if err != nil {
			return nil, err
		}
		if f.capability < minComputeCapability {
			return nil, unavailable("GPU %d is a %s of compute capability %d.%d; the kernels need 8.0 (A100 and later)", n, f.name, f.capability/10, f.capability%10)
		}
		if !f.virtualMemory {
			return nil, unavailable("GPU %d (%s) cannot map memory by cuMemMap in this driver's mode; use a driver with virtual memory management", n, f.name)
		}
		m.registers = m.registers && f.registers
		m.gpus = append(m.gpus, &gpu{m: m, index: i, space: device.HBM(i), dev: cu.Device(n), facts: f})
	}
	for _, g := range m.gpus {
		if err := g.open(); err != nil {
			return nil, errors.Join(err, m.release())
		}
	}
	links, err := m.connect()
	if err != nil {
		return nil, errors.Join(err, m.release())
	}
	m.topo = m.describe(links)
	return m, nil
}

// start loads the driver, runs its cuInit, and returns the CUDA version of the driver.
func start(library string) (int, error) {
	// The driver reads these in cuInit; see Environment in the package comment.
	for name, value := range map[string]string{
		"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER",
	} {
		if _, set := os.LookupEnv(name); !set {
			if err := os.Setenv(name, value); err != nil {
				return 0, badArgument("open", device.Host, "environment: %v", err)
			}
		}
	}
	if _, err := driver.Load(library); err != nil {
		return 0, unavailable("there is no NVIDIA driver (%v); install one, or use the CPU", err)
	}
	if err := driver.Init(); err != nil {
		return 0, unavailable("the NVIDIA driver does not start (%v)", err)
	}
	version := cu.Version()
	if version < minDriver {
		return 0, unavailable("the NVIDIA driver offers CUDA %d.%d; 12.0 is needed (driver 525 or later)", version/1000, version%1000/10)
	}
	return version, nil
}

// connect enables peer access between all pairs of GPUs that support it. In its result,
// [i][j] reports whether GPU i can access the memory of GPU j.
func (m *Machine) connect() ([][]bool, error) {
	reach := make([][]bool, len(m.gpus))
	for i, a := range m.gpus {
		reach[i] = make([]bool, len(m.gpus))
		for j, b := range m.gpus {
			if i == j {
				reach[i][j] = true
				continue
			}
			can, err := a.dev.CanAccessPeer(b.dev)
			if err != nil {
				return nil, failure("open", a.space, code(err), "peer access to "+b.space.String())
			}
			if can == 0 {
				continue
			}
			err = a.enter()
			if err == nil {
				err = b.ctx.EnablePeerAccess(0)
			}
			a.leave()
			switch c := code(err); c {
			case success, alreadyEnabled:
				reach[i][j] = true
			case tooManyPeers:
				m.o.Log.Warn("peer access refused: too many peers", "src", a.space.String(), "dst", b.space.String())
			default:
				return nil, failure("open", a.space, c, "peer access to "+b.space.String())
			}
		}
	}
	for j, b := range m.gpus {
		for i, a := range m.gpus {
			if reach[i][j] {
				b.allow(a)
			}
		}
	}
	return reach, nil
}

// Topology implements device.Machine.
func (m *Machine) Topology() *device.Topology { return m.topo }

// Capabilities implements device.Machine.
func (m *Machine) Capabilities() device.Capabilities {
	return device.Capabilities{KeepsData: true, Timed: true, CopyErrorsLoseDevice: true}
}

// DriverVersion returns the CUDA version of the driver: 12080 is 12.8.
func (m *Machine) DriverVersion() int { return m.version }

// usable returns an error if the machine cannot do op on a space.
func (m *Machine) usable(op string, space device.Space) error {
	if m.closed.Load() {
		return closedError(op, space, "the machine")
	}
	if space < 0 || int(space) > len(m.gpus) {
		return badArgument(op, space, "unknown memory space; the machine has %d GPUs", len(m.gpus))
	}
	if i, ok := space.GPU(); ok {
		if e := m.gpus[i].lostError(op, ""); e != nil {
			return e
		}
	}
	return nil
}

// anyGPU returns a device through which host memory is pinned: one that is not lost, if
// there is one.
func (m *Machine) anyGPU() *gpu {
	for _, g := range m.gpus {
		if g.lost.Load() == nil {
			return g
		}
	}
	return m.gpus[0]
}

const (
	// closePatience is how long Close waits for running work; heldPatience is how long it
	// waits while a stream waits for a fence that may never be signaled.
	closePatience = 30 * time.Second
	heldPatience  = 300 * time.Millisecond
)

// Close implements device.Machine. It waits for work that can still complete. It fails
// fences that are not signaled, and names the streams that still had work in the error.
func (m *Machine) Close() error {
	m.mu.Lock()
	if m.closed.Load() {
		m.mu.Unlock()
		return closedError("close", device.Host, "the machine")
	}
	m.closed.Store(true)
	m.mu.Unlock()

	var problems []string
	if !m.idle(closePatience) {
		problems = append(problems, m.raiseAll()...)
	}
	m.aborting.Store(true)
	close(m.aborted)
	for _, s := range snapshot(m, m.hosts) {
		s.end()
	}
	m.waits.Lock()
	defer m.waits.Unlock()
	stuck := !m.idle(closePatience)
	for _, s := range snapshot(m, m.streams) {
		if err := s.destroy(); err != nil {
			problems = append(problems, err.Error())
		}
	}
	for _, e := range snapshot(m, m.events) {
		if err := e.Close(); err != nil {
			problems = append(problems, err.Error())
		}
	}
	for _, f := range snapshot(m, m.fences) {
		if err := f.Close(); err != nil {
			problems = append(problems, err.Error())
		}
	}
	for _, mem := range slices.Concat(m.memory.all(), snapshot(m, m.suspended)) {
		problems = append(problems, fmt.Sprintf("memory %q (%d bytes on %s) was not freed", mem.label, mem.bytes, mem.space))
		if err := mem.Free(); err != nil {
			problems = append(problems, err.Error())
		}
	}
	if stuck {
		problems = append(problems, fmt.Sprintf("work was still running %v after the end", closePatience))
	}
	if err := m.release(); err != nil {
		problems = append(problems, err.Error())
	}
	if len(problems) > 0 {
		return &device.Error{Op: "close", Space: device.Host, Err: errors.New(strings.Join(problems, "; "))}
	}
	return nil
}

// release frees the counters and closes the GPUs, once nothing runs any more.
func (m *Machine) release() error {
	err := m.words.close(m.anyGPU())
	for _, g := range m.gpus {
		err = errors.Join(err, g.close())
	}
	return err
}

// idle waits until no stream has work. It returns false after patience, or after
// heldPatience during which some stream always waited for a fence.
func (m *Machine) idle(patience time.Duration) bool {
	begin, held := time.Now(), time.Time{}
	for {
		busy := len(m.busy()) > 0
		if !busy {
			return true
		}
		now := time.Now()
		switch {
		case !m.fenced():
			held = time.Time{}
		case held.IsZero():
			held = now
		}
		if now.Sub(begin) > patience || !held.IsZero() && now.Sub(held) > heldPatience {
			return false
		}
		time.Sleep(pause)
	}
}

// snapshot returns a copy of one of the machine's sets, so that its members are used
// without holding the lock.
func snapshot[T comparable](m *Machine, set map[T]struct{}) []T {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Keys(set))
}

// busy lists the streams that have work.
func (m *Machine) busy() []device.Stream {
	var busy []device.Stream
	for _, s := range snapshot(m, m.streams) {
		if done, err := s.idle(); !done && err == nil {
			busy = append(busy, s)
		}
	}
	for _, s := range snapshot(m, m.hosts) {
		if !s.idle() {
			busy = append(busy, s)
		}
	}
	return busy
}

// fenced reports whether a stream waits for a fence value that is not signaled.
func (m *Machine) fenced() bool {
	return slices.ContainsFunc(snapshot(m, m.fences), func(f *fence) bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.awaits.behind(f.word.value.Load())
	})
}

// raiseAll fails every fence value that a stream waits for, which ends the waits. It
// returns a description of those fences and of the streams that had work.
// ---
func (m *Machine) raiseAll() []string {
	var problems []string
	for _, s := range m.busy() {
		problems = append(problems, fmt.Sprintf("closed while stream %q (%s) has work", s.Name(), s.Space()))
	}
	for _, f := range snapshot(m, m.fences) {
		f.mu.Lock()
		if now := f.word.value.Load(); f.awaits.behind(now) {
			problems = append(problems, fmt.Sprintf("a stream waits for %s to reach %d, and it is at %d", f, f.awaits.value, now))
			f.condemn(f.awaits.value, closedError("wait", device.Host, "the machine"))
			f.set(f.awaits.value)
		}
		f.mu.Unlock()
	}
	slices.Sort(problems)
	return problems
}

func fmtWait(what string, ctx context.Context) error {
	return fmt.Errorf("cuda: %s: %w", what, ctx.Err())
}
