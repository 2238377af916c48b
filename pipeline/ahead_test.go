package pipeline

import (
	"errors"
	"fmt"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
)

// TestAheadSameResults: steps that are enqueued before the tokens of those in front are known give the same results
// as others, whichever sequences start and end, and whatever fails.
func TestAheadSameResults(t *testing.T) {
	for i, name := range sameOn {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const steps = 160
			seed := uint64(100 + i)
			plain := newRig(t, name, 0, emulated.Options{Virtual: true}, Options{})
			plain.noLogits = true
			want := plain.generate(seed, steps, nil)
			for _, o := range []Options{{Graphs: 8}, {Graphs: 1}, {Graphs: 8, BatchInvariant: true}, {Graphs: 8, ExpertAccess: configs.DirectAccess}} {
				graphs, fraction := o.Graphs, 0.0
				var peers []device.Space
				if o.ExpertAccess == configs.DirectAccess {
					fraction, peers = 0.5, []device.Space{device.HBM(1), device.HBM(2)}
				}
				r := newRig(t, name, fraction, emulated.Options{Virtual: true, Check: true}, o, peers...)
				r.noLogits, r.ahead = true, true
				for range 2 {
					if got := r.generate(seed, steps, nil); got != want {
						t.Fatalf("%d graphs, fraction %v: %s", graphs, fraction, firstDifference(got, want))
					}
				}
				s := r.p.Graphs()
				t.Logf("%+v of %d steps", s, 2*steps)
				if graphs > 1 && (s.Ahead < steps/8 || s.Discarded == 0) || s.Ahead-s.Discarded > s.Launched {
					t.Errorf("%+v of %d steps", s, 2*steps)
				}
				check(t, r.p.Discard(t.Context()))
			}

			// Copies of metadata and of results fail at random, of steps ahead and of those in front.
			r := newRig(t, name, 0, emulated.Options{Virtual: true, Seed: 3}, Options{Graphs: 8})
			r.noLogits, r.ahead = true, true
			faults := r.m.Inject(&emulated.Fault{
				Kind: emulated.FailCopy, Chance: 0.03, Times: -1,
				Match: func(p emulated.Point) bool { return p.Stream == "compute" },
			})
			failed := 0
			retry := func(err error) bool {
				failed++
				return errors.Is(err, ErrStepFailed) && errors.Is(err, device.ErrCopyFailed)
			}
			if got := r.generate(seed, steps, retry); got != want {
				t.Fatal(firstDifference(got, want))
			}
			if s := r.p.Graphs(); faults.Hits() == 0 || failed == 0 || s.Ahead == 0 {
				t.Errorf("%d copies failed, and %d steps; %+v", faults.Hits(), failed, s)
			}
		})
	}
}

// TestAheadCounts: steps that are enqueued ahead count as others do, also where they read experts in place, and end
// their part of the store's step.
func TestAheadCounts(t *testing.T) {
	const steps = 40
	for _, fraction := range []float64{0, 0.5} {
		var want string
		for _, ahead := range []bool{false, true} {
			r := newRig(t, "qwen2_moe", fraction, emulated.Options{Virtual: true}, Options{Graphs: 8, ExpertAccess: configs.DirectAccess}, device.HBM(1))
			r.ahead = ahead
			step := r.decoding(5)
			for at := range steps {
				if at == steps-1 {
					r.ahead = false
				}
				step(5 + at)
			}
			if s := r.p.Graphs(); (s.Ahead > steps/2) != ahead || s.Discarded > 0 {
				t.Errorf("fraction %v, ahead %v: %+v", fraction, ahead, s)
			}
			got := fmt.Sprint(r.store.RoutedTokens(), r.store.Stats(), r.p.StepsByAccess())
			if !ahead {
				want = got
			} else if got != want {
				t.Errorf("fraction %v: routed tokens, uses and steps are %s, want %s", fraction, got, want)
			}
			st, err := r.store.BeginStep(t.Context(), r.p.Compute())
			check(t, err)
			check(t, st.End())
		}
	}
}
