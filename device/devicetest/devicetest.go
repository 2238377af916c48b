package devicetest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
)

// patience bounds every wait; no implementation needs it.
const patience = time.Minute

// suite is one machine under test.
type suite struct {
	*testing.T
	m   device.Machine
	ctx context.Context
}

// Run runs the suite; open makes a fresh machine for each part, with at least one
// GPU and 64 MiB free in each space. Run closes it.
func Run(t *testing.T, open func(t *testing.T) device.Machine) {
	for _, part := range []struct {
		name string
		gpus int
		run  func(*suite)
	}{
		{"Topology", 1, topology},
		{"Clock", 1, clock},
		{"Memory", 1, memory},
		{"OutOfMemory", 1, outOfMemory},
		{"Suspend", 1, suspend},
		{"KernelAddr", 1, kernelAddr},
		{"CopyAllPairs", 1, copyAllPairs},
		{"CopyArguments", 1, copyArguments},
		{"Batches", 1, batches},
		{"StreamOrder", 1, streamOrder},
		{"EventOrder", 1, eventOrder},
		{"EventStates", 1, eventStates},
		{"UntimedEvents", 1, untimedEvents},
		{"FenceOrder", 1, fenceOrder},
		{"FenceWraps", 1, fenceWraps},
		{"FenceFail", 1, fenceFail},
		{"HostStream", 1, hostStream},
		{"HostWork", 1, hostWork},
		{"Watch", 1, watches},
		{"WatchOutOfOrder", 1, watchesOutOfOrder},
		{"WatchFails", 1, watchesFail},
		{"WatchEnds", 1, watchesEnd},
		{"WatchesDue", 1, watchesDue},
		{"Helps", 1, helps},
		{"Errors", 1, streamErrors},
		{"SignalWaitedFence", 1, signalWaitedFence},
		{"RecordOnAnotherStream", 1, recordOnAnotherStream},
		{"Capture", 1, capture},
		{"Context", 1, contexts},
		{"Closed", 1, closed},
		{"Concurrent", 1, concurrent},
		{"RandomCopies", 1, randomCopies},
		{"ForwardingRing", 2, forwardingRing},
	} {
		t.Run(part.name, func(t *testing.T) {
			m := open(t)
			t.Cleanup(func() {
				if err := m.Close(); err != nil {
					t.Errorf("Close: %v", err)
				}
			})
			if n := len(m.Topology().GPUs); n < part.gpus {
				t.Skipf("needs %d GPUs, and the machine has %d", part.gpus, n)
			}
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			t.Cleanup(cancel)
			part.run(&suite{T: t, m: m, ctx: ctx})
		})
	}
	t.Run("Leak", func(t *testing.T) { leak(t, open(t)) })
	t.Run("CloseOverPending", func(t *testing.T) { closeOverPending(t, open(t)) })
}

func (s *suite) ok(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// wants fails unless err wraps target and, if op is not empty, is a *device.Error
// of that operation.
func (s *suite) wants(err error, op string, target error) {
	s.Helper()
	var e *device.Error
	switch {
	case err == nil:
		s.Fatalf("no error; want %s: %v", op, target)
	case target != nil && !errors.Is(err, target):
		s.Fatalf("error %q does not wrap %q", err, target)
	case op != "" && !errors.As(err, &e):
		s.Fatalf("error %q is no *device.Error", err)
	case op != "" && e.Op != op:
		s.Fatalf("error %q has Op %q, want %q", err, e.Op, op)
	}
}

func (s *suite) alloc(space device.Space, n int64) device.Memory {
	s.Helper()
	mem, err := s.m.Alloc(space, n, s.Name())
	s.ok(err)
	s.Cleanup(func() {
		if err := mem.Free(); err != nil {
			s.Errorf("Free: %v", err)
		}
	})
	return mem
}

func (s *suite) stream(space device.Space, name string) device.Stream {
	s.Helper()
	st, err := s.m.NewStream(space, device.StreamOptions{Name: name})
	s.ok(err)
	return st
}

func (s *suite) hostStream(name string) device.Executor {
	s.Helper()
	e, ok := s.stream(device.Host, name).(device.Executor)
	if !ok {
		s.Fatal("a host stream is no device.Executor")
	}
	return e
}

func (s *suite) event() device.Event {
	s.Helper()
	e, err := s.m.NewEvent()
	s.ok(err)
	return e
}

func (s *suite) fence() device.Fence {
	s.Helper()
	f, err := s.m.NewFence(s.Name())
	s.ok(err)
	// The suite counts from 0. One step is less than half of the range.
	for v := f.Value(); v != 0; {
		v += min(-v, 1<<31-1)
		s.ok(f.Signal(v))
	}
	return f
}

func whole(m device.Memory) device.Range { return m.Range(0, m.Bytes()) }

// filled is host memory with random bytes.
func (s *suite) filled(n int64, seed uint64) device.Memory {
	s.Helper()
	mem := s.alloc(device.Host, n)
	fill(mem.Write(0, n), seed)
	return mem
}

func fill(b []byte, seed uint64) {
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16)})
	if _, err := r.Read(b); err != nil {
		panic(err)
	}
}

func pattern(n int64, seed uint64) []byte {
	b := make([]byte, n)
	fill(b, seed)
	return b
}

// load brings bytes into memory of any space, and returns when they are there.
func (s *suite) load(dst device.Memory, data []byte) {
	s.Helper()
	staging := s.alloc(device.Host, int64(len(data)))
	copy(staging.Write(0, staging.Bytes()), data)
	st := s.stream(dst.Space(), "load")
	s.ok(st.Copy(dst.Range(0, int64(len(data))), whole(staging)))
	s.ok(st.Synchronize(s.ctx))
	s.ok(st.Close())
}

// content returns what memory of any space holds.
func (s *suite) content(src device.Memory) []byte {
	s.Helper()
	staging := s.alloc(device.Host, src.Bytes())
	st := s.stream(src.Space(), "read back")
	s.ok(st.Copy(whole(staging), whole(src)))
	s.ok(st.Synchronize(s.ctx))
	s.ok(st.Close())
	return bytes.Clone(staging.Read(0, staging.Bytes()))
}

func (s *suite) same(what string, got, want []byte) {
	s.Helper()
	if bytes.Equal(got, want) {
		return
	}
	for i := range want {
		if got[i] != want[i] {
			s.Fatalf("%s: byte %d of %d is %#x, want %#x", what, i, len(want), got[i], want[i])
		}
	}
}

// reachable says whether a copy between two spaces is possible.
func (s *suite) reachable(from, to device.Space) bool {
	_, err := s.m.Topology().Path(from, to)
	return from == to || err == nil
}

