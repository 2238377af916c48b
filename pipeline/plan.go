package pipeline

import "fmt"

// Kind is the kind of an action.
type Kind uint8

// The kinds, in the order in which they occur in a step.
const (
	// Upload copies a micro-batch's metadata to the device.
	Upload Kind = iota
	// Embed looks up the embeddings of a micro-batch's tokens.
	Embed
	// Resolve finds a layer's experts, submits the fetches of all that are missing, and
	// uploads the table of their addresses.
	Resolve
	// ResolveOnDemand is Resolve for a layer of which only routed experts are fetched; it
	// submits no fetches.
	ResolveOnDemand
	// Prefetch submits the fetches of a layer's missing experts.
	Prefetch
	// PagePrefetch submits a micro-batch's share of these fetches, one page: a layer's
	// missing experts are divided into as many pages as there are micro-batches.
	PagePrefetch
	// Attention runs a micro-batch's attention block on the device: norm (unless the previous
	// layer's experts included it), q, k, v, RoPE, KV append, attention.
	Attention
	// ProjectQKV runs a micro-batch's attention block up to q, k and v, and enqueues the rest
	// on the host: copy to pinned memory, KV append, attention, copy of the output to the
	// device. Nothing waits for the output yet.
	ProjectQKV
	// AwaitAttention waits for the output of attention on the host.
	AwaitAttention
	// Route runs what follows attention: output projection, norm, and, in an MoE layer, the
	// router.
	Route
	// RouteShared is Route of a micro-batch that is all of its group, and SharedExpert of that
	// group: the router and the shared expert may run at the same time.
	RouteShared
	// RouterToHost copies the expert ids that a layer's router selected to the host.
	RouterToHost
	// PredictNext runs a later layer's router on the current hidden state, and copies the
	// expert ids that it selects to the host.
	PredictNext
	// SharedExpert runs a layer's shared expert on a group. Its weights are always resident.
	SharedExpert
	// RoutedExperts sorts a group's tokens by expert and runs a layer's routed experts, wave
	// by wave, each behind its own copies, or all in one launch behind all copies. Then it
	// combines the outputs and applies the next layer's norm.
	RoutedExperts
	// RunResident groups tokens by expert and runs the layer's resident routed experts.
	RunResident
	// ComputeOnCPU waits on the host for the ids of RouterToHost, and starts, on the CPU, those of
	// the layer's routed experts that it computes where they lie.
	ComputeOnCPU
	// FetchChosen waits as ComputeOnCPU does, where that is not in the plan, and submits the fetches
	// of the other routed experts that are missing.
	FetchChosen
	// RunFetched runs the layer's other routed experts, wave by wave, each behind its own
	// copies, and copies the outputs of the CPU's to the device. Then it combines the outputs of all
	// and applies the next layer's norm.
	RunFetched
	// Release ends the use of a layer's experts: their expert cache slots may be overwritten.
	Release
	// PrefetchPredicted waits on the host for the ids of PredictNext, and submits the fetches
	// of those experts that are missing.
	PrefetchPredicted
	// MLP runs the feed-forward block of a dense layer on a group.
	MLP
	// FeedForward runs a micro-batch's feed-forward block: as SharedExpert and RoutedExperts,
	// or MLP, do for a group.
	FeedForward
	// Head computes logits and samples tokens.
	Head
)

var kindNames = [...]string{
	"upload", "embed", "resolve", "resolve-on-demand", "prefetch", "page-prefetch", "attention", "project-qkv", "await-attention", "route", "route-shared", "router-to-host", "predict-next",
	"shared-expert", "routed-experts", "run-resident", "compute-on-cpu", "fetch-chosen", "run-fetched", "release", "prefetch-predicted", "mlp", "feed-forward", "head",
}

func (k Kind) String() string { return kindNames[k] }

// launchesKernels reports whether an action enqueues kernels on the compute stream.
func (k Kind) launchesKernels() bool {
	switch k {
	case Embed, Attention, ProjectQKV, Route, RouteShared, PredictNext, SharedExpert, RoutedExperts, RunResident, RunFetched, MLP, FeedForward, Head:
		return true
	}
	return false
}

// endsLayer reports whether an action is the last of a layer for its tokens.
func (k Kind) endsLayer() bool {
	switch k {
	case RoutedExperts, RunFetched, MLP, FeedForward:
		return true
	}
	return false
}

