package pipeline

import "fmt"

// Kind is what one action of a plan does.
type Kind uint8

// The actions, in the order in which a token meets them.
const (
	// Upload sends a micro-batch's row data to the device.
	Upload Kind = iota
	// Embed looks up a micro-batch's tokens.
	Embed
	// Resolve finds out where a layer's experts are, has all fetched that are missing,
	// and sends their addresses to the device.
	Resolve
	// Open does the same for a layer of which only chosen experts are fetched: none so
	// far.
	Open
	// Prefetch submits the copies of a layer's missing experts.
	Prefetch
	// PagePrefetch submits a micro-batch's share of these copies: as many pages as there are
	// micro-batches make up what the layer misses.
	PagePrefetch
	// Attend runs a micro-batch's attention block: norm (unless the experts of the layer
	// before have ended with it), q, k, v, RoPE, KV append, attention.
	Attend
	// Project runs a micro-batch's attention block as far as q, k and v, and sends these
	// to the host, which appends to the cache and attends, and whose result comes back:
	// nothing waits for it yet.
	Project
	// AwaitAttention waits for what Project has the host do.
	AwaitAttention
	// Route runs what follows attention: output projection, norm, and for an MoE
	// layer the router.
	Route
	// RouterToHost sends what a layer's router chose to the host.
	RouterToHost
	// PredictNext runs a later layer's router on today's hidden state, and sends what it
	// chose to the host.
	PredictNext
	// Shared runs a layer's shared expert on a group, which needs no fetched weights.
	Shared
	// Experts sorts a group's rows by expert and runs a layer's routed experts, wave
	// after wave, each wave behind its own copies, or all at once behind all copies, then
	// combines them and norms the result for the next layer.
	Experts
	// RunResident groups rows by expert and runs those of a layer's routed experts that are
	// local.
	RunResident
	// FetchChosen waits on the host for what Ask sends, and submits the copies of the
	// chosen experts that are missing.
	FetchChosen
	// RunFetched runs a layer's chosen experts that are not local, wave after wave, each
	// wave behind its own copies, then combines all and norms the result for the next layer.
	RunFetched
	// Close ends the use of a layer's experts: their slots may be overwritten.
	Close
	// PrefetchPredicted waits on the host for what Guess sends, and submits the copies of the
	// experts of that layer that are missing.
	PrefetchPredicted
	// MLP runs the feed-forward block of a dense layer on a group.
	MLP
	// FeedForward runs a micro-batch's whole feed-forward block, whatever the layer has:
	// what Shared and Experts, or MLP, do for a group.
	FeedForward
	// Head computes logits and samples.
	Head
)

var kindNames = [...]string{
	"upload", "embed", "resolve", "open", "prefetch", "page-prefetch", "attend", "project", "await-attention", "route", "router-to-host", "predict-next",
	"shared", "experts", "run-resident", "fetch-chosen", "run-fetched", "close", "prefetch-predicted", "mlp", "feed-forward", "head",
}

func (k Kind) String() string { return kindNames[k] }

// computes says whether an action gives the compute stream something to compute.
func (k Kind) computes() bool {
	switch k {
	case Embed, Attend, Project, Route, PredictNext, Shared, Experts, RunResident, RunFetched, MLP, FeedForward, Head:
		return true
	}
	return false
}

// endsLayer says whether nothing of a layer follows for the rows that an action is for.
func (k Kind) endsLayer() bool {
	switch k {
	case Experts, RunFetched, MLP, FeedForward:
		return true
	}
	return false
}

// perMicroBatch says whether an action is for a micro-batch, and not for a group or for all.
func (k Kind) perMicroBatch() bool {
	switch k {
	case Upload, Embed, PagePrefetch, Attend, Project, AwaitAttention, Route, FeedForward, Head:
		return true
	}
	return false
}

// Action is one entry of a step plan. Layer, MicroBatch, Group and Pages count only where
// the kind has them.
type Action struct {
	Kind       Kind
	Layer      int
	MicroBatch int
	Group      int
	// Pages that a layer's copies are in, of which the micro-batch's is one.
	Pages int
}

func (a Action) String() string {
	switch a.Kind {
	case Upload, Embed, Head:
		return fmt.Sprintf("%s mb=%d", a.Kind, a.MicroBatch)
	case PagePrefetch, Attend, Project, AwaitAttention, Route, FeedForward:
		return fmt.Sprintf("%s layer=%d mb=%d", a.Kind, a.Layer, a.MicroBatch)
	case Shared, Experts, MLP:
		if a.Group > 0 {
			return fmt.Sprintf("%s layer=%d group=%d", a.Kind, a.Layer, a.Group)
		}
	}
	return fmt.Sprintf("%s layer=%d", a.Kind, a.Layer)
}

