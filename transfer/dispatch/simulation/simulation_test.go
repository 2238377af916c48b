package simulation

import (
	"math"
	"slices"
	"testing"
	"time"
)

// h200 is a machine like the measured ones (docs/design/multipath.md).
func h200(gpus int) *Machine {
	return &Machine{
		GPUs: gpus, PCIe: 54e9, NVLink: 395e9,
		Notice: [2]time.Duration{5 * time.Microsecond, 20 * time.Microsecond}, Enqueue: 4 * time.Microsecond, Start: 2 * time.Microsecond,
	}
}

// TestWires: copies share wires fairly, and none stays below what is left for it.
func TestWires(t *testing.T) {
	m := &Machine{GPUs: 3, PCIe: 60, NVLink: 400, Roots: []Root{{GPUs: []int{0, 1}, Rate: 80}}}
	w := m.wires(0)
	for _, c := range []struct {
		uses [][]int
		want []float64
	}{
		{[][]int{w.host(0)}, []float64{60}},
		{[][]int{w.host(0), w.host(1)}, []float64{40, 40}},
		{[][]int{w.host(0), w.host(0), w.host(1)}, []float64{80.0 / 3, 80.0 / 3, 80.0 / 3}},
		{[][]int{w.host(0), w.host(0), w.host(0), w.host(1)}, []float64{20, 20, 20, 20}},
		{[][]int{w.host(2), w.host(2), w.host(2), w.host(0)}, []float64{20, 20, 20, 60}},
		{[][]int{w.peer(0, 1), w.peer(2, 1), w.peer(0, 2)}, []float64{200, 200, 200}},
		{[][]int{w.peer(0, 1), w.peer(2, 1), w.peer(1, 0)}, []float64{200, 200, 400}},
	} {
		got := w.share(c.uses)
		if !slices.EqualFunc(got, c.want, func(a, b float64) bool { return math.Abs(a-b) < 1e-6 }) {
			t.Errorf("%v: rates of %v, want %v", c.uses, got, c.want)
		}
	}
}

// TestBounds: the bounds are what one calculates by hand.
func TestBounds(t *testing.T) {
	m := &Machine{GPUs: 2, PCIe: 100e9, NVLink: 400e9}
	near := func(what string, got, want time.Duration) {
		t.Helper()
		if d := got - want; d < -2 || d > 2 {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	near("two links", m.Oracle(1e9, 0), 5*time.Millisecond)
	near("half each", m.Static(1e9, []float64{0.5, 0.5}, 0), 5*time.Millisecond)
	near("one has 3/4", m.Static(1e9, []float64{0.25, 0.75}, time.Second), time.Second+7500*time.Microsecond)
	m.Flows = []Flow{{GPU: 1, From: 2 * time.Millisecond, To: time.Second}}
	near("a flow on one link from 2 ms on", m.Oracle(1e9, 0), 6*time.Millisecond)
	near("half each beside it", m.Static(1e9, []float64{0.5, 0.5}, 0), 8*time.Millisecond)
	m.Changes = []Change{{GPU: 0, At: 2 * time.Millisecond, Rate: 1e9}}
	near("before the other link is slow", m.Oracle(4e8, 0), 2*time.Millisecond)
	near("for longer", m.Oracle(4e8+51e6, 0), 3*time.Millisecond)
	near("limited by the hop", (&Machine{GPUs: 3, PCIe: 100e9, NVLink: 50e9}).Oracle(15e8, 0), 10*time.Millisecond)
}

// TestCopy: the core is no faster than the bound, and not much slower; without relays' buffers
// being emptied in time, it would be.
func TestCopy(t *testing.T) {
	for _, inbound := range []bool{true, false} {
		for _, gpus := range []int{2, 4} {
			o := Default()
			o.Inbound = inbound
			m := h200(gpus)
			took, best := m.Copy(1<<30, o), m.Oracle(1<<30, 0)
			if took < best || took > best*106/100 {
				t.Errorf("inbound %t, %d GPUs: %v, at best %v", inbound, gpus, took, best)
			}
			one := o
			one.Buffers = 1
			if slow := m.Copy(1<<30, one); slow < took*110/100 {
				t.Errorf("inbound %t, %d GPUs: with one buffer %v, with three %v", inbound, gpus, slow, took)
			}
		}
	}
}
