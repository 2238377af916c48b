package pipeline

import (
	"math"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// shape reads a shape's layers: M for one with experts, some of which are missing, L
// for one whose experts are all local, D for a dense one.
func shape(layers string) Shape {
	s := Shape{MicroBatches: 1}
	for _, l := range layers {
		s.MoE, s.Missing = append(s.MoE, l != 'D'), append(s.Missing, l == 'M')
	}
	return s
}

// TestPlans prints plans: `chosen-only layers=MLD microbatches=2 [shared]`.
func TestPlans(t *testing.T) {
	datadriven.RunTest(t, "testdata/plans", func(t *testing.T, d *datadriven.TestData) string {
		var layers string
		mbs := 1
		d.ScanArgs(t, "layers", &layers)
		d.MaybeScanArgs(t, "microbatches", &mbs)
		s := shape(layers)
		s.MicroBatches, s.SharedExpert = mbs, d.HasArg("shared")
		switch d.Cmd {
		case "layer-by-layer":
			return Format(LayerByLayer(s))
		case "chosen-only":
			return Format(ChosenOnly(s))
		}
		t.Fatalf("unknown command %q", d.Cmd)
		return ""
	})
}

// TestPlansKeepTheOrder checks, over many shapes, what every plan has to keep.
func TestPlansKeepTheOrder(t *testing.T) {
	for _, layers := range []string{"M", "L", "D", "MM", "DM", "MD", "ML", "LM", "MDM", "LML", "DDMMD", "MLDLM", "MMMMMMM"} {
		for mbs := 1; mbs <= 3; mbs++ {
			s := shape(layers)
			s.MicroBatches, s.SharedExpert = mbs, mbs == 2
			keepsTheOrder(t, "layer by layer, "+layers, s, LayerByLayer(s), false)
			keepsTheOrder(t, "chosen only, "+layers, s, ChosenOnly(s), true)
		}
	}
}

func keepsTheOrder(t *testing.T, name string, s Shape, plan []Action, chosen bool) {
	t.Helper()
	at := map[Action]int{}
	for i, a := range plan {
		if _, twice := at[a]; twice && a.Kind != Prefetch {
			t.Fatalf("%s mb=%d: %v stands twice", name, s.MicroBatches, a)
		}
		at[a] = i
	}
	// inOrder takes actions that all stand in the plan, in this order.
	inOrder := func(actions ...Action) {
		t.Helper()
		for i, b := range actions {
			if _, ok := at[b]; !ok {
				t.Errorf("%s mb=%d: %v is missing", name, s.MicroBatches, b)
			} else if i > 0 && at[actions[i-1]] >= at[b] {
				t.Errorf("%s mb=%d: %v must come before %v", name, s.MicroBatches, actions[i-1], b)
			}
		}
	}
	next := nextMoE(s.MoE)
	n := 0 // actions accounted for
	for l, moe := range s.MoE {
		asks := chosen && s.Missing[l]
		of := func(k Kind) Action { return Action{Kind: k, Layer: l} }
		// What the layer does behind its router.
		var work []Action
		switch {
		case !moe:
			work = []Action{of(MLP)}
		case asks:
			work = []Action{of(Ask), of(Local), of(Choose), of(Fetched)}
			guessed := -1
			for g := len(s.MoE) - 1; g > l; g-- {
				if s.MoE[g] && s.Missing[g] {
					guessed = g
				}
			}
			if guessed >= 0 {
				inOrder(of(Ask), Action{Kind: Guess, Layer: guessed}, of(Local))
				inOrder(of(Fetched), Action{Kind: Hint, Layer: guessed}, Action{Kind: Open, Layer: guessed})
				n += 2
			}
			inOrder(of(Open), of(Choose))
			n++
		default:
			work = []Action{of(Experts)}
			inOrder(of(Resolve), of(Experts))
			n++
			if !chosen {
				if p := plan[at[of(Resolve)]+1]; p.Kind != Prefetch || p.Layer != next[l] {
					t.Errorf("%s: behind the resolve of layer %d stands %v", name, l, p)
				}
				n++
			}
		}
		if moe && s.SharedExpert {
			if asks { // the device has it to do while the host is asked
				inOrder(of(Ask), of(Shared), of(Choose))
			} else {
				inOrder(of(Shared), of(Experts))
			}
			n++
		}
		inOrder(work...)
		n += len(work)
		for mb := range s.MicroBatches {
			attend, route := Action{Attend, l, mb}, Action{Route, l, mb}
			inOrder(Action{Kind: Upload, MicroBatch: mb}, Action{Kind: Embed, MicroBatch: mb}, attend, route, work[0])
			if l+1 < len(s.MoE) {
				inOrder(work[len(work)-1], Action{Attend, l + 1, mb})
			}
			inOrder(work[len(work)-1], Action{Kind: Head, MicroBatch: mb})
			n += 2
		}
	}
	if n += 3 * s.MicroBatches; n != len(plan) {
		t.Errorf("%s mb=%d: %d actions, want %d:\n%s", name, s.MicroBatches, len(plan), n, Format(plan))
	}
}

// TestSmallBatch compares with the share of experts that the rows of a step choose.
func TestSmallBatch(t *testing.T) {
	for _, c := range []struct{ experts, topK, want int }{
		{8, 2, 4},
		{16, 2, 10},
		{60, 4, 20},
		{64, 8, 10},
		{128, 8, 21},
		{4, 2, 2},
		{4, 3, 1},
		{8, 8, 0},
		{1, 1, 0},
		{0, 0, 0},
		{8, 0, 0},
	} {
		if got := SmallBatch(c.experts, c.topK); got != c.want {
			t.Errorf("%d of %d experts: up to %d rows, want %d", c.topK, c.experts, got, c.want)
		}
		if c.topK == 0 {
			continue
		}
		for rows := 1; rows < 30; rows++ {
			share := 1 - math.Pow(1-float64(c.topK)/float64(c.experts), float64(rows))
			if small := rows <= SmallBatch(c.experts, c.topK); small != (share <= 0.75) {
				t.Errorf("%d of %d experts, %d rows choose %.3f of them, and that is small: %v", c.topK, c.experts, rows, share, small)
			}
		}
	}
}
