package pipeline

import (
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// TestPlans prints plans: `layer-by-layer layers=MME microbatches=2 [shared]`, a
// letter per layer, M for one with experts and D for a dense one.
func TestPlans(t *testing.T) {
	datadriven.RunTest(t, "testdata/plans", func(t *testing.T, d *datadriven.TestData) string {
		s := Shape{MicroBatches: 1, SharedExpert: d.HasArg("shared")}
		for _, a := range d.CmdArgs {
			switch a.Key {
			case "layers":
				for _, l := range a.Vals[0] {
					s.MoE = append(s.MoE, l == 'M')
				}
			case "microbatches":
				n, err := strconv.Atoi(a.Vals[0])
				if err != nil {
					t.Fatal(err)
				}
				s.MicroBatches = n
			}
		}
		if d.Cmd != "layer-by-layer" {
			t.Fatalf("unknown command %q", d.Cmd)
		}
		return Format(LayerByLayer(s))
	})
}

// TestPlansKeepTheOrder checks, over many shapes, what every plan has to keep.
func TestPlansKeepTheOrder(t *testing.T) {
	for _, layers := range []string{"M", "D", "MM", "DM", "MD", "MDM", "DDMMD", "MMMMMMM"} {
		for mbs := 1; mbs <= 3; mbs++ {
			s := Shape{MicroBatches: mbs, SharedExpert: mbs == 2}
			for _, l := range layers {
				s.MoE = append(s.MoE, l == 'M')
			}
			at := map[Action]int{}
			plan := LayerByLayer(s)
			for i, a := range plan {
				if _, twice := at[a]; twice && a.Kind != Prefetch {
					t.Fatalf("%s mb=%d: %v stands twice", layers, mbs, a)
				}
				at[a] = i
			}
			before := func(a, b Action) {
				t.Helper()
				i, ok := at[a]
				j, ok2 := at[b]
				if !ok || !ok2 || i >= j {
					t.Errorf("%s mb=%d: %v (%v) must come before %v (%v)", layers, mbs, a, ok, b, ok2)
				}
			}
			for l, moe := range s.MoE {
				end := Action{Kind: MLP, Layer: l}
				if moe {
					end = Action{Kind: Experts, Layer: l}
					before(Action{Kind: Resolve, Layer: l}, end)
				}
				for mb := range mbs {
					before(Action{Kind: Upload, MicroBatch: mb}, Action{Kind: Embed, MicroBatch: mb})
					before(Action{Kind: Embed, MicroBatch: mb}, Action{Kind: Attend, Layer: 0, MicroBatch: mb})
					before(Action{Kind: Attend, Layer: l, MicroBatch: mb}, Action{Kind: Route, Layer: l, MicroBatch: mb})
					before(Action{Kind: Route, Layer: l, MicroBatch: mb}, end)
					if l+1 < len(s.MoE) {
						before(end, Action{Kind: Attend, Layer: l + 1, MicroBatch: mb})
					} else {
						before(end, Action{Kind: Head, MicroBatch: mb})
					}
				}
			}
			// Between a layer's Resolve and its Experts exactly the next MoE layer is
			// prefetched.
			var open []int
			for _, a := range plan {
				switch a.Kind {
				case Resolve:
					open = []int{a.Layer}
				case Prefetch:
					if len(open) != 1 || a.Layer != nextMoE(s.MoE)[open[0]] {
						t.Errorf("%s: prefetch of layer %d behind resolve of %v", layers, a.Layer, open)
					}
				}
			}
			if strings.Contains(layers, "M") == (open == nil) {
				t.Errorf("%s: resolved %v", layers, open)
			}
		}
	}
}
