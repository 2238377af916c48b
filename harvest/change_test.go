package harvest_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
)

// held is what a machine has allocated on a GPU, after the revocations under way.
func held(t *testing.T, m *emulated.Machine, r *harvest.Runtime, s device.Space) int64 {
	t.Helper()
	for {
		pending, err := r.Tick(m.Now())
		if err != nil {
			t.Fatal(err)
		}
		if pending == 0 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	u, err := m.Usage(s)
	if err != nil {
		t.Fatal(err)
	}
	return u.Allocated
}

// TestSetHeadroom: what a larger headroom lacks is revoked, no more, and what a smaller one leaves can
// be borrowed.
func TestSetHeadroom(t *testing.T) {
	const slab, all = 1 << 16, 1 << 20
	m := machine(t, emulated.Options{GPUs: gpus(2, all)})
	r := open(t, m, harvest.Options{Peers: peers12[:1], SlabBytes: slab, HeadroomBytes: all / 4, Cooldown: -1})
	fill := func() (n int64) {
		for {
			if _, err := r.Alloc(slab, harvest.Hints{}); err != nil {
				if !errors.Is(err, harvest.ErrNoCapacity) {
					t.Fatal(err)
				}
				return n
			}
			n += slab
		}
	}
	if n := fill(); n != all*3/4 {
		t.Fatalf("%d bytes borrowed beside a headroom of %d", n, all/4)
	}
	if err := r.SetHeadroom(peers12[0], all/2); err != nil {
		t.Fatal(err)
	}
	if n := held(t, m, r, peers12[0]); n != all/2 || r.State().Revocations[harvest.ReasonPressure] != 4 {
		t.Errorf("a larger headroom leaves %d bytes, %v", n, r.State().Revocations)
	}
	if n := fill(); n != 0 {
		t.Errorf("%d bytes borrowed of the headroom", n)
	}
	if err := r.SetHeadroom(peers12[0], 0); err != nil {
		t.Fatal(err)
	}
	if n := fill(); n != all/2 {
		t.Errorf("%d bytes borrowed without a headroom", n)
	}
	for _, err := range []error{r.SetHeadroom(peers12[0], -1), r.SetHeadroom(device.HBM(0), 1), r.Withdraw(device.HBM(0), true)} {
		if err == nil {
			t.Error("it is accepted")
		}
	}
}

// TestWithdraw: of a peer that is withdrawn all is revoked and nothing borrowed; others, and it once it
// is back, lend as before.
func TestWithdraw(t *testing.T) {
	const slab, all = 1 << 16, 1 << 20
	m := machine(t, emulated.Options{GPUs: gpus(3, all)})
	r := open(t, m, harvest.Options{Peers: peers12, SlabBytes: slab, HeadroomBytes: -1, Cooldown: -1})
	borrow := func(from ...device.Space) error {
		_, err := r.Alloc(slab, harvest.Hints{Peers: from})
		return err
	}
	for _, p := range peers12 {
		if err := borrow(p); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Withdraw(peers12[0], true); err != nil {
		t.Fatal(err)
	}
	if there, other := held(t, m, r, peers12[0]), held(t, m, r, peers12[1]); there != 0 || other != slab || r.State().Revocations[harvest.ReasonPolicy] != 1 {
		t.Errorf("withdrawn: %d bytes there, %d on the other, %v", there, other, r.State().Revocations)
	}
	if err := borrow(peers12[0]); !errors.Is(err, harvest.ErrNoCapacity) || !strings.Contains(err.Error(), "is withdrawn") {
		t.Errorf("a request for it: %v", err)
	}
	if room := r.Room("", slab); len(room) != 1 || room[peers12[1]] != all/slab-1 {
		t.Errorf("room %v", room)
	}
	if err := r.Want(peers12[0], harvest.Demand{Client: "a", Bytes: slab, Objects: 1, Cost: time.Hour}); err != nil {
		t.Fatal(err)
	}
	if b, err := r.Balance(peers12[0]); err != nil || b.Wants || b.Held != 0 {
		t.Errorf("%+v, %v", b, err)
	}
	if err := borrow(); err != nil {
		t.Fatal(err)
	}
	if n := held(t, m, r, peers12[1]); n != 2*slab {
		t.Errorf("the other lends %d bytes", n)
	}
	if err := r.Withdraw(peers12[0], false); err != nil {
		t.Fatal(err)
	}
	if err := borrow(peers12[0]); err != nil {
		t.Errorf("once it is back: %v", err)
	}
}
