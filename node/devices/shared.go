package devices

import (
	"errors"
	"sync"

	"github.com/moeserve/moeserve/device"
)

// Shared is a machine that several Devices use, one after the other or at the same time, so that
// there is one account of its memory. The first of them opens it, and the last closes it. Each has a
// backend of its own. The zero Shared is ready to use.
type Shared struct {
	mu      sync.Mutex
	machine device.Machine
	users   int
}

// open returns the machine, which open makes if nobody uses it. A nil Shared shares nothing.
func (s *Shared) open(open func() (device.Machine, error)) (device.Machine, error) {
	if s == nil {
		return open()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users == 0 {
		m, err := open()
		if err != nil {
			return nil, err
		}
		s.machine = m
	}
	s.users++
	return s.machine, nil
}

// close closes a machine that open has returned, unless others use it.
func (s *Shared) close(m device.Machine) error {
	if s == nil {
		return m.Close()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users--; s.users > 0 {
		return nil
	}
	s.machine = nil
	return m.Close()
}

// errSharedTrace: a trace has the streams of one machine's one user.
var errSharedTrace = errors.New("--trace records one model; leave it out, or serve one model")