// Shape is what a plan depends on.
type Shape struct {
	// MoE says of each layer whether it has experts.
	MoE []bool
	// Missing says of each layer whether it has experts that are not local. Only
	// OnDemand looks at it.
	Missing []bool
	// SharedExpert says whether MoE layers have one beside the routed ones.
	SharedExpert bool
	// MicroBatches the step is cut into, at least 1.
	MicroBatches int
	// Groups are into how many merge groups these are cut, at most MicroBatches. 0: one.
	Groups int
	// HostAttention says that the host attends, beside keys and values in its memory.
	HostAttention bool
}

func (s Shape) groups() int { return max(1, s.Groups) }

// first is the first micro-batch of a group; behind the last group it is MicroBatches.
// Where they cannot have as many each, the first groups have one more.
func (s Shape) first(group int) int { return (group*s.MicroBatches + s.groups() - 1) / s.groups() }

// group of a micro-batch.
func (s Shape) group(mb int) int {
	g := 0
	for s.first(g+1) <= mb {
		g++
	}
	return g
}

// Layerwise is the plan of a step in which every layer is finished over all
// rows before the next begins: attention per micro-batch, experts once over the
// rows of all of them, and the next MoE layer's missing experts on their way while
// this one computes. A layer's own are submitted when it is resolved, before its
// attention, unless the layer before has prefetched them; the last MoE layer
// prefetches the first one's for the step that follows.
func Layerwise(s Shape) []Action {
	next := nextMoE(s.MoE)
	return s.plan(func(p []Action, layer int) []Action {
		p = append(p, Action{Kind: Resolve, Layer: layer}, Action{Kind: Prefetch, Layer: next[layer]})
		return s.experts(s.attention(p, layer), layer)
	})
}

// OverlappedCPUAttention is the plan of a step in which the host attends: as Layerwise, but with
// the micro-batches in merge groups, normally two. While the device runs the experts
// of one group, the host attends for the other. Both use a layer's experts before its
// slots are given up, so each expert is fetched once.
func OverlappedCPUAttention(s Shape) []Action {
	next := nextMoE(s.MoE)
	project := func(p []Action, layer, group int) []Action {
		for mb := s.first(group); layer < len(s.MoE) && mb < s.first(group+1); mb++ {
			p = append(p, Action{Kind: Project, Layer: layer, MicroBatch: mb})
		}
		return p
	}
	p := s.begin()
	for g := range s.groups() {
		p = project(p, 0, g)
	}
	for layer, moe := range s.MoE {
		if moe {
			p = append(p, Action{Kind: Resolve, Layer: layer}, Action{Kind: Prefetch, Layer: next[layer]})
		}
		for g := range s.groups() {
			for mb := s.first(g); mb < s.first(g+1); mb++ {
				p = append(p, Action{Kind: AwaitAttention, Layer: layer, MicroBatch: mb}, Action{Kind: Route, Layer: layer, MicroBatch: mb})
			}
			switch {
			case !moe:
				p = append(p, Action{Kind: MLP, Layer: layer, Group: g})
			case s.SharedExpert:
				p = append(p, Action{Kind: Shared, Layer: layer, Group: g}, Action{Kind: Experts, Layer: layer, Group: g})
			default:
				p = append(p, Action{Kind: Experts, Layer: layer, Group: g})
			}
			if moe && g == s.groups()-1 {
				p = append(p, Action{Kind: Close, Layer: layer})
			}
			p = project(p, layer+1, g)
		}
	}
	return s.end(p)
}

// CGOPipe is the plan of a step in the order that CGOPipe has (MoE-Lightning,
// section 4.1): a layer's experts run once per micro-batch, and pages of what the next
// layer misses are copied between the micro-batches. Where the host attends, it is
// given a micro-batch's q, k and v two micro-batches before the device needs the
// result. It is here to be compared with: an expert is read from the device's memory
// as often as there are micro-batches.
func CGOPipe(s Shape) []Action {
	const lead = 2 // micro-batches that the host is ahead
	next := nextMoE(s.MoE)
	n := s.MicroBatches
	p := s.begin()
	// project is for the turn-th of all micro-batches of all layers.
	project := func(p []Action, turn int) []Action {
		if !s.HostAttention || turn >= n*len(s.MoE) {
			return p
		}
		return append(p, Action{Kind: Project, Layer: turn / n, MicroBatch: turn % n})
	}
	for turn := range min(lead, n) {
		p = project(p, turn)
	}
	for layer, moe := range s.MoE {
		if moe {
			p = append(p, Action{Kind: Resolve, Layer: layer})
		}
		for mb := range n {
			attend := Attend
			if s.HostAttention {
				attend = AwaitAttention
			}
			p = append(p, Action{Kind: attend, Layer: layer, MicroBatch: mb})
			if moe {
				p = append(p, Action{Kind: PagePrefetch, Layer: next[layer], MicroBatch: mb, Pages: n})
			}
			p = append(p, Action{Kind: Route, Layer: layer, MicroBatch: mb}, Action{Kind: FeedForward, Layer: layer, MicroBatch: mb})
			if moe && mb == n-1 {
				p = append(p, Action{Kind: Close, Layer: layer})
			}
			p = project(p, layer*n+mb+min(lead, n))
		}
	}
	return s.end(p)
}