func (s *suite) panics(what string, f func()) {
	s.Helper()
	defer func() {
		s.Helper()
		if recover() == nil {
			s.Errorf("%s does not panic", what)
		}
	}()
	f()
}

func topology(s *suite) {
	t := s.m.Topology()
	if len(t.GPUs) == 0 {
		s.Fatal("a machine without a GPU")
	}
	for _, sp := range t.Spaces() {
		i, ok := t.Info(sp)
		if !ok || i.MemoryBytes <= 0 {
			s.Errorf("%s: %d bytes of memory", sp, i.MemoryBytes)
		}
		u, err := s.m.Usage(sp)
		s.ok(err)
		if u.Capacity <= 0 || u.Capacity > i.MemoryBytes {
			s.Errorf("%s: capacity %d of %d bytes of memory", sp, u.Capacity, i.MemoryBytes)
		}
		if sp == device.Host {
			continue
		}
		for _, pair := range []device.Pair{{From: device.Host, To: sp}, {From: sp, To: device.Host}} {
			p, err := t.Path(pair.From, pair.To)
			s.ok(err)
			for _, l := range p.Links {
				if l < 0 || l >= len(t.Links) {
					s.Errorf("path %v uses link %d of %d", pair, l, len(t.Links))
				}
			}
		}
	}
	if _, ok := t.Info(device.HBM(len(t.GPUs))); ok {
		s.Error("there is a GPU behind the last")
	}
	if a, b := s.m.Capabilities(), s.m.Capabilities(); a != b || !a.KeepsData {
		s.Errorf("capabilities %+v, and then %+v; the suite needs data", a, b)
	}
}

func clock(s *suite) {
	if a, b := s.m.Now(), s.m.Now(); a < 0 || b < a {
		s.Errorf("time runs from %v to %v", a, b)
	}
	// turns goes on until ok, and for some rounds more.
	turns := func(ok func() bool) {
		s.Helper()
		for more := 3; more > 0; {
			s.m.Turn()
			if err := s.m.Yield(s.ctx, 100*time.Microsecond); err != nil {
				s.Fatal(err)
			}
			if ok() {
				more--
			}
		}
	}
	var short, long atomic.Int64
	last := s.m.Now()
	end := s.m.Loop(0, func(now time.Duration) time.Duration {
		if now < last {
			s.Errorf("a loop read the time %v after %v", now, last)
		}
		last = now
		if short.Add(1) == 3 {
			return -1
		}
		return time.Microsecond
	})
	stop := s.m.Loop(0, func(time.Duration) time.Duration {
		long.Add(1)
		return 0
	})
	turns(func() bool { return long.Load() > 5 && short.Load() >= 3 })
	stop()
	before := long.Load()
	turns(func() bool { return true })
	if short.Load() != 3 || long.Load() != before {
		s.Errorf("a loop that ended after 3 calls has had %d, one that was stopped after %d has had %d", short.Load(), before, long.Load())
	}
	end() // that has ended
	stop()

	// Yield is all that is needed for work to go on.
	host := s.hostStream("yield")
	var ran atomic.Bool
	s.ok(host.Execute(device.Work{Name: "run", Host: true, Run: func(device.Access) error { ran.Store(true); return nil }}))
	for !ran.Load() {
		s.ok(s.m.Yield(s.ctx, 10*time.Microsecond))
	}
	s.ok(host.Synchronize(s.ctx))
	done, cancel := context.WithCancel(s.ctx)
	cancel()
	if err := s.m.Yield(done, time.Hour); !errors.Is(err, context.Canceled) {
		s.Errorf("a Yield whose context is done returns %v", err)
	}
	s.ok(host.Close())
}

func memory(s *suite) {
	for _, sp := range s.m.Topology().Spaces() {
		before, err := s.m.Usage(sp)
		s.ok(err)
		var mems []device.Memory
		total := int64(0)
		for _, n := range []int64{1, 255, 4097, 1 << 20} {
			mem, err := s.m.Alloc(sp, n, "odd")
			s.ok(err)
			mems = append(mems, mem)
			total += n
			r := whole(mem)
			if mem.Space() != sp || mem.Bytes() != n || r.Bytes != n {
				s.Errorf("requested for %d bytes on %s, got %d on %s", n, sp, mem.Bytes(), mem.Space())
			}
			if r.Addr == 0 || r.Addr%device.Alignment != 0 {
				s.Errorf("address %#x is not aligned to %d", r.Addr, device.Alignment)
			}
			for _, other := range mems[:len(mems)-1] {
				if o := whole(other); o.Addr < r.End() && r.Addr < o.End() {
					s.Errorf("allocations %v and %v overlap", o, r)
				}
			}
			s.panics("Range outside", func() { mem.Range(0, n+1) })
			s.panics("Range before", func() { mem.Range(-1, 1) })
			s.panics("Region outside", func() { mem.Region(1, n) })
			if got, want := mem.Region(n-1, 1), (device.Region{Space: sp, Range: r.Slice(n-1, 1)}); got != want {
				s.Errorf("the last byte is %v, want %v", got, want)
			}
			for _, a := range []device.Addr{r.Addr, r.End() - 1} {
				if got, ok := s.m.SpaceOf(a); !ok || got != sp {
					s.Errorf("%#x of %s lies on %s, %v", a, sp, got, ok)
				}
			}
			if n := testing.AllocsPerRun(10, func() { s.m.SpaceOf(r.Addr) }); n > 0 {
				s.Errorf("SpaceOf allocates %v times", n)
			}
			if sp == device.Host {
				if got := len(mem.Write(0, n)); got != int(n) {
					s.Errorf("Write of %d bytes gives %d", n, got)
				}
				if got := len(mem.Read(n-1, 1)); got != 1 {
					s.Errorf("Read of 1 byte gives %d", got)
				}
				s.panics("Read outside", func() { mem.Read(1, n) })
			} else {
				s.panics("Read of GPU memory", func() { mem.Read(0, n) })
				s.panics("Write of GPU memory", func() { mem.Write(0, n) })
			}
		}
		held, err := s.m.Usage(sp)
		s.ok(err)
		if held.Allocated < before.Allocated+total || held.Peak < held.Allocated {
			s.Errorf("%s: %+v, and then %d bytes more: %+v", sp, before, total, held)
		}
		for _, mem := range mems {
			freed := whole(mem).Addr
			s.ok(mem.Free())
			s.wants(mem.Free(), "free", device.ErrClosed)
			if sp, ok := s.m.SpaceOf(freed); ok {
				s.Errorf("the address of freed memory lies on %s", sp)
			}
		}
		after, err := s.m.Usage(sp)
		s.ok(err)
		if after.Allocated != before.Allocated || after.Peak < held.Allocated {
			s.Errorf("%s: everything freed: %+v, and before: %+v", sp, after, before)
		}
		for _, n := range []int64{0, -1} {
			_, err := s.m.Alloc(sp, n, "empty")
			s.wants(err, "alloc", nil)
		}
	}
	if sp, ok := s.m.SpaceOf(0); ok {
		s.Errorf("no address lies on %s", sp)
	}
	nowhere := device.HBM(len(s.m.Topology().GPUs))
	_, err := s.m.Alloc(nowhere, 1, "nowhere")
	s.wants(err, "", nil)
	_, err = s.m.Usage(nowhere)
	s.wants(err, "", nil)
	_, err = s.m.NewStream(nowhere, device.StreamOptions{})
	s.wants(err, "", nil)
}

