package harvest_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
)

// TestReserve: no other client is given the memory that is kept for one, nor displaces it, nor uses
// peers that are not lent to it; other processes get it first, and the client gets it again.
func TestReserve(t *testing.T) {
	const slab, kept, hbm = 1 << 20, 4 << 20, 16 << 20
	m := machine(t, emulated.Options{GPUs: gpus(3, hbm), Virtual: true, Check: true})
	var first []string
	r := open(t, m, harvest.Options{
		SlabBytes: slab, HeadroomBytes: 1 << 20, Cooldown: 100 * time.Millisecond,
		Policy: harvest.NewFairness(harvest.FairnessOptions{Quota: 12 << 20}),
		Clients: map[string]harvest.ClientOptions{
			"relay": {ReserveBytes: kept}, "experts": {Peers: []device.Space{device.HBM(1)}},
		},
		Events: harvest.EventListener{RevocationStarted: func(i harvest.RevocationInfo) { first = append(first, i.Client) }},
	})
	now := time.Duration(0)
	on := func(i int) harvest.Hints {
		return harvest.Hints{Client: "relay", Peers: []device.Space{device.HBM(i)}, Cost: 100 * time.Hour}
	}
	borrow := func() (n int) {
		for {
			_, err := r.Alloc(slab, harvest.Hints{Client: "experts", Cost: time.Hour})
			if err == nil {
				n++
				continue
			}
			if !errors.Is(err, harvest.ErrNoCapacity) || !strings.Contains(err.Error(), "gpu2 is not lent to experts") {
				t.Fatal(err)
			}
			return n
		}
	}
	room := r.Room("experts", slab)
	if n := borrow(); n != 11 || room[device.HBM(1)] != 11 || room[device.HBM(2)] != 0 {
		t.Fatalf("%d slabs of experts and room for %v, want all but the headroom and what is kept of gpu1", n, room)
	}
	if err := r.Want(device.HBM(2), harvest.Demand{Client: "experts", Bytes: slab, Objects: 9, Cost: time.Hour}); err != nil {
		t.Fatal(err)
	}
	var held [3]*harvest.Handle
	for i := 1; i < 3; i++ {
		var err error
		if held[i], err = r.Alloc(kept, on(i)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.Alloc(kept, on(1)); !errors.Is(err, harvest.ErrNoCapacity) {
		t.Errorf("twice what is kept: %v", err)
	}
	// Much later, whatever experts are worth.
	turn := func(d time.Duration) {
		step := max(d/20, 5*time.Millisecond)
		for until := now + d; now < until; {
			now += step
			if _, err := r.Tick(now); err != nil {
				t.Fatal(err)
			}
			drive(t, m)
		}
	}
	turn(10 * time.Second)
	if n := borrow(); n != 0 || len(first) != 0 {
		t.Errorf("%d more slabs of experts, and revocations of %v", n, first)
	}
	// Other processes need a little.
	if err := m.Occupy(device.HBM(1), 1<<20); err != nil {
		t.Fatal(err)
	}
	turn(50 * time.Millisecond)
	if ok, _ := held[1].State(); ok || len(first) != 1 || first[0] != "relay" {
		t.Errorf("revocations of %v", first)
	}
	if n := borrow(); n != 0 {
		t.Errorf("%d slabs of experts in the place of what was revoked first", n)
	}
	if err := m.Occupy(device.HBM(1), -1<<20); err != nil {
		t.Fatal(err)
	}
	turn(200 * time.Millisecond)
	if n := borrow(); n != 0 {
		t.Errorf("%d slabs of experts in the place of what is kept", n)
	}
	if _, err := r.Alloc(kept, on(1)); err != nil {
		t.Errorf("again: %v", err)
	}
	// More than that is revoked of the others, too.
	first = nil
	if _, err := r.Reclaim(device.HBM(1), 7<<20, 0); err != nil {
		t.Fatal(err)
	}
	turn(50 * time.Millisecond)
	if !slices.Equal(first, []string{"relay", "", "", ""}) { // the last for the headroom
		t.Errorf("revocations of %q", first)
	}
}
