package harvest_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
)

// lossRig is a machine whose second and third GPU lend memory, with a monitor that a test
// changes.
type lossRig struct {
	*testing.T
	m     *emulated.Machine
	r     *harvest.Runtime
	peers []device.Space
	// read changes the readings of the machine's monitor. Default: nothing.
	read func(p device.Space, r harvest.Reading, err error) (harvest.Reading, error)

	inner *harvest.MachineMonitor
}

func (r *lossRig) Read(p device.Space) (harvest.Reading, error) {
	reading, err := r.inner.Read(p)
	if r.read == nil {
		return reading, err
	}
	return r.read(p, reading, err)
}

func newLossRig(t *testing.T) *lossRig {
	t.Helper()
	g := emulated.GPU{MemoryBytes: 1 << 20}
	m, err := emulated.New(emulated.Options{Virtual: true, GPUs: []emulated.GPU{g, g, g}})
	if err != nil {
		t.Fatal(err)
	}
	r := &lossRig{T: t, m: m, peers: []device.Space{device.HBM(1), device.HBM(2)}}
	if r.inner, err = harvest.NewMachineMonitor(m, r.peers); err != nil {
		t.Fatal(err)
	}
	r.r, err = harvest.New(harvest.Options{Machine: m, Peers: r.peers, Monitor: r, SlabBytes: 1 << 16, HeadroomBytes: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Memory of a lost GPU cannot be scrubbed, and its streams fail.
		if err := r.r.Close(context.Background()); err != nil && !errors.Is(err, device.ErrLost) {
			t.Error(err)
		}
		_ = r.inner.Close()
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func (r *lossRig) ticks(n int) {
	r.Helper()
	for range n {
		if _, err := r.r.Tick(r.m.Now()); err != nil {
			r.Fatal(err)
		}
	}
}

// TestLostPeerIsSeenAsLost: a peer whose usage cannot be read because it is lost is
// unhealthy, gives its slabs back, lends nothing, and stays so after Readmit.
func TestLostPeerIsSeenAsLost(t *testing.T) {
	r := newLossRig(t)
	h, err := r.r.Alloc(1000, harvest.Hints{Peers: r.peers[:1]})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.m.Lose(1); err != nil {
		t.Fatal(err)
	}
	check := func(when string) {
		t.Helper()
		r.ticks(5)
		p := r.r.State().Peers[0]
		if ok, _ := h.State(); ok || !errors.Is(p.Health, device.ErrLost) || p.Borrowable != 0 || len(p.Slabs) > 0 {
			t.Errorf("%s: health %v, %d bytes to lend, %d slabs, handle available: %t", when, p.Health, p.Borrowable, len(p.Slabs), ok)
		}
		if n := r.r.Room("experts", 1000)[device.HBM(1)]; n != 0 {
			t.Errorf("%s: room for %d", when, n)
		}
	}
	check("lost")
	if err := r.r.Exclude(device.HBM(1), device.ErrLost); err != nil {
		t.Fatal(err)
	}
	check("excluded")
	if err := r.r.Readmit(device.HBM(1)); err != nil {
		t.Fatal(err)
	}
	check("readmitted")
	if p := r.r.State().Peers[1]; p.Health != nil || p.Borrowable == 0 {
		t.Errorf("the other peer: health %v, %d bytes to lend", p.Health, p.Borrowable)
	}
}

// TestHealthBesideAnError: a monitor may know why a peer must not be used and yet have no
// reading of its memory. An error alone says nothing of its health, but nothing is lent.
func TestHealthBesideAnError(t *testing.T) {
	r := newLossRig(t)
	none := errors.New("the driver is busy")
	var health error
	r.read = func(p device.Space, reading harvest.Reading, err error) (harvest.Reading, error) {
		if p != device.HBM(1) {
			return reading, err
		}
		return harvest.Reading{Health: health}, none
	}
	r.ticks(1)
	if p := r.r.State().Peers[0]; p.Health != nil || p.Borrowable != 0 {
		t.Errorf("without a reading: health %v, %d bytes to lend", p.Health, p.Borrowable)
	}
	health = errors.New("double-bit ECC errors")
	r.ticks(1)
	if p := r.r.State().Peers[0]; !errors.Is(p.Health, health) {
		t.Errorf("with ECC errors: health %v", p.Health)
	}
	known := health
	health = nil // the monitor does not say any more
	r.ticks(1)
	if p := r.r.State().Peers[0]; !errors.Is(p.Health, known) {
		t.Errorf("after that: health %v", p.Health)
	}
	r.read = nil
	r.ticks(1)
	if p := r.r.State().Peers[0]; p.Health != nil || p.Borrowable == 0 {
		t.Errorf("with readings again: health %v, %d bytes to lend", p.Health, p.Borrowable)
	}
}

// TestReadingOverlappedByAnAlloc: a reading that was taken before a slab was allocated, and
// arrives after, does not count the slab's bytes as free.
func TestReadingOverlappedByAnAlloc(t *testing.T) {
	r := newLossRig(t)
	once := true
	r.read = func(p device.Space, reading harvest.Reading, err error) (harvest.Reading, error) {
		if p == device.HBM(1) && once {
			once = false
			if _, err := r.r.Alloc(1000, harvest.Hints{Peers: r.peers[:1]}); err != nil {
				t.Error(err)
			}
		}
		return reading, err
	}
	r.ticks(1)
	u, err := r.m.Usage(device.HBM(1))
	if err != nil {
		t.Fatal(err)
	}
	if p := r.r.State().Peers[0]; p.Free != u.Free() {
		t.Errorf("%d bytes count as free, and %d are", p.Free, u.Free())
	}
}

// scrubRefused is a machine whose scrub streams refuse copies.
type scrubRefused struct {
	*emulated.Machine
	refuse func(dst device.Range) bool
}

func (m *scrubRefused) NewStream(space device.Space, o device.StreamOptions) (device.Stream, error) {
	s, err := m.Machine.NewStream(space, o)
	if strings.HasPrefix(o.Name, "harvest scrub") {
		s = refusingStream{s, m}
	}
	return s, err
}

type refusingStream struct {
	device.Stream
	m *scrubRefused
}

func (s refusingStream) Copy(dst, src device.Range) error {
	if s.m.refuse(dst) {
		return &device.Error{Op: "copy", Space: s.Space(), Err: device.ErrCopyFailed}
	}
	return s.Stream.Copy(dst, src)
}

// TestRefusedScrub: a slab whose scrubbing the device refuses half-way, again and again, is
// freed when what the device did accept has ended, though it is behind other slabs'.
func TestRefusedScrub(t *testing.T) {
	const slab = 1 << 16
	m, err := emulated.New(emulated.Options{
		Virtual: true, Check: true, GPUs: []emulated.GPU{{}, {MemoryBytes: 3 * slab}}, HostLink: emulated.Link{BytesPerSecond: 1e6},
	})
	if err != nil {
		t.Fatal(err)
	}
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var handles [3]*harvest.Handle
	refusing := &scrubRefused{Machine: m, refuse: func(dst device.Range) bool {
		slab := handles[0].Region().Range
		return dst.Addr > slab.Addr && dst.Addr < slab.End()
	}}
	released := map[uint64]harvest.SlabInfo{}
	r, err := harvest.New(harvest.Options{
		Machine: refusing, Peers: []device.Space{device.HBM(1)}, SlabBytes: slab, ScrubBytes: 1 << 12, Deadline: time.Minute, HeadroomBytes: -1,
		Events: harvest.EventListener{
			SlabReleased:   func(i harvest.SlabInfo) { released[i.Slab] = i },
			DeadlineMissed: func(i harvest.DeadlineMissInfo) { t.Error(i) },
		},
	})
	ok(err)
	for i := range handles {
		handles[i], err = r.Alloc(slab, harvest.Hints{Cost: time.Duration(1 + i)})
		ok(err)
	}
	tick := func() {
		_, err := r.Tick(m.Now())
		ok(err)
	}
	// The first slab's scrubbing is refused, and then that of the second begins, behind
	// which a part of the first one's is enqueued again. The third slab is scrubbed before
	// the first one's third time.
	_, err = r.Reclaim(device.HBM(1), 2*slab, 0)
	ok(err)
	tick()
	c, err := r.Reclaim(device.HBM(1), 3*slab, 0)
	ok(err)
	tick()
	tick()
	ok(c.Wait(t.Context()))
	ok(r.Close(t.Context()))
	for i, h := range handles {
		if got := released[h.Slab()]; got.Scrubbed != (i > 0) || errors.Is(got.Err, device.ErrCopyFailed) != (i == 0) {
			t.Errorf("slab %d: %+v", i, got)
		}
	}
	ok(m.Close())
}

// newLogged is a runtime with one peer, and what it logs.
func newLogged(t *testing.T) (*emulated.Machine, *harvest.Runtime, *bytes.Buffer) {
	t.Helper()
	m, err := emulated.New(emulated.Options{Virtual: true, GPUs: make([]emulated.GPU, 2)})
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	r, err := harvest.New(harvest.Options{
		Machine: m, Peers: []device.Space{device.HBM(1)}, SlabBytes: 1 << 12,
		Events: harvest.LogEvents(slog.New(slog.NewTextHandler(&text, nil))),
	})
	if err != nil {
		t.Fatal(err)
	}
	return m, r, &text
}

// TestCallbackPanics: a panic in a callback is reported, and the memory is released as if
// the callback had returned.
func TestCallbackPanics(t *testing.T) {
	m, r, text := newLogged(t)
	called := 0
	for range 2 {
		h, err := r.Alloc(1000, harvest.Hints{})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.RegisterCallback(h, func(harvest.Revocation) {
			if called++; called == 1 {
				panic("index out of range")
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	c, err := r.Reclaim(device.HBM(1), 1<<40, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if n := r.State().CallbackPanics; n != 1 || called != 2 {
		t.Errorf("%d callbacks were called, %d panics counted", called, n)
	}
	for _, want := range []string{"level=ERROR", "callback of handle 1", `panic="index out of range"`, "loss_test.go"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the log has no %q:\n%s", want, text)
		}
	}
	if err := errors.Join(r.Close(t.Context()), m.Close()); err != nil {
		t.Error(err)
	}
}

// TestUnscrubbedSlabOfDisabledPeer: an operator reads that content may have stayed there.
func TestUnscrubbedSlabOfDisabledPeer(t *testing.T) {
	m, r, text := newLogged(t)
	if _, err := r.Alloc(1000, harvest.Hints{}); err != nil {
		t.Fatal(err)
	}
	if err := r.Exclude(device.HBM(1), errors.New("copies fail")); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.Close(t.Context()), m.Close()); err != nil {
		t.Error(err)
	}
	if want := `level=WARN msg="harvest: slab of a disabled peer released without scrubbing`; !strings.Contains(text.String(), want) {
		t.Errorf("the log has no %q:\n%s", want, text)
	}
}

// TestOldReader: work that read a handle long ago, when its fence had other values, does
// not keep the memory from being freed; and its failure is not forgotten.
func TestOldReader(t *testing.T) {
	for _, start := range []uint32{0, 1<<31 - 1, 1<<32 - 2} {
		m, err := emulated.New(emulated.Options{Virtual: true, FenceStart: start, GPUs: make([]emulated.GPU, 2)})
		if err != nil {
			t.Fatal(err)
		}
		ok := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		var freed []harvest.FreeInfo
		r, err := harvest.New(harvest.Options{
			Machine: m, Peers: []device.Space{device.HBM(1)}, SlabBytes: 1 << 12,
			Events: harvest.EventListener{Freed: func(i harvest.FreeInfo) { freed = append(freed, i) }},
		})
		ok(err)
		f, err := m.NewFence("readers")
		ok(err)
		bad, err := m.NewFence("failing reader")
		ok(err)
		boom := errors.New("the reader's stream failed")
		var handles []*harvest.Handle
		value := start
		for i := range 4 { // two slabs
			h, err := r.Alloc(2000, harvest.Hints{})
			ok(err)
			handles = append(handles, h)
			ref, _ := h.Acquire(nil)
			value++
			if i < 3 {
				ref.ReleaseAt(device.Point{Fence: f, Value: value})
				ok(f.Signal(value))
				continue
			}
			ref.ReleaseAt(device.Point{Fence: bad, Value: value})
			ok(bad.Fail(value, boom))
		}
		now := m.Now()
		for range 3 {
			for range 3 {
				now += time.Second
				_, err := r.Tick(now)
				ok(err)
			}
			value += 1 << 30
			ok(errors.Join(f.Signal(value), bad.Signal(value)))
		}
		for i, h := range handles {
			freed = nil
			ok(r.Free(h))
			if len(freed) != 1 || errors.Is(freed[0].Failed, boom) != (i == 3) {
				t.Fatalf("handle %d, fence from %#x: freed as %+v", i, start, freed)
			}
		}
		ok(r.Close(t.Context()))
		ok(m.Close())
	}
}

// TestOldReaderIsNotBlamed: work of long ago is not among what holds a handle too long.
func TestOldReaderIsNotBlamed(t *testing.T) {
	m, err := emulated.New(emulated.Options{Virtual: true, GPUs: make([]emulated.GPU, 2)})
	if err != nil {
		t.Fatal(err)
	}
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var missed []harvest.DeadlineMissInfo
	r, err := harvest.New(harvest.Options{
		Machine: m, Peers: []device.Space{device.HBM(1)}, SlabBytes: 1 << 12,
		Events: harvest.EventListener{DeadlineMissed: func(i harvest.DeadlineMissInfo) { missed = append(missed, i) }},
	})
	ok(err)
	f, err := m.NewFence("readers")
	ok(err)
	h, err := r.Alloc(1000, harvest.Hints{})
	ok(err)
	old, _ := h.Acquire(harvest.NewOwner("old"))
	old.ReleaseAt(device.Point{Fence: f, Value: 1})
	ok(f.Signal(1))
	now := m.Now()
	for k := range uint32(3) {
		now += time.Second
		_, err := r.Tick(now)
		ok(err)
		ok(f.Signal((k + 1) << 30))
	}
	ref, _ := h.Acquire(harvest.NewOwner("new"))
	_, err = r.Reclaim(device.HBM(1), 1<<40, time.Second)
	ok(err)
	for range 2 {
		now += time.Second
		_, err = r.Tick(now)
		ok(err)
	}
	if len(missed) != 1 || len(missed[0].Owners) != 1 || missed[0].Owners[0].Owner != "new" {
		t.Errorf("deadlines missed: %+v", missed)
	}
	ref.Release()
	ok(r.Close(t.Context()))
	ok(m.Close())
}
