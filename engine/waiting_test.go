package engine_test

import (
	"slices"
	"testing"

	"github.com/moeserve/moeserve/engine"
)

// TestWaitingForALoad: sequences that wait for what another one loads are looked up once, not in every
// step, and run when it has arrived.
func TestWaitingForALoad(t *testing.T) {
	r := newRace(t, 40, 8, true)
	q := ask(1, 17, 3)
	want := r.finish(r.submit(t.Context(), q))
	r.tiers.lookups = 0
	var jobs []*engine.Job
	for i := range 5 {
		jobs = append(jobs, r.submit(t.Context(), q))
		if i == 0 {
			r.turns(1, false) // its load begins
		}
	}
	r.turns(20, false)
	if s := r.State(); s.Waiting != 4 || len(r.tiers.loads) != 1 || r.tiers.lookups != 5 {
		t.Errorf("%d sequences wait, %d loads, %d lookups of 5 sequences", s.Waiting, len(r.tiers.loads), r.tiers.lookups)
	}
	r.tiers.endAll()
	for i, j := range jobs {
		if got := r.finish(j); !slices.Equal(got, want) {
			t.Errorf("request %d: %v, want %v", i, got, want)
		}
		if u := j.Usage(); u.CachedTokens != 16 {
			t.Errorf("request %d found %d tokens", i, u.CachedTokens)
		}
	}
	if len(r.wrong) > 0 {
		t.Error(r.wrong)
	}
}
