package emulated

import (
	"context"
	"slices"
	"sync"
	"time"
)

// loops holds the loops of a virtual clock, in the order in which they were started.
type loops struct {
	mu sync.Mutex
	// all is replaced, never changed in place: Turn iterates over it without the lock.
	all []*loop
}

type loop struct {
	mu   sync.Mutex // held while f runs
	f    func(now time.Duration) time.Duration
	over bool
}

func (x *loops) add(l *loop) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.all = append(slices.Clip(x.all), l)
}

func (x *loops) remove(l *loop) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.all = slices.DeleteFunc(slices.Clone(x.all), func(o *loop) bool { return o == l })
}

func (x *loops) snapshot() []*loop {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.all
}

// turn calls f, and reports whether the loop continues.
func (l *loop) turn(now time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = l.over || l.f(now) < 0
	return !l.over
}

// Loop implements device.Clock.
func (m *Machine) Loop(pause time.Duration, f func(now time.Duration) time.Duration) (stop func()) {
	if !m.o.Virtual {
		return m.wall.Loop(pause, f)
	}
	l := &loop{f: f}
	m.turns.add(l)
	return func() {
		l.mu.Lock()
		l.over = true
		l.mu.Unlock()
		m.turns.remove(l)
	}
}

// Turn implements device.Clock.
func (m *Machine) Turn() {
	for _, l := range m.turns.snapshot() {
		if !l.turn(m.Now()) {
			m.turns.remove(l)
		}
	}
}

// Yield implements device.Clock.
func (m *Machine) Yield(ctx context.Context, d time.Duration) error {
	if m.o.Virtual {
		m.mu.Lock()
		self := goroutine()
		went := (m.driver == 0 || m.driver == self) && m.drive(self)
		m.mu.Unlock()
		if went {
			return ctx.Err()
		}
	}
	return m.wall.Yield(ctx, d)
}
