package harvest_test

import (
	"context"
	"errors"
	"testing"

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
