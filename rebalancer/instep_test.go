package rebalancer_test

import (
	"testing"

	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/rebalancer"
)

// TestResidentMovesInStep: a tick while a step runs, when an expert cannot leave its place at once,
// moves no more experts than one between steps.
func TestResidentMovesInStep(t *testing.T) {
	const places = 2 * rigLayers
	r := newRig(t, rigOptions{machine: emulated.Options{Virtual: true}, places: places, core: rebalancer.CoreOptions{MaxMoving: 1}})
	r.hot += 3
	r.steps(6e9, false)
	r.hot += 3
	for range 3000 {
		if err := r.try(false); err != nil {
			t.Fatal(err)
		}
	}
	step, err := r.store.BeginStep(t.Context(), r.compute)
	if err != nil {
		t.Fatal(err)
	}
	r.tick()
	leaving, moving := 0, 0
	for _, l := range r.store.Placed() {
		for _, h := range l {
			if h.Lent && h.Moving {
				leaving++
			} else if h.Moving {
				moving++
			}
		}
	}
	if leaving != 1 {
		t.Errorf("%d of %d experts leave at one tick, %d others move", leaving, places, moving)
	}
	if err := step.Drop(t.Context()); err != nil {
		t.Fatal(err)
	}
}
