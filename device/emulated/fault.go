package emulated

import (
	"fmt"
	"time"

	"github.com/moeserve/moeserve/device"
)

// FaultKind is the effect of a fault.
type FaultKind int

const (
	// RefuseAlloc fails an allocation with ErrOutOfMemory.
	RefuseAlloc FaultKind = iota
	// FailCopy fails a copy with ErrCopyFailed; the copy moves nothing.
	FailCopy
	// StallCopy delays a copy by Fault.For, or until Fault.Release.
	StallCopy
)

func (k FaultKind) String() string {
	switch k {
	case RefuseAlloc:
		return "refuse alloc"
	case FailCopy:
		return "fail copy"
	case StallCopy:
		return "stall copy"
	}
	return fmt.Sprintf("FaultKind(%d)", int(k))
}

// Point is a point where a fault may apply: an allocation (Space, Label, Bytes) or a copy
// that is about to start (Stream, Src, Dst, Bytes).
type Point struct {
	Kind     FaultKind
	Space    device.Space
	Label    string
	Stream   string
	Src, Dst device.Range
	// From and To are the memory spaces of Src and Dst.
	From, To device.Space
	Bytes    int64
}

// Fault describes failures to inject. Its exported fields are set before Inject and not
// changed after.
type Fault struct {
	Kind FaultKind
	// Match selects the points that count; it must not call the machine. Default: every
	// point of the kind.
	Match func(Point) bool
	// Skip is the number of matching points that pass before the fault applies. Default: 0.
	Skip int
	// Times is the number of matching points that the fault applies to. Default: 1; -1 is
	// all.
	Times int
	// Chance is the probability with which the fault applies to a matching point, drawn
	// from the machine's seed. Default: always.
	Chance float64
	// For is the duration for which a copy is stalled, on the machine's clock. Default:
	// until Release.
	For time.Duration
	// Err replaces the sentinel that the failure wraps.
	Err error

	m            *Machine
	passed, hits int
	released     bool
}

// Inject arms the fault and returns it.
func (m *Machine) Inject(f *Fault) *Fault {
	m.mu.Lock()
	defer m.mu.Unlock()
	if f.m != nil {
		panic("emulated: the same Fault is injected twice")
	}
	f.m = m
	if f.Times == 0 {
		f.Times = 1
	}
	m.faults = append(m.faults, f)
	return f
}

// Hits returns the number of times the fault applied.
func (f *Fault) Hits() int {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	return f.hits
}

// Release disarms the fault and resumes the copies that it stalled.
func (f *Fault) Release() {
	m := f.m
	m.mu.Lock()
	defer m.mu.Unlock()
	f.released = true
	for i, g := range m.faults {
		if g == f {
			m.faults = append(m.faults[:i], m.faults[i+1:]...)
			break
		}
	}
	for _, s := range m.streams {
		if s.stalled == f {
			s.wake()
		}
	}
	m.called()
}

// cause returns the error that the failure wraps.
func (f *Fault) cause(sentinel error) error {
	if f.Err != nil {
		return f.Err
	}
	return sentinel
}

// fault returns the fault that applies at p, or nil.
func (m *Machine) fault(p Point) *Fault {
	for _, f := range m.faults {
		if f.Kind != p.Kind || f.Match != nil && !f.Match(p) {
			continue
		}
		if f.Times >= 0 && f.hits >= f.Times {
			continue
		}
		if f.passed < f.Skip {
			f.passed++
			continue
		}
		if f.Chance > 0 && m.rng.Float64() >= f.Chance {
			continue
		}
		f.hits++
		return f
	}
	return nil
}

// Lose makes GPU i fail permanently: all operations on it, copies from and to its memory, and
// Work of other GPUs that accesses its memory, fail with device.ErrLost. Its Memory objects can still be freed.
func (m *Machine) Lose(i int) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	sp, err := m.space("lose", device.HBM(i))
	if err != nil {
		return err
	}
	sp.lost = true
	m.anyLost.Store(true)
	for _, s := range m.streams {
		if s.sp == sp {
			s.wake()
		}
	}
	m.called()
	return nil
}

// Occupy emulates another process that allocates bytes of a space, as seen by Usage and
// Alloc. As on a GPU, it is refused more than is free, with device.ErrOutOfMemory.
// Negative bytes release.
func (m *Machine) Occupy(s device.Space, bytes int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	sp, err := m.space("occupy", s)
	if err != nil {
		return err
	}
	if sp.usage.OtherProcesses+bytes < 0 {
		return &device.Error{Op: "occupy", Space: s, Detail: fmt.Sprintf("%d bytes released, but other processes hold %d", -bytes, sp.usage.OtherProcesses)}
	}
	if free := max(sp.usage.Free(), 0); bytes > free {
		return &device.Error{
			Op: "occupy", Space: s, Err: device.ErrOutOfMemory,
			Detail: fmt.Sprintf("%d bytes requested by another process, %d free of %d", bytes, free, sp.usage.Capacity),
		}
	}
	sp.usage.OtherProcesses += bytes
	return nil
}

// Limit lowers the capacity of a space, as seen by Usage and Alloc; the topology is
// unchanged. A limit above the capacity changes nothing; a limit below the bytes allocated
// is an error.
func (m *Machine) Limit(s device.Space, bytes int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	sp, err := m.space("limit", s)
	if err != nil {
		return err
	}
	if bytes < sp.usage.Allocated {
		return &device.Error{Op: "limit", Space: s, Detail: fmt.Sprintf("to %d bytes, and %d are allocated", bytes, sp.usage.Allocated)}
	}
	sp.usage.Capacity = min(sp.usage.Capacity, bytes)
	return nil
}