func outOfMemory(s *suite) {
	sp := device.HBM(0)
	u, err := s.m.Usage(sp)
	s.ok(err)
	requested := u.Capacity + 1
	_, err = s.m.Alloc(sp, requested, "too large")
	s.wants(err, "alloc", device.ErrOutOfMemory)
	for _, want := range []string{"too large", fmt.Sprint(requested)} {
		if !strings.Contains(err.Error(), want) {
			s.Errorf("%q does not say %q", err, want)
		}
	}
	after, err := s.m.Usage(sp)
	s.ok(err)
	if after.Allocated != u.Allocated {
		s.Errorf("a refused allocation is accounted: %+v", after)
	}
}

// kernelAddr: kernels of every GPU read their own memory at its address, and other memory at an
// address that grows with the range's, or the error says that they cannot.
func kernelAddr(s *suite) {
	for i := range s.m.Topology().GPUs {
		for _, sp := range s.m.Topology().Spaces() {
			const n = 8 << 20 // of host memory that is not the driver's own
			mem := s.alloc(sp, n)
			reader := device.HBM(i)
			first, err := s.m.KernelAddr(reader, mem.Range(0, n))
			if sp != reader && errors.Is(err, device.ErrUnreachable) {
				s.Logf("kernels of %s cannot read %s: %v", reader, sp, err)
				continue
			}
			s.ok(err)
			if sp == reader && first != mem.Range(0, n).Addr {
				s.Errorf("%s reads its own memory at %#x, which is at %#x", reader, first, mem.Range(0, n).Addr)
			}
			last, err := s.m.KernelAddr(reader, mem.Range(n-256, 256))
			s.ok(err)
			if last != first+n-256 {
				s.Errorf("%s reads %s from %#x, and its last 256 bytes at %#x", reader, sp, first, last)
			}
			s.ok(mem.Suspend())
			_, err = s.m.KernelAddr(reader, mem.Range(0, n))
			s.wants(err, "map", nil)
			s.ok(mem.Resume())
		}
		_, err := s.m.KernelAddr(device.HBM(i), device.Range{Addr: 256, Bytes: 256})
		s.wants(err, "map", nil)
	}
	mem := s.alloc(device.HBM(0), 256)
	_, err := s.m.KernelAddr(device.Host, mem.Range(0, 256))
	s.wants(err, "map", nil)
}

// suspend: memory that is suspended belongs to others, and has its addresses again when resumed.
func suspend(s *suite) {
	const size = 8 << 20 // of host memory that is not the driver's own
	for _, sp := range s.m.Topology().Spaces() {
		before, err := s.m.Usage(sp)
		s.ok(err)
		mem, err := s.m.Alloc(sp, size, "suspended")
		s.ok(err)
		addr := whole(mem).Addr
		held, err := s.m.Usage(sp)
		s.ok(err)
		for range 2 {
			s.ok(mem.Suspend())
			u, err := s.m.Usage(sp)
			s.ok(err)
			if u.Allocated != before.Allocated {
				s.Errorf("%s: %d bytes are allocated while memory is suspended, and %d before its allocation", sp, u.Allocated, before.Allocated)
			}
			if sp, ok := s.m.SpaceOf(addr); ok {
				s.Errorf("the address of suspended memory lies on %s", sp)
			}
			other, err := s.m.Alloc(sp, size, "another")
			s.ok(err)
			if o := whole(other); o.Addr < addr+size && addr < o.End() {
				s.Errorf("%v lies in suspended memory at %#x", o, addr)
			}
			s.ok(other.Free())
			s.ok(mem.Suspend()) // nothing happens
			if sp == device.Host {
				s.panics("Write of suspended memory", func() { mem.Write(0, 1) })
			}
			s.ok(mem.Resume())
			s.ok(mem.Resume()) // nothing happens
			if whole(mem).Addr != addr {
				s.Errorf("resumed memory is at %#x, and was at %#x", whole(mem).Addr, addr)
			}
			if u, err = s.m.Usage(sp); err != nil || u.Allocated != held.Allocated {
				s.Errorf("%s: %d bytes are allocated after Resume, and %d before, %v", sp, u.Allocated, held.Allocated, err)
			}
			if s.m.Capabilities().KeepsData {
				s.roundTrip(mem)
			}
		}
		s.ok(mem.Suspend())
		s.ok(mem.Free())
		s.wants(mem.Resume(), "resume", device.ErrClosed)
		s.wants(mem.Suspend(), "suspend", device.ErrClosed)
		if after, err := s.m.Usage(sp); err != nil || after.Allocated != before.Allocated {
			s.Errorf("%s: %d bytes are allocated after Free, and %d before, %v", sp, after.Allocated, before.Allocated, err)
		}
	}
}

// roundTrip writes all of mem, and reads it back.
func (s *suite) roundTrip(mem device.Memory) {
	s.Helper()
	in, err := s.m.Alloc(device.Host, mem.Bytes(), "in")
	s.ok(err)
	out, err := s.m.Alloc(device.Host, mem.Bytes(), "out")
	s.ok(err)
	want := pattern(mem.Bytes(), 7)
	copy(in.Write(0, mem.Bytes()), want)
	st := s.stream(device.HBM(0), "round trip")
	s.ok(st.Copy(whole(mem), whole(in)))
	s.ok(st.Copy(whole(out), whole(mem)))
	s.ok(st.Synchronize(s.ctx))
	s.ok(st.Close())
	if !bytes.Equal(out.Read(0, mem.Bytes()), want) {
		s.Errorf("resumed memory on %s does not keep what is written", mem.Space())
	}
	s.ok(errors.Join(in.Free(), out.Free()))
}

