package scheduler

import "testing"

// TestLacking: a sequence lacks blocks where those that it would not share, and those promised to
// others, are more than are free.
func TestLacking(t *testing.T) {
	for _, c := range []struct {
		name string
		play func(a *account)
		// before and after the plan in which the sequence is looked at
		before, after int
	}{
		{"it has more tokens than there is room for", func(a *account) {
			a.add(0, 20, 40, 0, "", 0)
			a.carryOut(a.Plan())
			a.add(1, 36, 40, 0, "", 0)
		}, 10, 10},
		{"it shares most of its blocks with a sequence that runs", func(a *account) {
			a.add(0, 32, 40, 0, "a", 0)
			a.carryOut(a.Plan())
			a.add(1, 36, 40, 0, "a", 0) // 10 blocks: 8 of them are shared, and 3 are free
		}, 0, 0},
		{"it shares some, and lacks others", func(a *account) {
			a.add(0, 8, 40, 0, "a", 0)
			a.add(1, 24, 40, 0, "b", 0)
			a.carryOut(a.Plan())
			a.add(2, 36, 40, 0, "a", 0) // 10 blocks: 2 are shared, and 2 are free
		}, 8, 8},
		{"others will take what is free", func(a *account) {
			a.add(0, 40, 44, 0, "", 0) // 11 blocks, of which the first step takes 6
			a.limits.StepTokens = 24
			a.carryOut(a.Plan())
			a.add(1, 8, 12, 0, "", 0)
		}, 3 + 5, 3 + 1},
		{"the first waits for content, and the next one for room", func(a *account) {
			a.onItsWay = 1
			a.add(0, 20, 24, 0, "", 0)
			a.carryOut(a.Plan())
			a.add(1, 36, 40, 0, "", 32)
			a.carryOut(a.Plan())
			a.add(2, 36, 40, 0, "", 0)
		}, 10, 10},
		{"all wait for content", func(a *account) {
			a.onItsWay = 1
			a.add(0, 20, 24, 0, "", 0)
			a.carryOut(a.Plan())
			a.add(1, 36, 40, 0, "", 32)
			a.carryOut(a.Plan())
		}, 0, 0},
	} {
		a := newAccount(t, Limits{StepTokens: 64, Sequences: 8}, Policy{}, 12, 4)
		c.play(a)
		if got := a.Lacking(); got != c.before {
			t.Errorf("%s: %d blocks before a plan, want %d (%d are free)", c.name, got, c.before, a.Free())
		}
		waiting := a.Waiting()
		a.Plan()
		if admitted := a.Waiting() < waiting; admitted != (c.before == 0 && a.onItsWay == 0) {
			t.Errorf("%s: admitted: %v", c.name, admitted)
		}
		if got := a.Lacking(); got != c.after {
			t.Errorf("%s: %d blocks after a plan, want %d (%d are free)", c.name, got, c.after, a.Free())
		}
	}
}