// perMicroBatch reports whether an action is for one micro-batch, rather than for a group or
// the whole step.
func (k Kind) perMicroBatch() bool {
	switch k {
	case Upload, Embed, PagePrefetch, Attention, ProjectQKV, AwaitAttention, Route, RouteShared, FeedForward, Head:
		return true
	}
	return false
}

// Action is one entry of a plan. The fields Layer, MicroBatch, Group and Pages are used by
// kinds that need them.
type Action struct {
	Kind       Kind
	Layer      int
	MicroBatch int
	Group      int
	// Pages is the number of pages of a PagePrefetch.
	Pages int
}

func (a Action) String() string {
	switch a.Kind {
	case Upload, Embed, Head:
		return fmt.Sprintf("%s mb=%d", a.Kind, a.MicroBatch)
	case PagePrefetch, Attention, ProjectQKV, AwaitAttention, Route, RouteShared, FeedForward:
		return fmt.Sprintf("%s layer=%d mb=%d", a.Kind, a.Layer, a.MicroBatch)
	case SharedExpert, RoutedExperts, MLP:
		if a.Group > 0 {
			return fmt.Sprintf("%s layer=%d group=%d", a.Kind, a.Layer, a.Group)
		}
	}
	return fmt.Sprintf("%s layer=%d", a.Kind, a.Layer)
}

// Shape is the input of a plan.
type Shape struct {
	// MoE: whether each layer has routed experts.
	MoE []bool
	// Offloaded: whether each layer has offloaded experts. Only OnDemand uses it.
	Offloaded []bool
	// SharedExpert: whether MoE layers have a shared expert beside the routed ones.
	SharedExpert bool
	// MicroBatches is the number of micro-batches, at least 1.
	MicroBatches int
	// Groups is the number of merge groups, at most MicroBatches. 0: one.
	Groups int
	// HostAttention: the host computes attention, with the KV cache in its memory.
	HostAttention bool
	// CPUExperts: the CPU computes some of the experts in host memory. Only OnDemand uses it.
	CPUExperts bool
	// Unpredicted: no experts are predicted for the next layer, since none would be fetched. Only OnDemand uses it.
	Unpredicted bool
	// RouteInExperts: routed experts wait for nothing and nothing else reads what the router selected, so their kernels may select them.
	RouteInExperts bool
}

func (s Shape) groups() int { return max(1, s.Groups) }

// firstMicroBatch of a group; for the number of groups it returns MicroBatches. Where the
// micro-batches cannot be divided evenly, the first groups have one more.
func (s Shape) firstMicroBatch(group int) int {
	return (group*s.MicroBatches + s.groups() - 1) / s.groups()
}

// microBatchesOf returns the number of micro-batches of a group.
func (s Shape) microBatchesOf(group int) int {
	return s.firstMicroBatch(group+1) - s.firstMicroBatch(group)
}

// groupOf returns the group of a micro-batch.
func (s Shape) groupOf(mb int) int {
	g := 0
	for s.firstMicroBatch(g+1) <= mb {
		g++
	}
	return g
}

// Layerwise is the plan of a step that finishes each layer for all tokens before the next
// begins: attention per micro-batch, then experts once over the tokens of all micro-batches.
// The next MoE layer's missing experts are fetched while this layer computes. A layer's own
// missing experts are submitted when it is resolved, before its attention, unless the layer
// before has prefetched them. The last MoE layer prefetches those of the first for the
// following step.
func Layerwise(s Shape) []Action {
	next := nextMoE(s.MoE)
	return s.layers(func(p []Action, layer int) []Action {
		p = append(p, Action{Kind: Resolve, Layer: layer}, Action{Kind: Prefetch, Layer: next[layer]})
		return s.moeLayer(p, layer)
	})
}