func copyAllPairs(s *suite) {
	const size = 70001
	cuts := []struct{ dst, src, n int64 }{{0, 0, size}, {0, 0, 1}, {1, 2, 3}, {size - 1, 0, 1}, {255, 257, 4097}, {3, 4096, 65537}}
	spaces := s.m.Topology().Spaces()
	for _, from := range spaces {
		for _, to := range spaces {
			if !s.reachable(from, to) {
				continue
			}
			src, dst := s.alloc(from, size), s.alloc(to, size)
			a, want := pattern(size, 1), pattern(size, 2)
			s.load(src, a)
			for _, on := range []device.Space{from, to} {
				st := s.stream(on, "copy")
				s.load(dst, want)
				for _, c := range cuts {
					s.ok(st.Copy(dst.Range(c.dst, c.n), src.Range(c.src, c.n)))
					copy(want[c.dst:c.dst+c.n], a[c.src:])
				}
				s.ok(st.Synchronize(s.ctx))
				s.same(fmt.Sprintf("from %s to %s on %s", from, to, on), s.content(dst), want)
				want = pattern(size, 2)
			}
		}
	}
}

func copyArguments(s *suite) {
	st := s.stream(device.HBM(0), "copy")
	mem, other := s.filled(1000, 1), s.alloc(device.HBM(0), 1000)
	s.wants(st.Copy(mem.Range(0, 10), mem.Range(9, 10)), "copy", nil)
	s.wants(st.Copy(mem.Range(9, 10), mem.Range(0, 10)), "copy", nil)
	s.wants(st.Copy(whole(mem), whole(mem)), "copy", nil)
	s.ok(st.Copy(mem.Range(10, 10), mem.Range(0, 10)))
	s.wants(st.Copy(other.Range(0, 10), mem.Range(0, 11)), "copy", nil)
	s.ok(st.Copy(other.Range(5, 0), mem.Range(5, 0)))
	s.ok(st.Synchronize(s.ctx))
	b := mem.Read(0, 20)
	s.same("copy within one allocation", b[10:], b[:10])
}

func streamOrder(s *suite) {
	const n, rounds = 4096, 200
	st := s.stream(device.HBM(0), "chain")
	src, back := s.filled(n, 3), s.alloc(device.Host, n)
	a, b := s.alloc(device.HBM(0), n), s.alloc(device.HBM(0), n)
	s.ok(st.Copy(whole(a), whole(src)))
	for range rounds {
		// Each copy shifts by one byte, so a copy out of turn shows.
		s.ok(st.Copy(b.Range(0, n-1), a.Range(1, n-1)))
		s.ok(st.Copy(b.Range(n-1, 1), a.Range(0, 1)))
		s.ok(st.Copy(whole(a), whole(b)))
	}
	s.ok(st.Copy(whole(back), whole(a)))
	s.ok(st.Synchronize(s.ctx))
	in := src.Read(0, n)
	want := append(bytes.Clone(in[rounds:]), in[:rounds]...)
	s.same("rotated", back.Read(0, n), want)
}

func eventOrder(s *suite) {
	const n, rounds = 1 << 16, 40
	up, down := s.stream(device.HBM(0), "up"), s.stream(device.HBM(0), "down")
	filled, emptied := s.event(), s.event()
	mem := s.alloc(device.HBM(0), n)
	src, dst := s.alloc(device.Host, n*rounds), s.alloc(device.Host, n*rounds)
	fill(src.Write(0, src.Bytes()), 4)
	for i := range int64(rounds) {
		if i > 0 {
			s.ok(up.Wait(emptied))
		}
		s.ok(up.Copy(whole(mem), src.Range(i*n, n)))
		s.ok(up.Record(filled))
		s.ok(down.Wait(filled))
		s.ok(down.Copy(dst.Range(i*n, n), whole(mem)))
		s.ok(down.Record(emptied))
		// The events are recorded again only when no stream waits for them.
		s.ok(filled.Synchronize(s.ctx))
		if i%8 == 0 {
			s.ok(emptied.Synchronize(s.ctx))
			s.same("so far", dst.Read(0, (i+1)*n), src.Read(0, (i+1)*n))
		}
	}
	s.ok(down.Synchronize(s.ctx))
	s.same("through one buffer", dst.Read(0, dst.Bytes()), src.Read(0, src.Bytes()))
	t1, err := filled.Time()
	s.ok(err)
	t2, err := emptied.Time()
	s.ok(err)
	if now := s.m.Now(); t1 > t2 || t2 > now {
		s.Errorf("filled at %v, emptied at %v, now %v", t1, t2, now)
	}
}

func eventStates(s *suite) {
	st, other := s.stream(device.HBM(0), "a"), s.stream(device.HBM(0), "b")
	e, f := s.event(), s.fence()
	s.wants(st.Wait(e), "", device.ErrNotRecorded)
	s.wants(e.Synchronize(s.ctx), "", device.ErrNotRecorded)
	_, err := e.Query()
	s.wants(err, "", device.ErrNotRecorded)
	_, err = e.Time()
	s.wants(err, "", device.ErrNotRecorded)
	for v := uint32(1); v <= 3; v++ {
		s.ok(st.WaitFence(f, v))
		s.ok(st.Record(e))
		if done, err := e.Query(); done || err != nil {
			s.Fatalf("round %d: the event has passed (%v, %v) before its fence was signaled", v, done, err)
		}
		s.ok(other.Wait(e))
		s.ok(f.Signal(v))
		s.ok(other.Synchronize(s.ctx))
		if done, err := e.Query(); !done || err != nil {
			s.Fatalf("round %d: a stream passed the event, and Query says %v, %v", v, done, err)
		}
		s.ok(e.Synchronize(s.ctx))
	}
	// Query alone gets there.
	s.ok(st.Record(e))
	for begin := time.Now(); ; time.Sleep(10 * time.Microsecond) {
		done, err := e.Query()
		s.ok(err)
		if done {
			break
		}
		if time.Since(begin) > patience {
			s.Fatal("an event that nothing holds back does not pass")
		}
	}
}

// untimedEvents order streams and the host as others do, and have no time.
func untimedEvents(s *suite) {
	e, err := s.m.NewUntimedEvent()
	s.ok(err)
	gpu, host, f := s.stream(device.HBM(0), "gpu"), s.hostStream("host"), s.fence()
	for v := uint32(1); v <= 3; v++ {
		s.ok(gpu.WaitFence(f, v))
		s.ok(gpu.Record(e))
		var ran atomic.Bool
		reached, err := host.(device.Watcher).WatchEvent(e, device.Work{Name: "run", Host: true, Run: func(device.Access) error { ran.Store(true); return nil }})
		s.ok(err)
		s.ok(host.Wait(e))
		if done, err := e.Query(); done || err != nil || reached || ran.Load() {
			s.Fatalf("round %d: the event has passed (%v, %v) before its fence was signaled", v, done, err)
		}
		s.ok(f.Signal(v))
		s.ok(e.Synchronize(s.ctx))
		s.ok(host.Synchronize(s.ctx))
		for begin := time.Now(); !ran.Load(); s.ok(s.m.Yield(s.ctx, 10*time.Microsecond)) {
			if time.Since(begin) > patience {
				s.Fatal("work that watches the event does not run")
			}
		}
		_, err = e.Time()
		s.wants(err, "time", nil)
	}
	s.ok(e.Close())
}

