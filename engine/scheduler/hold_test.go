package scheduler

import (
	"slices"
	"testing"
)

// TestHold: while admission is held waiting sequences wait, running ones run, and preempted ones wait
// in their place.
func TestHold(t *testing.T) {
	a := newAccount(t, Limits{StepTokens: 64, Sequences: 8}, Policy{}, 32, 4)
	a.add(0, 6, 20, 0, "", 0)
	a.add(1, 5, 20, 0, "", 0)
	run := func() (ids []ID) {
		for _, c := range a.Plan().Chunks {
			a.Done(c, 1)
			ids = append(ids, c.ID)
		}
		slices.Sort(ids)
		return ids
	}
	if got := run(); !slices.Equal(got, []ID{0, 1}) {
		t.Fatalf("sequences %v run", got)
	}
	a.HoldAdmission(true)
	a.add(2, 5, 20, 0, "", 0)
	if got := run(); !slices.Equal(got, []ID{0, 1}) || a.Waiting() != 1 {
		t.Errorf("held: sequences %v run, %d wait", got, a.Waiting())
	}
	preempted := a.PreemptAll()
	slices.Sort(preempted)
	if !slices.Equal(preempted, []ID{0, 1}) || a.Running() != 0 || a.Waiting() != 3 || a.Free() != a.Blocks() || a.Preemptions() != 2 {
		t.Errorf("preempted %v: %d run, %d wait, %d of %d blocks are free, %d preemptions", preempted, a.Running(), a.Waiting(), a.Free(), a.Blocks(), a.Preemptions())
	}
	if got := run(); len(got) > 0 {
		t.Errorf("held: sequences %v run", got)
	}
	a.HoldAdmission(false)
	if got := run(); !slices.Equal(got, []ID{0, 1, 2}) {
		t.Errorf("no longer held: sequences %v run", got)
	}
}
