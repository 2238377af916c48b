//go:build cuda

package cuda

import (
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sleeper is where one thread sleeps until another wakes it. The thread sleeps in the kernel, not
// in Go's scheduler: to wake a goroutine that is locked to its thread, that first wakes another
// thread, which hands over its processor and wakes the right one.
type sleeper struct {
	// asleep is 1 from lie until wake.
	asleep atomic.Uint32
}

const (
	futexWait = 0x80 // FUTEX_WAIT, FUTEX_WAKE | FUTEX_PRIVATE_FLAG
	futexWake = 0x81
)

// lie announces sleep: wake from then on is not lost.
func (s *sleeper) lie() { s.asleep.Store(1) }

// sleep returns after wake, or after d unless that is 0.
func (s *sleeper) sleep(d time.Duration) {
	var timeout *unix.Timespec
	if d > 0 {
		t := unix.NsecToTimespec(int64(d))
		timeout = &t
	}
	for s.asleep.Load() == 1 {
		_, _, e := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&s.asleep)), futexWait, 1, uintptr(unsafe.Pointer(timeout)), 0, 0)
		if e == unix.ETIMEDOUT {
			s.asleep.Store(0)
		}
	}
}

// wake ends sleep.
func (s *sleeper) wake() {
	if s.asleep.Load() == 1 && s.asleep.CompareAndSwap(1, 0) {
		_, _, _ = unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&s.asleep)), futexWake, 1, 0, 0, 0)
	}
}