// fenceOrder lets each kind of stream, and the host, signal fences that the others wait for.
func fenceOrder(s *suite) {
	const n = 1 << 15
	gpu, gpu2 := s.stream(device.HBM(0), "gpu"), s.stream(device.HBM(0), "gpu2")
	host, host2 := s.hostStream("host"), s.hostStream("host2")
	mem := s.alloc(device.HBM(0), n)
	back := s.alloc(device.Host, n)
	seed := uint64(0)
	for _, from := range []device.Stream{nil, gpu, host} {
		for _, to := range []device.Stream{nil, gpu2, host2} {
			for _, waitFirst := range []bool{false, true} {
				seed++
				f := s.fence()
				src := s.filled(n, seed)
				write := from
				if write == nil {
					write = gpu
				}
				read := to
				if read == nil {
					read = gpu2
				}
				wait := func() {
					if to == nil {
						return
					}
					s.ok(to.WaitFence(f, 1))
					s.ok(to.Copy(whole(back), whole(mem)))
				}
				if waitFirst {
					wait()
				}
				s.ok(write.Copy(whole(mem), whole(src)))
				if from == nil {
					s.ok(write.Synchronize(s.ctx))
					s.ok(f.Signal(1))
				} else {
					s.ok(from.SignalFence(f, 1))
				}
				if !waitFirst {
					wait()
				}
				if to == nil {
					s.ok(f.Wait(s.ctx, 1))
					s.ok(read.Copy(whole(back), whole(mem)))
				}
				s.ok(read.Synchronize(s.ctx))
				s.same(fmt.Sprintf("case %d", seed), back.Read(0, n), src.Read(0, n))
				if v := f.Value(); v != 1 {
					s.Errorf("case %d: the fence is at %d", seed, v)
				}
				s.ok(write.Synchronize(s.ctx))
				s.ok(f.Close())
			}
		}
	}
}

// capture takes copies down once and runs them again and again, over what lies there then.
func capture(s *suite) {
	const n, rounds = 8192, 20
	busy, ok := s.stream(device.HBM(0), "captured").(device.Capturer)
	if !ok {
		s.Skip("the machine's streams are no device.Capturers")
	}
	other := s.stream(device.HBM(0), "other").(device.Capturer)
	in, out := s.alloc(device.Host, n), s.alloc(device.Host, n)
	a, b := s.alloc(device.HBM(0), n), s.alloc(device.HBM(0), n)
	held, event := s.fence(), s.event()
	copies := func() error {
		for _, c := range [...][2]device.Memory{{a, in}, {b, a}, {out, b}} {
			if err := busy.Copy(whole(c[0]), whole(c[1])); err != nil {
				return err
			}
		}
		return nil
	}
	// Nothing of the captured work runs, whatever this stream and others are running.
	fill(in.Write(0, n), 1)
	clear(out.Write(0, n))
	s.ok(busy.WaitFence(held, 1))
	g, err := busy.Capture(func() error {
		refused := func(op string, err error) {
			if err == nil {
				s.Errorf("%s is captured", op)
			}
		}
		refused("record", busy.Record(event))
		refused("wait", busy.Wait(event))
		refused("signal", busy.SignalFence(held, 2))
		refused("wait for a fence", busy.WaitFence(held, 1))
		refused("a copy within host memory", busy.Copy(whole(out), whole(in)))
		refused("synchronize", busy.Synchronize(s.ctx))
		refused("recover", busy.Recover(s.ctx))
		_, err := busy.Capture(func() error { return nil })
		refused("capture", err)
		return copies()
	})
	s.ok(err)
	if g.Nodes() != 3 {
		s.Errorf("a graph of %d operations, want 3 copies", g.Nodes())
	}
	s.ok(held.Signal(1))
	s.ok(busy.Synchronize(s.ctx))
	s.same("nothing has run", out.Read(0, n), make([]byte, n))
	for i := range uint64(rounds) {
		on := [...]device.Capturer{busy, other}[i%2]
		fill(in.Write(0, n), i)
		s.ok(on.LaunchGraph(g))
		s.ok(on.Synchronize(s.ctx))
		s.same(fmt.Sprintf("launch %d", i), out.Read(0, n), pattern(n, i))
	}
	// In order with what stands before and behind it.
	for i := range uint32(rounds) {
		s.ok(busy.WaitFence(held, i+2))
		s.ok(busy.LaunchGraph(g))
		s.ok(busy.Record(event))
		fill(in.Write(0, n), uint64(rounds+i))
		s.ok(held.Signal(i + 2))
		s.ok(event.Synchronize(s.ctx))
		s.same(fmt.Sprintf("launch %d behind a fence", i), out.Read(0, n), pattern(n, uint64(rounds+i)))
	}
	// What fails leaves the stream as it was.
	cause := errors.New("second thoughts")
	_, err = busy.Capture(func() error { return errors.Join(copies(), cause) })
	s.wants(err, "", cause)
	s.ok(g.Close())
	s.wants(g.Close(), "close", device.ErrClosed)
	s.wants(busy.LaunchGraph(g), "launch", nil)
	s.ok(copies())
	s.ok(busy.Synchronize(s.ctx))
}

func fenceWraps(s *suite) {
	gpu, host := s.stream(device.HBM(0), "gpu"), s.hostStream("host")
	f, seen := s.fence(), s.fence()
	steps := []uint32{1, 0x40000000, 0x80000000, 0xc0000000, 0xffffffff, 0, 1, 7, 0x70000000}
	for i, v := range steps {
		// One value before is reached, one behind is not.
		s.ok(gpu.WaitFence(f, v-1+uint32(i&1)))
		s.ok(gpu.SignalFence(seen, v))
		switch i % 3 {
		case 0:
			s.ok(f.Signal(v))
		case 1:
			s.ok(host.SignalFence(f, v))
		case 2:
			s.ok(host.Execute(device.Work{Name: "before the signal"}))
			s.ok(host.SignalFence(f, v))
		}
		s.ok(f.Wait(s.ctx, v))
		s.ok(f.Wait(s.ctx, v-1))
		s.ok(gpu.Synchronize(s.ctx))
		s.ok(host.Synchronize(s.ctx))
		if f.Value() != v || seen.Value() != v {
			s.Errorf("the fences are at %#x and %#x, want %#x", f.Value(), seen.Value(), v)
		}
		ctx, cancel := context.WithTimeout(s.ctx, 2*time.Millisecond)
		if err := f.Wait(ctx, v+1); !errors.Is(err, context.DeadlineExceeded) {
			s.Errorf("waiting for %#x of a fence at %#x: %v", v+1, v, err)
		}
		cancel()
	}
}

