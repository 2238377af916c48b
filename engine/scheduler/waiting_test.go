package scheduler

import "testing"

// counting counts how often a sequence is matched.
type counting struct {
	*stored
	matches int
}

func (b *counting) Match(most int) (tokens int, at Cached) {
	b.matches++
	return b.stored.Match(most)
}

// TestMatchedOnlyWhereThereMayBeRoom: a sequence that waits for room is matched when it comes, and again
// when blocks were released, not in every plan.
func TestMatchedOnlyWhereThereMayBeRoom(t *testing.T) {
	for _, order := range []Order{FCFS, ByPriority, Fair} {
		a := newAccount(t, Limits{StepTokens: 64, Sequences: 4}, Policy{Order: order, Granularity: 64}, 12, 4)
		a.add(0, 20, 40, 0, "a", 0)
		a.carryOut(a.Plan())
		b := &counting{stored: &stored{a.NewTable(), 0, a}}
		a.Add(1, b, 36, 40, 0)
		for range 8 {
			a.carryOut(a.Plan())
		}
		if a.Running() != 1 || b.matches > 2 {
			t.Errorf("%v: %d run, and the sequence that waits was matched %d times", order, a.Running(), b.matches)
		}
		a.Remove(0, true)
		if p := a.Plan(); len(p.Admitted) != 1 {
			t.Errorf("%v: not admitted where there is room: %+v", order, p)
		}
	}
}

// TestWaitingForContentHoldsUpNobody: a sequence that waits for content on its way is passed over, also
// where there is no room for it.
func TestWaitingForContentHoldsUpNobody(t *testing.T) {
	a := newAccount(t, Limits{StepTokens: 64, Sequences: 8}, Policy{}, 12, 4)
	a.onItsWay = 1
	a.add(0, 36, 40, 0, "", 32)
	a.carryOut(a.Plan())
	a.add(1, 28, 32, 0, "", 0) // leaves no room for the first
	for id := ID(1); id < 3; id++ {
		p := a.Plan()
		a.carryOut(p)
		if len(p.Admitted) != 1 || p.Admitted[0] != id {
			t.Fatalf("%d is not admitted: %+v", id, p)
		}
		a.add(id+1, 4, 8, 0, "", 0)
	}
}