// OverlappedCPUAttention is the plan of a step with attention on the host: as Layerwise, but
// with the micro-batches in merge groups, normally two. While the device runs the experts of
// one group, the host computes attention for the other. Both groups use a layer's experts
// before the slots are released, so each expert is fetched once.
func OverlappedCPUAttention(s Shape) []Action {
	next := nextMoE(s.MoE)
	project := func(p []Action, layer, group int) []Action {
		for mb := s.firstMicroBatch(group); layer < len(s.MoE) && mb < s.firstMicroBatch(group+1); mb++ {
			p = append(p, Action{Kind: ProjectQKV, Layer: layer, MicroBatch: mb})
		}
		return p
	}
	p := s.prologue()
	for g := range s.groups() {
		p = project(p, 0, g)
	}
	for layer, moe := range s.MoE {
		if moe {
			p = append(p, Action{Kind: Resolve, Layer: layer}, Action{Kind: Prefetch, Layer: next[layer]})
		}
		for g := range s.groups() {
			for mb := s.firstMicroBatch(g); mb < s.firstMicroBatch(g+1); mb++ {
				p = append(p, Action{Kind: AwaitAttention, Layer: layer, MicroBatch: mb}, Action{Kind: Route, Layer: layer, MicroBatch: mb})
			}
			if moe {
				p = s.experts(p, layer, g)
			} else {
				p = append(p, Action{Kind: MLP, Layer: layer, Group: g})
			}
			if moe && g == s.groups()-1 {
				p = append(p, Action{Kind: Release, Layer: layer})
			}
			p = project(p, layer+1, g)
		}
	}
	return s.epilogue(p)
}

// CGOPipe is the plan of a step in the order of CGOPipe (MoE-Lightning, section 4.1): a
// layer's experts run once per micro-batch, and pages of the next layer's missing experts are
// copied between the micro-batches. With attention on the host, a micro-batch's q, k and v
// are submitted two micro-batches before the device needs the output. The plan exists for
// comparison: each expert is read from device memory once per micro-batch.
func CGOPipe(s Shape) []Action {
	const lead = 2 // micro-batches by which the host is ahead
	next := nextMoE(s.MoE)
	n := s.MicroBatches
	p := s.prologue()
	// project appends ProjectQKV of the turn-th micro-batch, counted over all layers.
	project := func(p []Action, turn int) []Action {
		if !s.HostAttention || turn >= n*len(s.MoE) {
			return p
		}
		return append(p, Action{Kind: ProjectQKV, Layer: turn / n, MicroBatch: turn % n})
	}
	for turn := range min(lead, n) {
		p = project(p, turn)
	}
	for layer, moe := range s.MoE {
		if moe {
			p = append(p, Action{Kind: Resolve, Layer: layer})
		}
		for mb := range n {
			attention := Attention
			if s.HostAttention {
				attention = AwaitAttention
			}
			p = append(p, Action{Kind: attention, Layer: layer, MicroBatch: mb})
			if moe {
				p = append(p, Action{Kind: PagePrefetch, Layer: next[layer], MicroBatch: mb, Pages: n})
			}
			p = append(p, Action{Kind: Route, Layer: layer, MicroBatch: mb}, Action{Kind: FeedForward, Layer: layer, MicroBatch: mb})
			if moe && mb == n-1 {
				p = append(p, Action{Kind: Release, Layer: layer})
			}
			p = project(p, layer*n+mb+min(lead, n))
		}
	}
	return s.epilogue(p)
}

// OnDemand is the plan of a step of few tokens (see SmallBatch): as Layerwise, but of a
// layer's missing experts only those are fetched that its router selected. So the host has to
// read the selection. During its copy and the fetches, the device predicts the selection of
// the next layer with offloaded experts, and runs the layer's shared expert and its resident
// ones. The prediction is enqueued behind the copy of the selection, and the host waits for
// it once the layer's own work is enqueued, so that it delays neither. Layers without
// offloaded experts do not synchronize with the host. After the last layer with offloaded
// experts nothing is predicted: the tokens of the next step are not known yet.
func OnDemand(s Shape) []Action {
	next := make([]int, len(s.MoE)) // layer with offloaded experts, -1: none
	n := -1
	for layer := len(s.MoE) - 1; layer >= 0; layer-- {
		next[layer] = n
		if s.MoE[layer] && s.Offloaded[layer] {
			n = layer
		}
	}
	predicts := func(layer int) bool { return next[layer] >= 0 && !s.Unpredicted }
	return s.layers(func(p []Action, layer int) []Action {
		if !s.Offloaded[layer] {
			return s.moeLayer(append(p, Action{Kind: Resolve, Layer: layer}), layer)
		}
		p = s.attention(append(p, Action{Kind: ResolveOnDemand, Layer: layer}), layer)
		p = append(p, Action{Kind: RouterToHost, Layer: layer})
		if predicts(layer) {
			p = append(p, Action{Kind: PredictNext, Layer: next[layer]})
		}
		p = append(s.shared(p, layer, 0), Action{Kind: RunResident, Layer: layer})
		if s.CPUExperts {
			p = append(p, Action{Kind: ComputeOnCPU, Layer: layer})
		}
		p = append(p, Action{Kind: FetchChosen, Layer: layer}, Action{Kind: RunFetched, Layer: layer}, Action{Kind: Release, Layer: layer})
		if predicts(layer) {
			p = append(p, Action{Kind: PrefetchPredicted, Layer: next[layer]})
		}
		return p
	})
}

