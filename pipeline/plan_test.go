package pipeline

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/kernels/cpu"
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

// TestPlans prints plans: `chosen-only layers=MLD microbatches=2 groups=2 [shared] [host]`.
func TestPlans(t *testing.T) {
	datadriven.RunTest(t, "testdata/plans", func(t *testing.T, d *datadriven.TestData) string {
		var layers string
		mbs, groups := 1, 0
		d.ScanArgs(t, "layers", &layers)
		d.MaybeScanArgs(t, "microbatches", &mbs)
		d.MaybeScanArgs(t, "groups", &groups)
		s := shape(layers)
		s.MicroBatches, s.Groups, s.SharedExpert, s.HostAttention = mbs, groups, d.HasArg("shared"), d.HasArg("host")
		for _, p := range named {
			if p.name == d.Cmd {
				return format(p.plan(s))
			}
		}
		t.Fatalf("unknown command %q", d.Cmd)
		return ""
	})
}

var named = []struct {
	name string
	plan func(Shape) []Action
}{{"layer-by-layer", Layerwise}, {"chosen-only", OnDemand}, {"ping-pong", OverlappedCPUAttention}, {"micro-batchwise", CGOPipe}}

// TestPlansKeepTheOrder checks, over many shapes, what every plan has to keep.
func TestPlansKeepTheOrder(t *testing.T) {
	for _, layers := range []string{"M", "L", "D", "MM", "DM", "MD", "ML", "LM", "MDM", "LML", "DDMMD", "MLDLM", "MMMMMMM"} {
		for mbs := 1; mbs <= 5; mbs++ {
			s := shape(layers)
			s.MicroBatches, s.SharedExpert = mbs, mbs == 2
			keepsTheOrder(t, "layer-by-layer", layers, s)
			for _, s.HostAttention = range []bool{false, true} {
				keepsTheOrder(t, "chosen-only", layers, s)
				keepsTheOrder(t, "micro-batchwise", layers, s)
			}
			s.HostAttention = true
			for s.Groups = 1; s.Groups <= min(3, mbs); s.Groups++ {
				keepsTheOrder(t, "ping-pong", layers, s)
			}
		}
	}
}

// order is a plan being checked.
type order struct {
	*testing.T
	what string
	plan []Action
	at   map[Action]int
	// known counts the actions that the check knows of.
	known map[Action]bool
}

// in takes actions that all stand in the plan, in this order.
func (o *order) in(actions ...Action) {
	o.Helper()
	for i, b := range actions {
		o.known[b] = true
		if _, ok := o.at[b]; !ok {
			o.Errorf("%s: %v is missing", o.what, b)
		} else if i > 0 && o.at[actions[i-1]] >= o.at[b] {
			o.Errorf("%s: %v must come before %v", o.what, actions[i-1], b)
		}
	}
}

func keepsTheOrder(t *testing.T, name, layers string, s Shape) {
	t.Helper()
	o := &order{
		T: t, what: fmt.Sprintf("%s, %s, %d micro-batches, %d groups, attention on the host: %v", name, layers, s.MicroBatches, s.Groups, s.HostAttention),
		at: map[Action]int{}, known: map[Action]bool{},
	}
	for _, p := range named {
		if p.name == name {
			o.plan = p.plan(s)
		}
	}
	for i, a := range o.plan {
		if _, twice := o.at[a]; twice && a.Kind != Prefetch && a.Kind != PagePrefetch {
			t.Fatalf("%s: %v stands twice", o.what, a)
		}
		o.at[a] = i
	}
	before := make([]Action, s.MicroBatches) // the last action of each micro-batch's layer before
	for mb := range before {
		before[mb] = Action{Kind: Embed, MicroBatch: mb}
		o.in(Action{Kind: Upload, MicroBatch: mb}, before[mb])
	}
	for l := range s.MoE {
		for mb := range s.MicroBatches {
			attend, route := Action{Kind: Attend, Layer: l, MicroBatch: mb}, Action{Kind: Route, Layer: l, MicroBatch: mb}
			work := o.work(name, s, l, mb)
			if s.HostAttention {
				attend.Kind = Project
				o.in(attend, Action{Kind: AwaitAttention, Layer: l, MicroBatch: mb}, route)
				if mb > 0 { // the host appends in the order of rows
					o.in(Action{Kind: Project, Layer: l, MicroBatch: mb - 1}, attend)
				}
			}
			o.in(append([]Action{before[mb], attend, route}, work...)...)
			before[mb] = work[len(work)-1]
		}
		o.slots(name, s, l)
	}
	for mb := range s.MicroBatches {
		o.in(before[mb], Action{Kind: Head, MicroBatch: mb})
	}
	if len(o.known) != len(o.at) {
		t.Errorf("%s: %d different actions, and %d are known:\n%s", o.what, len(o.at), len(o.known), format(o.plan))
	}
}