func fenceFail(s *suite) {
	f := s.fence()
	host := s.hostStream("host")
	cause := errors.New("the copy before it failed")
	ran := false
	reported := make(chan error, 2)
	report := device.Work{
		Name: "report", Host: true, Failed: func(err error) { reported <- err },
		Run: func(device.Access) error { reported <- nil; return nil },
	}
	s.ok(host.WaitFence(f, 2))
	s.ok(host.Execute(device.Work{Name: "skipped", Run: func(device.Access) error { ran = true; return nil }}))
	s.ok(host.Execute(report))
	s.ok(f.Signal(1))
	s.ok(f.Wait(s.ctx, 1))
	s.ok(f.Fail(2, cause))
	s.wants(f.Wait(s.ctx, 2), "", cause)
	s.wants(host.Synchronize(s.ctx), "", cause)
	s.wants(host.Recover(s.ctx), "", cause)
	s.ok(host.Synchronize(s.ctx))
	if ran {
		s.Error("work ran behind a fence that failed")
	}
	if err := <-reported; !errors.Is(err, cause) {
		s.Errorf("the work's Failed got %v", err)
	}
	s.ok(host.Execute(report))
	s.ok(host.Synchronize(s.ctx))
	if err := <-reported; err != nil {
		s.Errorf("on a stream that recovered, Failed got %v", err)
	}
	if v := f.Value(); v != 2 {
		s.Errorf("the fence is at %d", v)
	}
	s.ok(f.Signal(3))
	s.ok(host.WaitFence(f, 3))
	s.ok(host.Synchronize(s.ctx))
}

// hostStream runs Go work in order with copies, events and fences.
func hostStream(s *suite) {
	const n, rounds = 8192, 20
	host, gpu := s.hostStream("host"), s.stream(device.HBM(0), "gpu")
	in, out := s.alloc(device.Host, n), s.alloc(device.Host, n)
	mem := s.alloc(device.HBM(0), n)
	ready, f := s.event(), s.fence()
	var bad error
	for i := range uint64(rounds) {
		s.ok(host.Execute(device.Work{
			Name: "produce", Writes: []device.Range{whole(in)},
			Run: func(device.Access) error { fill(in.Write(0, n), i); return nil },
		}))
		s.ok(host.Record(ready))
		s.ok(gpu.Wait(ready))
		s.ok(gpu.Copy(whole(mem), whole(in)))
		s.ok(gpu.SignalFence(f, uint32(i)+1))
		s.ok(host.WaitFence(f, uint32(i)+1))
		s.ok(host.Copy(whole(out), whole(mem)))
		s.ok(host.Execute(device.Work{
			Name: "check",
			Run: func(a device.Access) error {
				a.Read(whole(out))
				if !bytes.Equal(out.Read(0, n), pattern(n, i)) && bad == nil {
					bad = fmt.Errorf("round %d: other bytes came back", i)
				}
				return nil
			},
		}))
		s.ok(ready.Synchronize(s.ctx))
	}
	s.ok(host.Synchronize(s.ctx))
	s.ok(bad)
	s.ok(gpu.Synchronize(s.ctx))
}

// hostWork enqueues from inside of Work, as a host callback that replies to the device does.
func hostWork(s *suite) {
	const n = 4096
	host, gpu := s.hostStream("host"), s.stream(device.HBM(0), "gpu")
	src, mem, back := s.filled(n, 9), s.alloc(device.HBM(0), n), s.alloc(device.Host, n)
	f := s.fence()
	order := make(chan int, 2)
	s.ok(host.Execute(device.Work{Name: "submit", Host: true, Run: func(device.Access) error {
		order <- 1
		if err := gpu.Copy(whole(mem), whole(src)); err != nil {
			return err
		}
		if err := gpu.Copy(whole(back), whole(mem)); err != nil {
			return err
		}
		return gpu.SignalFence(f, 1)
	}}))
	s.ok(host.Execute(device.Work{Name: "second", Host: true, Run: func(device.Access) error { order <- 2; return nil }}))
	s.ok(f.Wait(s.ctx, 1))
	s.same("copied from inside of work", back.Read(0, n), src.Read(0, n))
	s.ok(host.Synchronize(s.ctx))
	if a, b := <-order, <-order; a != 1 || b != 2 {
		s.Errorf("work ran in order %d, %d", a, b)
	}
	s.ok(gpu.Synchronize(s.ctx))
}

func streamErrors(s *suite) {
	host, other := s.hostStream("fails"), s.hostStream("waits")
	e, f := s.event(), s.fence()
	cause := errors.New("a cause")
	ran := 0
	count := device.Work{Name: "count", Run: func(device.Access) error { ran++; return nil }}
	s.ok(host.Execute(count))
	s.ok(host.Execute(device.Work{Name: "unlucky", Run: func(device.Access) error { return cause }}))
	s.ok(host.Execute(count))
	s.ok(host.Record(e))
	s.ok(host.SignalFence(f, 1))
	s.ok(other.Wait(e))
	s.ok(other.Execute(count))
	s.wants(host.Synchronize(s.ctx), "launch", cause)
	if err := host.Synchronize(s.ctx); !strings.Contains(err.Error(), "unlucky") {
		s.Errorf("%q does not name the work", err)
	}
	s.wants(e.Synchronize(s.ctx), "", cause)
	if done, err := e.Query(); !done || !errors.Is(err, cause) {
		s.Errorf("Query: %v, %v", done, err)
	}
	s.wants(f.Wait(s.ctx, 1), "", cause)
	s.wants(other.Synchronize(s.ctx), "", cause)
	s.wants(other.Recover(s.ctx), "", cause)
	s.wants(host.Recover(s.ctx), "launch", cause)
	s.ok(host.Recover(s.ctx))
	if ran != 1 {
		s.Errorf("%d works ran, want the one before the failure", ran)
	}
	s.ok(host.Execute(count))
	s.ok(host.Record(e))
	s.ok(other.Wait(e))
	s.ok(other.Execute(count))
	s.ok(other.Synchronize(s.ctx))
	s.ok(e.Synchronize(s.ctx))
	if ran != 3 {
		s.Errorf("%d works ran after recovery, want 3", ran)
	}
}

