package peercache

import (
	"errors"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
)

// TestSteps: the version changes when a copy has landed or is gone, Readable finds what is there,
// and a copy that is dropped within a step keeps its memory until the step's end.
func TestSteps(t *testing.T) {
	r := newRig(t, emulated.Options{Virtual: true}, harvest.Options{})
	c := r.cache
	version := c.BeginStep()
	step := func(what string, changes bool, readable ...bool) {
		t.Helper()
		c.EndStep()
		next := c.BeginStep()
		if (next != version) != changes {
			t.Errorf("%s: the version changes: %t", what, next != version)
		}
		version = next
		n := 0
		for i, want := range readable {
			x := c.Readable(r.keys[i])
			if (x != nil) != want {
				t.Errorf("%s: %s is readable: %t", what, r.keys[i], x != nil)
			}
			if x != nil {
				n++
			}
		}
		if c.Len() != n {
			t.Errorf("%s: %d copies, want %d", what, c.Len(), n)
		}
	}
	put := func(i int) {
		r.ok(c.Put(r.keys[i], r.host.Region(int64(i)*objectBytes, objectBytes), PutOptions[string]{}))
	}
	put(0)
	put(1)
	step("moving", false, false, false)
	r.ok(c.Wait(t.Context()))
	step("landed", true, true, true)
	step("nothing happened", false, true, true)
	if !c.ContinueStep(version) || c.ContinueStep(version+1) {
		t.Error("nothing happened, and the step cannot go on")
	}
	used := func() (n int64) {
		for _, p := range r.harvest.State().Peers {
			n += p.Used
		}
		return n
	}
	before := used()
	r.ok(c.Drop(r.keys[0]))
	if now := used(); now != before || c.Readable(r.keys[0]) != nil {
		t.Errorf("dropped within a step: %d bytes are used, %d before", now, before)
	}
	if c.ContinueStep(version) {
		t.Error("a copy was dropped, and the step goes on")
	}
	step("dropped", true, false, true)
	put(0)
	r.ok(c.Wait(t.Context()))
	if c.ContinueStep(version) {
		t.Error("a copy has landed, and the step goes on")
	}
	step("landed again", true, true, true)
	r.ok(c.Drop(r.keys[0]))
	step("dropped again", true, false, true)
	_, err := r.harvest.Tick(r.m.Now())
	r.ok(err)
	if now := used(); now != before-objectBytes {
		t.Errorf("after the step: %d bytes are used, %d before the drop", now, before)
	}
	c.PeerLost(device.HBM(1), &device.Error{Op: "launch", Space: device.HBM(1), Err: device.ErrLost})
	c.PeerLost(device.HBM(2), &device.Error{Op: "launch", Space: device.HBM(2), Err: device.ErrLost})
	if c.Readable(r.keys[1]) != nil {
		t.Error("a copy on a lost peer is readable")
	}
	c.EndStep()
	for range 3 {
		_, err := r.harvest.Tick(r.m.Now())
		r.ok(err)
	}
	c.BeginStep()
	step("peers are lost", true, false, false)
	c.EndStep()

	var none *Cache[string]
	if none.BeginStep() != 0 || !none.ContinueStep(0) || none.Readable("x") != nil || none.Len() != 0 {
		t.Error("a cache without peers has copies")
	}
	none.EndStep()
	none.PeerLost(device.HBM(1), errors.New("lost"))
}
