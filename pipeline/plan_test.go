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

// shape parses a shape's layers: M for an MoE layer with offloaded experts, L for one whose
// experts are all resident, D for a dense layer.
func shape(layers string) Shape {
	s := Shape{MicroBatches: 1}
	for _, l := range layers {
		s.MoE, s.Offloaded = append(s.MoE, l != 'D'), append(s.Offloaded, l == 'M')
	}
	return s
}

// TestPlans prints plans: `on-demand layers=MLD microbatches=2 groups=2 [shared] [host] [cpu-experts]`.
func TestPlans(t *testing.T) {
	datadriven.RunTest(t, "testdata/plans", func(t *testing.T, d *datadriven.TestData) string {
		var layers string
		mbs, groups := 1, 0
		d.ScanArgs(t, "layers", &layers)
		d.MaybeScanArgs(t, "microbatches", &mbs)
		d.MaybeScanArgs(t, "groups", &groups)
		s := shape(layers)
		s.MicroBatches, s.Groups, s.SharedExpert, s.HostAttention = mbs, groups, d.HasArg("shared"), d.HasArg("host")
		s.CPUExperts = d.HasArg("cpu-experts")
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
}{{"layerwise", Layerwise}, {"on-demand", OnDemand}, {"overlapped-cpu-attention", OverlappedCPUAttention}, {"cgopipe", CGOPipe}, {"in-place", InPlace}}

// TestPlanOrder checks the order of actions that every plan must keep, over many shapes.
func TestPlanOrder(t *testing.T) {
	for _, layers := range []string{"M", "L", "D", "MM", "DM", "MD", "ML", "LM", "MDM", "LML", "DDMMD", "MLDLM", "MMMMMMM"} {
		for mbs := 1; mbs <= 5; mbs++ {
			s := shape(layers)
			s.MicroBatches, s.SharedExpert = mbs, mbs <= 2
			checkOrder(t, "layerwise", layers, s)
			for _, s.HostAttention = range []bool{false, true} {
				for _, s.CPUExperts = range []bool{true, false} {
					checkOrder(t, "on-demand", layers, s)
				}
				checkOrder(t, "cgopipe", layers, s)
				checkOrder(t, "in-place", layers, s)
			}
			s.HostAttention = true
			for s.Groups = 1; s.Groups <= min(3, mbs); s.Groups++ {
				checkOrder(t, "overlapped-cpu-attention", layers, s)
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
	// checked are the actions that a check has covered.
	checked map[Action]bool
}

// in requires that the plan contains these actions, in this order.
func (o *order) in(actions ...Action) {
	o.Helper()
	for i, b := range actions {
		o.checked[b] = true
		if _, ok := o.at[b]; !ok {
			o.Errorf("%s: %v is missing", o.what, b)
		} else if i > 0 && o.at[actions[i-1]] >= o.at[b] {
			o.Errorf("%s: %v must come before %v", o.what, actions[i-1], b)
		}
	}
}

func checkOrder(t *testing.T, name, layers string, s Shape) {
	t.Helper()
	o := &order{
		T: t, what: fmt.Sprintf("%s, %s, %d micro-batches, %d groups, host attention: %v", name, layers, s.MicroBatches, s.Groups, s.HostAttention),
		at: map[Action]int{}, checked: map[Action]bool{},
	}
	for _, p := range named {
		if p.name == name {
			o.plan = p.plan(s)
		}
	}
	for i, a := range o.plan {
		if _, twice := o.at[a]; twice && a.Kind != Prefetch && a.Kind != PagePrefetch {
			t.Fatalf("%s: %v occurs twice", o.what, a)
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
			attention, route := Action{Kind: Attention, Layer: l, MicroBatch: mb}, Action{Kind: Route, Layer: l, MicroBatch: mb}
			work := o.work(name, s, l, mb)
			if routesShared(name, s, l, mb) {
				route.Kind = RouteShared
			}
			if s.HostAttention {
				attention.Kind = ProjectQKV
				o.in(attention, Action{Kind: AwaitAttention, Layer: l, MicroBatch: mb}, route)
				if mb > 0 { // the host appends to the KV cache in the order of tokens
					o.in(Action{Kind: ProjectQKV, Layer: l, MicroBatch: mb - 1}, attention)
				}
			}
			o.in(append([]Action{before[mb], attention, route}, work...)...)
			before[mb] = work[len(work)-1]
		}
		o.slots(name, s, l)
	}
	for mb := range s.MicroBatches {
		o.in(before[mb], Action{Kind: Head, MicroBatch: mb})
	}
	if len(o.checked) != len(o.at) {
		t.Errorf("%s: %d different actions, %d of them checked:\n%s", o.what, len(o.at), len(o.checked), format(o.plan))
	}
}

// routesShared reports whether the router of a micro-batch and the shared expert are one action: where that runs on no
// other tokens, and nothing has to come between.
func routesShared(name string, s Shape, l, mb int) bool {
	alone := s.MicroBatches == 1 || name == "overlapped-cpu-attention" && s.microBatchesOf(s.groupOf(mb)) == 1
	return s.SharedExpert && s.MoE[l] && alone && name != "cgopipe" && !(name == "on-demand" && s.Offloaded[l])
}

// work returns the actions of a layer for a micro-batch after its router.
func (o *order) work(name string, s Shape, l, mb int) []Action {
	of := func(k Kind) Action { return Action{Kind: k, Layer: l} }
	group := 0
	if name == "overlapped-cpu-attention" {
		group = s.groupOf(mb)
	}
	switch {
	case name == "cgopipe":
		return []Action{{Kind: FeedForward, Layer: l, MicroBatch: mb}}
	case !s.MoE[l]:
		return []Action{{Kind: MLP, Layer: l, Group: group}}
	case name == "on-demand" && s.Offloaded[l]:
		if s.SharedExpert { // the device runs it while the host waits for the router
			o.in(of(RouterToHost), of(SharedExpert), of(FetchChosen))
		}
		predicted := -1
		for g := len(s.MoE) - 1; g > l; g-- {
			if s.MoE[g] && s.Offloaded[g] {
				predicted = g
			}
		}
		if predicted >= 0 {
			o.in(of(RouterToHost), Action{Kind: PredictNext, Layer: predicted}, of(RunResident))
			o.in(of(RunFetched), Action{Kind: PrefetchPredicted, Layer: predicted}, Action{Kind: ResolveOnDemand, Layer: predicted})
		}
		o.in(of(ResolveOnDemand), of(RunResident), of(FetchChosen))
		if s.CPUExperts {
			o.in(of(ComputeOnCPU), of(FetchChosen), of(RunFetched))
		}
		return []Action{of(RouterToHost), of(RunResident), of(FetchChosen), of(RunFetched)}
	}
	experts := Action{Kind: RoutedExperts, Layer: l, Group: group}
	if s.SharedExpert && !routesShared(name, s, l, mb) {
		return []Action{{Kind: SharedExpert, Layer: l, Group: group}, experts}
	}
	return []Action{experts}
}

// slots checks when a layer's experts are fetched and released.
func (o *order) slots(name string, s Shape, l int) {
	if !s.MoE[l] {
		return
	}
	next := nextMoE(s.MoE)[l]
	open, end := Action{Kind: Resolve, Layer: l}, Action{Kind: Release, Layer: l}
	if name == "on-demand" && s.Offloaded[l] {
		open.Kind = ResolveOnDemand
	}
	for mb := range s.MicroBatches {
		work := o.work(name, s, l, mb)
		o.in(open, work[len(work)-1], end)
	}
	if l+1 < len(s.MoE) && s.MoE[l+1] { // two layers are never open at once
		after := Action{Kind: Resolve, Layer: l + 1}
		if name == "on-demand" && s.Offloaded[l+1] {
			after.Kind = ResolveOnDemand
		}
		o.in(end, after)
	}
	// The next layer's missing experts are requested while this one is open.
	pages := 0
	for i, a := range o.plan {
		if (a.Kind == Prefetch || a.Kind == PagePrefetch) && a.Layer == next && i > o.at[open] && i < o.at[end] {
			o.checked[a] = true
			pages++
		}
	}
	want := 1
	switch name {
	case "on-demand", "in-place":
		want = 0
	case "cgopipe":
		want = s.MicroBatches
	}
	if pages != want {
		o.Errorf("%s: the experts of layer %d are requested %d times while layer %d is open, want %d", o.what, next, pages, l, want)
	}
}

// TestSmallBatch compares with the expected share of experts that a step's tokens select.
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
			t.Errorf("%d of %d experts: up to %d tokens, want %d", c.topK, c.experts, got, c.want)
		}
		if c.topK == 0 {
			continue
		}
		for tokens := 1; tokens < 30; tokens++ {
			share := 1 - math.Pow(1-float64(c.topK)/float64(c.experts), float64(tokens))
			if small := tokens <= SmallBatch(c.experts, c.topK); small != (share <= 0.75) {
				t.Errorf("%d of %d experts, %d tokens select %.3f of them, small: %v", c.topK, c.experts, tokens, share, small)
			}
		}
	}
}

// TestGroupLimits splits steps of all numbers of tokens: a group's tokens are within its
// limits, whatever the micro-batches, and no group has much more than the other.
func TestGroupLimits(t *testing.T) {
	const maxTokens = 70
	host := cpu.New(cpu.Options{Threads: 1})
	defer host.Close()
	for size := range maxTokens + 2 {
		for _, atLeast := range []int{0, 1, 2, 3, 4, 5, 14, maxTokens, maxTokens + 1} {
			o := Options{MicroBatchTokens: size, MicroBatches: atLeast, HostAttention: host}
			limit := o.GroupLimits(forward.Limits{MaxTokens: maxTokens}).MaxTokens
			batches := o.microBatching().maxBatches(maxTokens)
			for tokens := 1; tokens <= maxTokens; tokens++ {
				n, each := o.microBatching().split(tokens)
				s := Shape{MicroBatches: n, Groups: min(2, n)}
				var of [2]int
				for mb := range n {
					of[s.groupOf(mb)] += min(each, tokens-mb*each)
				}
				if of[0]+of[1] != tokens || max(of[0], of[1]) > limit || n > batches || size > 0 && each > size || n < 2 && tokens > 1 {
					t.Fatalf("%d tokens in micro-batches of at most %d, at least %d of them: %d of %d, groups of %d, at most %d in %d", tokens, size, atLeast, n, each, of, limit, batches)
				}
				if n < min(atLeast, tokens)/2 {
					t.Errorf("%d tokens in at least %d micro-batches: %d", tokens, atLeast, n)
				}
			}
		}
	}
}

// format prints a plan, one action per line.
func format(plan []Action) string {
	var b strings.Builder
	for _, a := range plan {
		b.WriteString(a.String())
		b.WriteByte('\n')
	}
	return b.String()
}