// OnDemand is the plan of a step of few rows (see SmallBatch): as Layerwise, but
// of a layer's missing experts only those are fetched that its router chose. So the
// host has to see the choice. While it comes and the copies are on their way, the
// device guesses what the router of the next layer with missing experts will choose,
// and runs the layer's shared expert and its local ones. The guess is asked for
// behind the choice, and answered once the layer's own work is enqueued, so that it
// delays neither. Layers that miss nothing do not ask. The last layer that does
// guesses nothing: the tokens of the next step are not known yet.
func OnDemand(s Shape) []Action {
	next := make([]int, len(s.MoE)) // layer with missing experts, -1: none
	n := -1
	for layer := len(s.MoE) - 1; layer >= 0; layer-- {
		next[layer] = n
		if s.MoE[layer] && s.Missing[layer] {
			n = layer
		}
	}
	return s.plan(func(p []Action, layer int) []Action {
		if !s.Missing[layer] {
			return s.experts(s.attention(append(p, Action{Kind: Resolve, Layer: layer}), layer), layer)
		}
		p = s.attention(append(p, Action{Kind: Open, Layer: layer}), layer)
		p = append(p, Action{Kind: RouterToHost, Layer: layer})
		if next[layer] >= 0 {
			p = append(p, Action{Kind: PredictNext, Layer: next[layer]})
		}
		p = append(s.shared(p, layer), Action{Kind: RunResident, Layer: layer}, Action{Kind: FetchChosen, Layer: layer},
			Action{Kind: RunFetched, Layer: layer}, Action{Kind: Close, Layer: layer})
		if next[layer] >= 0 {
			p = append(p, Action{Kind: PrefetchPredicted, Layer: next[layer]})
		}
		return p
	})
}

// SmallBatch is the most rows of a step for which OnDemand is worth its waits, of a
// model that chooses topK of so many experts for each row: with more, the rows would
// choose more than three quarters of a layer's experts, 1 - (1 - topK/experts)^rows,
// if the router liked all of them as much. 0: no step is small enough.
func SmallBatch(experts, topK int) int {
	rows := 0
	if experts < 1 || topK < 1 {
		return rows
	}
	for left := 1.0; ; rows++ {
		if left *= 1 - float64(topK)/float64(experts); left < 0.25 {
			return rows
		}
	}
}

// plan is a step in which every layer is finished over all rows before the next
// begins. moe appends what a layer with experts does.
func (s Shape) plan(moe func(p []Action, layer int) []Action) []Action {
	p := s.begin()
	for layer := range s.MoE {
		if s.MoE[layer] {
			p = moe(p, layer)
		} else {
			p = append(s.attention(p, layer), Action{Kind: MLP, Layer: layer})
		}
	}
	return s.end(p)
}

func (s Shape) begin() []Action {
	var p []Action
	for mb := range s.MicroBatches {
		p = append(p, Action{Kind: Upload, MicroBatch: mb})
	}
	for mb := range s.MicroBatches {
		p = append(p, Action{Kind: Embed, MicroBatch: mb})
	}
	return p
}

func (s Shape) end(p []Action) []Action {
	for mb := range s.MicroBatches {
		p = append(p, Action{Kind: Head, MicroBatch: mb})
	}
	return p
}

func (s Shape) attention(p []Action, layer int) []Action {
	if s.HostAttention {
		for mb := range s.MicroBatches {
			p = append(p, Action{Kind: Project, Layer: layer, MicroBatch: mb})
		}
	}
	for mb := range s.MicroBatches {
		attend := Attend
		if s.HostAttention {
			attend = AwaitAttention
		}
		p = append(p, Action{Kind: attend, Layer: layer, MicroBatch: mb}, Action{Kind: Route, Layer: layer, MicroBatch: mb})
	}
	return p
}

func (s Shape) shared(p []Action, layer int) []Action {
	if s.SharedExpert {
		p = append(p, Action{Kind: Shared, Layer: layer})
	}
	return p
}

func (s Shape) experts(p []Action, layer int) []Action {
	return append(s.shared(p, layer), Action{Kind: Experts, Layer: layer}, Action{Kind: Close, Layer: layer})
}

// nextMoE says for each layer which MoE layer comes next, counting on from the
// last layer to the first; -1 where the model has none.
func nextMoE(moe []bool) []int {
	next := make([]int, len(moe))
	n := -1
	for i := 2*len(moe) - 1; i >= 0; i-- {
		if i < len(moe) {
			next[i] = n
		}
		if moe[i%len(moe)] {
			n = i % len(moe)
		}
	}
	return next
}
