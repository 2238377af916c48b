package kernelstest

import (
	"bytes"
	"sync"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// recorder is a stream that runs Go work and records what operations declare, at enqueue
// and while they run.
type recorder struct {
	device.Executor
	mu            sync.Mutex
	reads, writes []device.Range
}

// Execute implements device.Executor.
func (s *recorder) Execute(w device.Work) error {
	s.mu.Lock()
	s.reads, s.writes = append(s.reads, w.Reads...), append(s.writes, w.Writes...)
	s.mu.Unlock()
	run := w.Run
	w.Run = func(a device.Access) error { return run(recordedAccess{a, s}) }
	return s.Executor.Execute(w)
}

type recordedAccess struct {
	device.Access
	s *recorder
}

func (a recordedAccess) Read(r device.Range) {
	a.s.mu.Lock()
	a.s.reads = append(a.s.reads, r)
	a.s.mu.Unlock()
	a.Access.Read(r)
}

func (a recordedAccess) Write(r device.Range) {
	a.s.mu.Lock()
	a.s.writes = append(a.s.writes, r)
	a.s.mu.Unlock()
	a.Access.Write(r)
}

// declared compares the declarations of operations with the required accesses: they write
// every byte of an output and no other byte; they read all bytes that were set (if all is
// true) and no other byte.
func (s *recorder) declared(r *rig, all bool) {
	r.Helper()
	s.mu.Lock()
	reads, writes := s.reads, s.writes
	s.reads, s.writes = nil, nil
	s.mu.Unlock()
	for _, b := range r.buffers {
		read, written := b.covered(reads), b.covered(writes)
		out := b.out
		if out == nil {
			out = make([]byte, len(b.before))
		}
		if !bytes.Equal(written, out) {
			for i := range out {
				if written[i] != out[i] {
					r.Fatalf("byte %d of %s: declared as written: %v, an output: %v", i-guard, b.name, written[i] == 1, out[i] == 1)
				}
			}
		}
		if all && !b.partly {
			for i, set := range b.before {
				if read[i] == 0 && out[i] == 0 && set != poison {
					r.Fatalf("byte %d of %s is not declared as read", i-guard, b.name)
				}
			}
		}
		if b.dtype == kernels.I32 {
			continue // -1 is a value
		}
		unset := bytes.Repeat([]byte{poison}, 8)
		for _, v := range reads {
			if from, to, ok := b.within(v); ok && b.out == nil && bytes.Contains(b.before[from:to], unset) {
				r.Fatalf("bytes %d to %d of %s are declared as read and are not all set", from-guard, to-guard, b.name)
			}
		}
	}
}

// within returns the range's position in the buffer; ok is false if the range is outside
// the buffer.
func (b *buffer) within(v device.Range) (from, to int, ok bool) {
	whole := b.device.Range(0, int64(len(b.before)))
	if v.Bytes == 0 || v.End() <= whole.Addr || v.Addr >= whole.End() {
		return 0, 0, false
	}
	from = int(max(v.Addr, whole.Addr) - whole.Addr)
	return from, int(min(v.End(), whole.End()) - whole.Addr), true
}

// covered returns 1 for each byte of the buffer inside one of the ranges, else 0.
func (b *buffer) covered(ranges []device.Range) []byte {
	c := make([]byte, len(b.before))
	for _, v := range ranges {
		if from, to, ok := b.within(v); ok {
			fill(c[from:to], 1)
		}
	}
	return c
}