// signalWaitedFence: a stream in error signals a fence that it waited for before, and whose
// earlier value is still to come.
func signalWaitedFence(s *suite) {
	st := s.stream(device.HBM(0), "stream")
	bad, f, e := s.fence(), s.fence(), s.event()
	cause := errors.New("a cause")
	s.ok(st.WaitFence(bad, 1))
	s.ok(st.Record(e))
	s.ok(st.WaitFence(f, 1))
	s.ok(bad.Fail(1, cause))
	s.wants(e.Synchronize(s.ctx), "", cause) // now it is known that the stream is in error
	signaled := make(chan error, 1)
	go func() { signaled <- st.SignalFence(f, 2) }()
	select {
	case err := <-signaled:
		s.ok(err)
	case <-s.ctx.Done():
		s.Fatal("SignalFence does not return")
	}
	s.ok(f.Signal(1))
	s.wants(f.Wait(s.ctx, 2), "", cause)
	s.wants(st.Recover(s.ctx), "", cause)
}

// recordOnAnotherStream: an event that no stream waits for is recorded again, on another stream,
// which comes to it before the first does.
func recordOnAnotherStream(s *suite) {
	slow, fast, gpu := s.hostStream("slow"), s.hostStream("fast"), s.stream(device.HBM(0), "gpu")
	a, b, c, e := s.fence(), s.fence(), s.fence(), s.event()
	s.ok(slow.WaitFence(a, 1))
	s.ok(slow.Record(e))
	s.ok(fast.WaitFence(b, 1))
	s.ok(fast.Record(e))
	s.ok(gpu.WaitFence(c, 1))
	s.ok(gpu.Wait(e))
	s.ok(b.Signal(1))
	s.ok(fast.Synchronize(s.ctx))
	s.ok(a.Signal(1))
	s.ok(slow.Synchronize(s.ctx))
	s.ok(c.Signal(1))
	s.ok(gpu.Synchronize(s.ctx))
}

func contexts(s *suite) {
	st := s.stream(device.HBM(0), "held")
	f, e := s.fence(), s.event()
	s.ok(st.WaitFence(f, 1))
	s.ok(st.Record(e))
	for _, wait := range []func(context.Context) error{
		st.Synchronize, st.Recover, e.Synchronize,
		func(ctx context.Context) error { return f.Wait(ctx, 1) },
	} {
		ctx, cancel := context.WithTimeout(s.ctx, 5*time.Millisecond)
		if err := wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
			s.Errorf("a wait that cannot end before its context: %v", err)
		}
		cancel()
	}
	signaled := make(chan error)
	go func() {
		time.Sleep(5 * time.Millisecond)
		signaled <- f.Signal(1)
	}()
	s.ok(st.Synchronize(s.ctx))
	s.ok(<-signaled)
	s.ok(e.Synchronize(s.ctx))
}

func closed(s *suite) {
	mem, src := s.alloc(device.HBM(0), 16), s.filled(16, 1)
	st, host := s.stream(device.HBM(0), "closed"), s.hostStream("host")
	if st.Name() != "closed" || st.Space() != device.HBM(0) || host.Space() != device.Host {
		s.Errorf("stream %q on %s, host stream on %s", st.Name(), st.Space(), host.Space())
	}
	e, f := s.event(), s.fence()
	s.ok(st.Copy(whole(mem), whole(src)))
	s.ok(st.Record(e))
	s.ok(st.Close())
	if done, err := e.Query(); !done || err != nil {
		s.Errorf("a closed stream left work undone: %v, %v", done, err)
	}
	s.wants(st.Copy(whole(mem), whole(src)), "", device.ErrClosed)
	s.wants(st.Record(e), "", device.ErrClosed)
	s.wants(st.Wait(e), "", device.ErrClosed)
	s.wants(st.SignalFence(f, 1), "", device.ErrClosed)
	s.wants(st.WaitFence(f, 1), "", device.ErrClosed)
	s.wants(st.Close(), "", device.ErrClosed)
	s.ok(host.Close())
	s.wants(host.Execute(device.Work{Name: "late"}), "", device.ErrClosed)
	s.ok(f.Signal(3))
	s.ok(e.Close())
	s.ok(f.Close())
	if v := f.Value(); v != 3 {
		s.Errorf("a fence that was closed at 3 is at %d", v)
	}
	s.wants(e.Close(), "", device.ErrClosed)
	s.wants(f.Close(), "", device.ErrClosed)
	st = s.stream(device.HBM(0), "next")
	s.wants(st.Wait(e), "", device.ErrClosed)
	s.wants(st.WaitFence(f, 1), "", device.ErrClosed)
	s.wants(f.Signal(1), "", device.ErrClosed)
}

// concurrent enqueues from one goroutine per stream, through which bytes pass in
// turn.
func concurrent(s *suite) {
	const n, streams, rounds = 4096, 6, 25
	spaces := s.m.Topology().Spaces()
	f := s.fence()
	src := s.filled(n, 11)
	bufs := []device.Memory{src}
	var sts []device.Stream
	for i := range streams {
		sp := spaces[i%len(spaces)]
		bufs = append(bufs, s.alloc(sp, n))
		sts = append(sts, s.stream(sp, fmt.Sprintf("s%d", i)))
	}
	var wg sync.WaitGroup
	errs := make(chan error, streams)
	for i, st := range sts {
		wg.Add(1)
		go func() {
			defer wg.Done()
			errs <- func() error {
				for r := range rounds {
					turn := uint32(r*streams + i)
					if err := st.WaitFence(f, turn); err != nil {
						return err
					}
					if err := st.Copy(whole(bufs[i+1]), whole(bufs[i])); err != nil {
						return err
					}
					if err := st.SignalFence(f, turn+1); err != nil {
						return err
					}
				}
				if err := st.Synchronize(s.ctx); err != nil {
					return fmt.Errorf("stream %d of %d in %v, with the fence at %d of %d: %w", i, streams, spaces[i%len(spaces)], f.Value(), streams*rounds, err)
				}
				return nil
			}()
		}()
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		s.ok(err)
	}
	if v := f.Value(); v != streams*rounds {
		s.Errorf("the fence is at %d, want %d", v, streams*rounds)
	}
	s.same("through all streams", s.content(bufs[streams]), src.Read(0, n))
}

