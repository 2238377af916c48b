package pipeline

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// TestAheadSameResults: steps that are enqueued before the tokens of those in front are known give the same results
// as others, whichever sequences start and end, and whatever fails.
func TestAheadSameResults(t *testing.T) {
	for i, name := range sameOn[:racedetector.Fewer(len(sameOn), 1)] {
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
				if graphs > 1 && (s.Ahead < steps/8 || s.Discarded == 0) || s.Ahead+s.Discarded > s.Launched {
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

// aheadRig decodes sequences one token a step, ahead.
type aheadRig struct {
	*rig
	qs []Sequence
}

func newAheadRig(t *testing.T, sequences int) *aheadRig {
	r := &aheadRig{rig: newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{Graphs: 8})}
	for i := range sequences {
		q := Sequence{Tokens: []int32{int32(5 + i), 9}, Table: r.kv.NewTable(), LogitRows: 1, SamplingParams: SamplingParams{Seed: uint64(i), Temperature: 1}}
		reserve(t, q.Table, 120)
		t.Cleanup(func() { q.Table.Release(false) })
		r.qs = append(r.qs, q)
	}
	return r
}

// step runs a step that change has changed, if it is given, and returns the tokens.
func (r *aheadRig) step(change func(*Step)) (sampled []int32, ahead bool) {
	r.Helper()
	s := &Step{Sequences: slices.Clone(r.qs), Ahead: true}
	if change != nil {
		change(s)
	}
	res, err := r.p.Step(r.Context(), s)
	check(r, err)
	for i := range r.qs {
		if i < len(res.Sampled) {
			r.qs[i].Start, r.qs[i].Tokens = s.Sequences[i].Start+len(s.Sequences[i].Tokens), []int32{res.Sampled[i]}
		}
	}
	return slices.Clone(res.Sampled), res.Ahead
}

// TestAheadPartial: with Partial, the results of the sequences that go on are taken, and else the step runs again; either
// way the steps behind have the right tokens.
func TestAheadPartial(t *testing.T) {
	for _, partial := range []bool{false, true} {
		var want []int32
		for _, ahead := range []bool{false, true} {
			r := newAheadRig(t, 3)
			run := func(s *Step) { s.Ahead, s.Partial = ahead, partial }
			all := r.qs
			for _, qs := range [][]Sequence{all[1:], all} { // there are graphs of two and of three
				r.qs = qs
				for range 6 {
					r.step(run)
				}
			}
			r.qs = all[1:]
			discarded := r.p.Graphs().Discarded
			var got []int32
			for range 6 {
				sampled, _ := r.step(run)
				got = append(got, sampled...)
			}
			if n := r.p.Graphs().Discarded - discarded; ahead && (n == 1) == partial {
				t.Errorf("partial %v: %d steps were discarded", partial, n)
			}
			if !ahead {
				want = got
			} else if !slices.Equal(got, want) {
				t.Errorf("partial %v: %v, want %v", partial, got, want)
			}
		}
	}
}

// TestAheadUnexpected: a step that is not as the one ahead was expected to be runs by itself, with its own result.
func TestAheadUnexpected(t *testing.T) {
	racedetector.SkipSequential(t)
	for name, change := range map[string]func(*Step){
		"token":       func(s *Step) { s.Sequences[1].Tokens = []int32{s.Sequences[1].Tokens[0] ^ 1} },
		"start":       func(s *Step) { s.Sequences[1].Start-- },
		"seed":        func(s *Step) { s.Sequences[1].SamplingParams.Seed += 3 },
		"sample":      func(s *Step) { s.Sequences[1].SamplingParams.Sample++ },
		"temperature": func(s *Step) { s.Sequences[1].SamplingParams.Temperature = 0 },
		"top-k":       func(s *Step) { s.Sequences[1].SamplingParams.TopK = 2 },
		"top-p":       func(s *Step) { s.Sequences[1].SamplingParams.TopP = 0.1 },
		"min-p":       func(s *Step) { s.Sequences[1].SamplingParams.MinP = 0.9 },
		"adjust":      func(s *Step) { s.Sequences[1].SamplingParams.Adjust = []TokenAdjust{{ID: 7, Seen: -1, Bias: 90}} },
		"mask":        func(s *Step) { s.Sequences[1].SamplingParams.Mask = everyThird{} },
		"log-probs":   func(s *Step) { s.Sequences[1].SamplingParams.LogProbs = true },
		"no logits":   func(s *Step) { s.Sequences[1].LogitRows = 0 },
		"two tokens":  func(s *Step) { q := &s.Sequences[1]; q.Tokens = append(slices.Clip(q.Tokens), 3) },
		"another one": func(s *Step) { s.Sequences = append(s.Sequences, s.Sequences[0]); s.Sequences = s.Sequences[1:] },
		"logits":      func(s *Step) { s.Logits = true },
		"copy":        func(s *Step) { b := s.Sequences[1].Table.Blocks(); s.Copies = []kvcache.Copy{{Dst: b[6], Src: b[0]}} },
	} {
		var want string
		for _, ahead := range []bool{false, true} {
			r := newAheadRig(t, 3)
			for range 10 {
				r.step(func(s *Step) { s.Ahead = ahead })
			}
			before := r.p.Graphs()
			s := &Step{Sequences: slices.Clone(r.qs)}
			change(s)
			res, err := r.p.Step(t.Context(), s)
			check(t, err)
			got := fmt.Sprint(res.Sampled, res.LogProbs, len(res.Logits))
			if n := r.p.Graphs().Discarded - before.Discarded; ahead && n != 1 {
				t.Errorf("%s: %d steps were discarded", name, n)
			}
			if !ahead {
				want = got
			} else if got != want {
				t.Errorf("%s: %s, want %s", name, got, want)
			}
		}
	}
}

// TestAheadCalls: a step that was enqueued ahead calls Meanwhile once, before it has ended, and signals Done; used steps
// are counted when they are, and there is none where the step before took too long, or too many may end.
func TestAheadCalls(t *testing.T) {
	r := newAheadRig(t, 2)
	for range 9 {
		r.step(nil)
	}
	f, err := r.m.NewFence("done")
	check(t, err)
	calls, used := 0, r.p.Graphs().Ahead
	if _, ahead := r.step(func(s *Step) {
		s.Done = []device.Point{{Fence: f, Value: f.Value() + 1}}
		s.Meanwhile = func() {
			calls++
			if s.Done[0].Reached() {
				t.Error("Done is signaled before the step has ended")
			}
		}
	}); !ahead || calls != 1 || f.Value() != 1 {
		t.Errorf("ahead %v: Meanwhile called %d times, the fence is at %d", ahead, calls, f.Value())
	}
	if now := r.p.Graphs(); now.Ahead != used+1 || now.Discarded != 0 {
		t.Errorf("%+v behind %d steps used", now, used)
	}
	check(t, r.p.Discard(t.Context()))
	check(t, r.p.Discard(t.Context()))
	if now := r.p.Graphs(); now.Ahead != used+1 || now.Discarded != 1 {
		t.Errorf("%+v behind %d steps used, and one discarded", now, used)
	}
	for _, c := range []struct {
		took    time.Duration
		mayEnd  int
		partial bool
		want    bool
	}{{maxAheadStep, 1, false, true}, {maxAheadStep + 1, 0, true, false}, {maxAheadStep, 2, false, false}, {maxAheadStep / 2, 2, false, true}, {maxAheadStep, 2, true, true}} {
		r.step(func(s *Step) { s.Ahead = false })
		r.p.ahead.took = c.took
		if _, ahead := r.step(func(s *Step) { s.MayEnd, s.Partial = c.mayEnd, c.partial }); ahead != c.want {
			t.Errorf("%+v: enqueued ahead: %v", c, ahead)
		}
	}
	if w := trace.NewWriter(nopCloser{io.Discard}); true {
		r := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{Graphs: 16, Trace: w})
		r.ahead = true
		step := r.decoding(3)
		for at := range 20 {
			step(5 + at)
		}
		if n := r.p.tracer.steps; n != 20 || r.p.Graphs().Ahead > 0 {
			t.Errorf("a trace has %d steps of 20, of %+v", n, r.p.Graphs())
		}
	}
}

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }

// TestAheadNoToken: a sequence for which a step can sample none harms no other, though its next step is under way.
func TestAheadNoToken(t *testing.T) {
	var want []int32
	for _, ahead := range []bool{false, true} {
		r := newAheadRig(t, 3)
		run := func(s *Step) { s.Ahead, s.Partial = ahead, true }
		for range 9 {
			r.step(run)
		}
		check(t, r.p.Discard(t.Context()))
		at := r.p.o.KV.Region(r.qs[1].Table.Blocks()[0])
		mem, err := newPinned(&r.p.o, at.Bytes, "NaN")
		check(t, err)
		for b := mem.Write(0, at.Bytes); len(b) > 0; b = b[4:] {
			copy(b, []byte{0, 0, 0xc0, 0x7f})
		}
		check(t, mem.ToDevice(r.p.compute, at.Range, 0))
		check(t, r.p.compute.Synchronize(t.Context()))
		check(t, mem.Free())
		got, enqueued := r.step(run)
		if got[1] != -1 || enqueued != ahead {
			t.Fatalf("sampled %v, the next step is enqueued: %v", got, enqueued)
		}
		r.qs = slices.Delete(r.qs, 1, 2)
		for range 4 {
			sampled, _ := r.step(run)
			got = append(got, sampled...)
		}
		if !ahead {
			want = got
		} else if !slices.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	}
}
