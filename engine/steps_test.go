package engine_test

import (
	"sync"
	"time"
)

// steps counts an engine's steps, for what is to happen behind some of them.
type steps struct {
	mu    sync.Mutex
	n     int
	calls map[int][]func()
}

// step says that a step has ended.
func (s *steps) step() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n++
	for _, f := range s.calls[s.n] {
		f()
	}
	delete(s.calls, s.n)
}

// call calls f once n more steps have ended: at once where n is 0.
func (s *steps) call(n int, f func()) {
	if n == 0 {
		f()
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.calls == nil {
		s.calls = map[int][]func(){}
	}
	s.calls[s.n+n] = append(s.calls[s.n+n], f)
}

// await waits in a bubble of synctest until n more steps have ended, or nothing runs that
// could bring them: only then time passes there.
func (s *steps) await(n int) {
	ended := make(chan struct{})
	s.call(n, func() { close(ended) })
	select {
	case <-ended:
	case <-time.After(time.Millisecond):
	}
}