// work is what a layer does with a micro-batch behind its router.
func (o *order) work(name string, s Shape, l, mb int) []Action {
	of := func(k Kind) Action { return Action{Kind: k, Layer: l} }
	group := 0
	if name == "ping-pong" {
		group = s.group(mb)
	}
	switch {
	case name == "micro-batchwise":
		return []Action{{Kind: FeedForward, Layer: l, MicroBatch: mb}}
	case !s.MoE[l]:
		return []Action{{Kind: MLP, Layer: l, Group: group}}
	case name == "chosen-only" && s.Missing[l]:
		if s.SharedExpert { // the device has it to do while the host is asked
			o.in(of(RouterToHost), of(Shared), of(FetchChosen))
		}
		guessed := -1
		for g := len(s.MoE) - 1; g > l; g-- {
			if s.MoE[g] && s.Missing[g] {
				guessed = g
			}
		}
		if guessed >= 0 {
			o.in(of(RouterToHost), Action{Kind: PredictNext, Layer: guessed}, of(RunResident))
			o.in(of(RunFetched), Action{Kind: PrefetchPredicted, Layer: guessed}, Action{Kind: Open, Layer: guessed})
		}
		o.in(of(Open), of(RunResident), of(FetchChosen))
		return []Action{of(RouterToHost), of(RunResident), of(FetchChosen), of(RunFetched)}
	}
	experts := Action{Kind: Experts, Layer: l, Group: group}
	if s.SharedExpert {
		return []Action{{Kind: Shared, Layer: l, Group: group}, experts}
	}
	return []Action{experts}
}

// slots checks when a layer's experts are fetched and given up.
func (o *order) slots(name string, s Shape, l int) {
	if !s.MoE[l] {
		return
	}
	next := nextMoE(s.MoE)[l]
	open, end := Action{Kind: Resolve, Layer: l}, Action{Kind: Close, Layer: l}
	if name == "chosen-only" && s.Missing[l] {
		open.Kind = Open
	}
	for mb := range s.MicroBatches {
		work := o.work(name, s, l, mb)
		o.in(open, work[len(work)-1], end)
	}
	if l+1 < len(s.MoE) && s.MoE[l+1] { // two layers are never open at once
		after := Action{Kind: Resolve, Layer: l + 1}
		if name == "chosen-only" && s.Missing[l+1] {
			after.Kind = Open
		}
		o.in(end, after)
	}
	// What the next layer misses is asked for while this one is open.
	pages := 0
	for i, a := range o.plan {
		if (a.Kind == Prefetch || a.Kind == PagePrefetch) && a.Layer == next && i > o.at[open] && i < o.at[end] {
			o.known[a] = true
			pages++
		}
	}
	want := 1
	switch name {
	case "chosen-only":
		want = 0
	case "micro-batchwise":
		want = s.MicroBatches
	}
	if pages != want {
		o.Errorf("%s: the experts of layer %d are asked for %d times while layer %d is open, want %d", o.what, next, pages, l, want)
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

// TestGroupLimits cuts steps of all numbers of rows: what falls to a group is within its
// limits, whatever the micro-batches, and no group has much more than the other.
func TestGroupLimits(t *testing.T) {
	const most = 70
	host := cpu.New(cpu.Options{Threads: 1})
	defer host.Close()
	for size := range most + 2 {
		for _, atLeast := range []int{0, 1, 2, 3, 4, 5, 14, most, most + 1} {
			o := Options{MicroBatchTokens: size, MicroBatches: atLeast, HostAttention: host}
			limit := o.GroupLimits(forward.Limits{MaxTokens: most}).MaxTokens
			batches := o.cutting().most(most)
			for rows := 1; rows <= most; rows++ {
				n, each := o.cutting().of(rows)
				s := Shape{MicroBatches: n, Groups: min(2, n)}
				var of [2]int
				for mb := range n {
					of[s.group(mb)] += min(each, rows-mb*each)
				}
				if of[0]+of[1] != rows || max(of[0], of[1]) > limit || n > batches || size > 0 && each > size || n < 2 && rows > 1 {
					t.Fatalf("%d rows in micro-batches of at most %d, at least %d of them: %d of %d, groups of %d, at most %d in %d", rows, size, atLeast, n, each, of, limit, batches)
				}
				if n < min(atLeast, rows)/2 {
					t.Errorf("%d rows in at least %d micro-batches: %d", rows, atLeast, n)
				}
			}
		}
	}
}

// format prints a plan, an action a line.
func format(plan []Action) string {
	var b strings.Builder
	for _, a := range plan {
		b.WriteString(a.String())
		b.WriteByte('\n')
	}
	return b.String()
}