// InPlace is the plan of a step of few tokens whose kernels read offloaded experts where they
// lie: as Layerwise, with nothing to fetch.
func InPlace(s Shape) []Action {
	return s.layers(func(p []Action, layer int) []Action {
		return s.moeLayer(append(p, Action{Kind: Resolve, Layer: layer}), layer)
	})
}

// SmallBatch returns the maximum number of tokens of a step for which OnDemand is worth its
// synchronization, for a model that selects topK of a number of experts per token. With more
// tokens a uniform router would select more than three quarters of a layer's experts, 1 - (1
// - topK/experts)^tokens. 0: no step is small enough.
func SmallBatch(experts, topK int) int {
	tokens := 0
	if experts < 1 || topK < 1 {
		return tokens
	}
	for unused := 1.0; ; tokens++ { // expected share of unused experts
		if unused *= 1 - float64(topK)/float64(experts); unused < 0.25 {
			return tokens
		}
	}
}

// layers is a step that finishes each layer for all tokens before the next begins. moe
// appends the actions of a layer with experts.
func (s Shape) layers(moe func(p []Action, layer int) []Action) []Action {
	p := s.prologue()
	for layer := range s.MoE {
		if s.MoE[layer] {
			p = moe(p, layer)
		} else {
			p = append(s.attention(p, layer), Action{Kind: MLP, Layer: layer})
		}
	}
	return s.epilogue(p)
}

func (s Shape) prologue() []Action {
	var p []Action
	for mb := range s.MicroBatches {
		p = append(p, Action{Kind: Upload, MicroBatch: mb})
	}
	for mb := range s.MicroBatches {
		p = append(p, Action{Kind: Embed, MicroBatch: mb})
	}
	return p
}

func (s Shape) epilogue(p []Action) []Action {
	for mb := range s.MicroBatches {
		p = append(p, Action{Kind: Head, MicroBatch: mb})
	}
	return p
}

func (s Shape) attention(p []Action, layer int) []Action {
	if s.HostAttention {
		for mb := range s.MicroBatches {
			p = append(p, Action{Kind: ProjectQKV, Layer: layer, MicroBatch: mb})
		}
	}
	for mb := range s.MicroBatches {
		attention := Attention
		if s.HostAttention {
			attention = AwaitAttention
		}
		p = append(p, Action{Kind: attention, Layer: layer, MicroBatch: mb}, Action{Kind: Route, Layer: layer, MicroBatch: mb})
	}
	return p
}

func (s Shape) shared(p []Action, layer, group int) []Action {
	if s.SharedExpert {
		p = append(p, Action{Kind: SharedExpert, Layer: layer, Group: group})
	}
	return p
}

// experts appends the experts of a group, right behind Route of its micro-batches.
func (s Shape) experts(p []Action, layer, group int) []Action {
	if s.SharedExpert && s.microBatchesOf(group) == 1 {
		p[len(p)-1].Kind = RouteShared
	} else {
		p = s.shared(p, layer, group)
	}
	return append(p, Action{Kind: RoutedExperts, Layer: layer, Group: group})
}

// moeLayer appends attention and experts of a layer that waits for nothing on the host.
func (s Shape) moeLayer(p []Action, layer int) []Action {
	return append(s.experts(s.attention(p, layer), layer, 0), Action{Kind: Release, Layer: layer})
}

// nextMoE returns for each layer the next MoE layer, continuing with the first layer after
// the last; -1 where the model has none.
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