// randomCopies runs random copies on random streams, ordered by events and fences
// exactly where they touch the same buffers, and compares with the same copies done
// one after the other.
func randomCopies(s *suite) {
	const n, buffers, streams, copies = 2048, 8, 5, 150
	for seed := range uint64(4) {
		rng := rand.New(rand.NewPCG(seed, 7))
		spaces := s.m.Topology().Spaces()
		type point struct {
			stream int
			event  device.Event
			fence  device.Fence
			value  uint32
		}
		type buffer struct {
			mem   device.Memory
			model []byte
			write *point
			reads []*point
		}
		var bufs []*buffer
		for i := range buffers {
			b := &buffer{mem: s.alloc(spaces[rng.IntN(len(spaces))], n), model: pattern(n, seed<<8+uint64(i))}
			s.load(b.mem, b.model)
			bufs = append(bufs, b)
		}
		var sts []device.Stream
		var fences []device.Fence
		var signaled [streams]uint32
		for i := range streams {
			sts = append(sts, s.stream(spaces[rng.IntN(len(spaces))], fmt.Sprintf("s%d", i)))
			fences = append(fences, s.fence())
		}
		order := func(on int, p *point) {
			switch {
			case p == nil || p.stream == on:
			case p.event != nil:
				s.ok(sts[on].Wait(p.event))
			default:
				s.ok(sts[on].WaitFence(p.fence, p.value))
			}
		}
		for range copies {
			src, dst := bufs[rng.IntN(buffers)], bufs[rng.IntN(buffers)]
			if src == dst || !s.reachable(src.mem.Space(), dst.mem.Space()) {
				continue
			}
			on := rng.IntN(streams)
			size := 1 + rng.Int64N(n)
			to, from := rng.Int64N(n-size+1), rng.Int64N(n-size+1)
			order(on, src.write)
			order(on, dst.write)
			for _, r := range dst.reads {
				order(on, r)
			}
			s.ok(sts[on].Copy(dst.mem.Range(to, size), src.mem.Range(from, size)))
			copy(dst.model[to:to+size], src.model[from:])
			p := &point{stream: on}
			if rng.IntN(2) == 0 {
				p.event = s.event()
				s.ok(sts[on].Record(p.event))
			} else {
				signaled[on]++
				p.fence, p.value = fences[on], signaled[on]
				s.ok(sts[on].SignalFence(p.fence, p.value))
			}
			dst.write, dst.reads = p, nil
			src.reads = append(src.reads, p)
			if rng.IntN(40) == 0 {
				s.ok(sts[rng.IntN(streams)].Synchronize(s.ctx))
			}
		}
		for i, st := range sts {
			if err := st.Synchronize(s.ctx); err != nil {
				var at []string
				for j, f := range fences {
					at = append(at, fmt.Sprintf("%s: %d of %d", sts[j].Space(), f.Value(), signaled[j]))
				}
				s.Fatalf("seed %d: stream %d: %v; streams have signaled %v", seed, i, err, at)
			}
		}
		for i, b := range bufs {
			s.same(fmt.Sprintf("seed %d: buffer %d on %s", seed, i, b.mem.Space()), s.content(b.mem), b.model)
		}
	}
}

// forwardingRing sends a counter around all GPUs and the host, each stop adding its
// own mark through a host stream.
func forwardingRing(s *suite) {
	spaces := s.m.Topology().Spaces()
	const n = 1024
	stop := make([]device.Memory, len(spaces))
	for i, sp := range spaces {
		stop[i] = s.alloc(sp, n)
	}
	s.load(stop[0], make([]byte, n))
	host := s.hostStream("marks")
	e := s.event()
	laps := 5
	for range laps {
		for i := range spaces {
			to := (i + 1) % len(spaces)
			if !s.reachable(spaces[i], spaces[to]) {
				s.Skipf("no path from %s to %s", spaces[i], spaces[to])
			}
			st := s.stream(spaces[to], "hop")
			if i > 0 {
				s.ok(st.Wait(e))
			}
			if i == 0 {
				s.ok(host.Execute(device.Work{
					Name: "mark", Reads: []device.Range{whole(stop[0])}, Writes: []device.Range{whole(stop[0])},
					Run: func(device.Access) error {
						b := stop[0].Write(0, 8)
						binary.LittleEndian.PutUint64(b, binary.LittleEndian.Uint64(b)+1)
						return nil
					},
				}))
				s.ok(host.Record(e))
				s.ok(st.Wait(e))
				s.ok(e.Synchronize(s.ctx))
			}
			s.ok(st.Copy(whole(stop[to]), whole(stop[i])))
			s.ok(st.Record(e))
			s.ok(st.Synchronize(s.ctx))
			s.ok(st.Close())
		}
	}
	if got := binary.LittleEndian.Uint64(stop[0].Read(0, 8)); got != uint64(laps) {
		s.Errorf("the counter came round as %d, want %d", got, laps)
	}
}

// leak expects Close to name what was not freed.
func leak(t *testing.T, m device.Machine) {
	for _, sp := range []device.Space{device.Host, device.HBM(0)} {
		if _, err := m.Alloc(sp, 12345, fmt.Sprintf("forgotten on %s", sp)); err != nil {
			t.Fatal(err)
		}
	}
	asleep, err := m.Alloc(device.HBM(0), 4<<20, "forgotten while suspended")
	if err == nil {
		err = asleep.Suspend()
	}
	if err != nil {
		t.Fatal(err)
	}
	kept, err := m.Alloc(device.HBM(0), 777, "released")
	if err != nil {
		t.Fatal(err)
	}
	if err := kept.Free(); err != nil {
		t.Fatal(err)
	}
	err = m.Close()
	if err == nil {
		t.Fatal("Close is silent about leaks")
	}
	for _, want := range []string{"forgotten on host", "forgotten on gpu0", "forgotten while suspended", "12345"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not name %q", err, want)
		}
	}
	if strings.Contains(err.Error(), "released") {
		t.Errorf("%q names memory that was freed", err)
	}
	if err := m.Close(); !errors.Is(err, device.ErrClosed) {
		t.Errorf("a second Close: %v", err)
	}
	if _, err := m.Alloc(device.Host, 1, "late"); !errors.Is(err, device.ErrClosed) {
		t.Errorf("Alloc on a closed machine: %v", err)
	}
}

// closeOverPending expects Close to return although a stream waits for what never
// comes.
func closeOverPending(t *testing.T, m device.Machine) {
	st, err := m.NewStream(device.Host, device.StreamOptions{Name: "held"})
	if err != nil {
		t.Fatal(err)
	}
	f, err := m.NewFence("never signaled")
	if err != nil {
		t.Fatal(err)
	}
	if err := st.WaitFence(f, f.Value()+1); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- m.Close() }()
	select {
	case <-done:
		// Whether it says so is its own affair: nothing was leaked.
	case <-time.After(patience):
		t.Fatal("Close hangs on a stream that waits for a fence")
	}
}
