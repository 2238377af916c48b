package pipeline

import (
	"slices"
	"testing"

	"github.com/moeserve/moeserve/device/emulated"
)

// TestMeanwhile: a step calls Meanwhile once, when it is enqueued and before it has ended; one that
// is invalid does not.
func TestMeanwhile(t *testing.T) {
	for _, fraction := range []float64{0, 0.5} { // layerwise and on demand
		r := newRig(t, "mixtral", fraction, emulated.Options{Virtual: true, Check: true}, Options{})
		table := r.kv.NewTable()
		reserve(t, table, 8)
		plain := Step{Sequences: []Sequence{{Tokens: []int32{1, 2}, Table: table, LogitRows: 1}}}
		res, err := r.p.Step(t.Context(), &plain)
		check(t, err)
		want := slices.Clone(res.Sampled)
		calls := 0
		with := plain
		with.Meanwhile = func() {
			calls++
			if ended, err := r.p.done.Query(); ended || err != nil {
				t.Errorf("fraction %g: the step has ended: %v, %v", fraction, ended, err)
			}
		}
		res, err = r.p.Step(t.Context(), &with)
		check(t, err)
		if calls != 1 || !slices.Equal(res.Sampled, want) {
			t.Errorf("fraction %g: called %d times; sampled %v, want %v", fraction, calls, res.Sampled, want)
		}
		with.Sequences = nil
		if _, err := r.p.Step(t.Context(), &with); err == nil || calls != 1 {
			t.Errorf("fraction %g: an invalid step: %v, called %d times", fraction, err, calls)
		}
		table.Release(false)
	}
}
