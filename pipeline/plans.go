package pipeline

import (
	"slices"

	"github.com/moeserve/moeserve/configs"
)

// plans selects the plan of each step, and keeps plans for reuse.
type plans struct {
	// shape is common to all plans, except for its micro-batches and groups.
	shape         Shape
	microBatching microBatching
	grouping      configs.Grouping
	// onDemand is the maximum number of tokens of a step for which only routed experts are
	// fetched.
	onDemand int
	cache    map[planKey]*plan
}

// planKey identifies a plan of one pipeline.
type planKey struct {
	microBatches                   int
	onDemand, inPlace, unpredicted bool
}

// plan is the actions of a step: the uploads of metadata, the layers, and the heads, which sample.
type plan struct {
	name string
	// inPlace: kernels read offloaded experts where they lie. graph: the step can be a graph,
	// since it neither waits nor fetches.
	inPlace, graph bool
	shape          Shape
	uploads        []Action
	layers, heads  []Action
}

// rest is all behind the uploads.
func (p *plan) rest() []Action { return p.layers[:len(p.layers)+len(p.heads)] }

func newPlans(o *Options) *plans {
	c := o.config()
	p := &plans{
		shape:         Shape{SharedExpert: c.SharedWidth > 0, HostAttention: o.HostAttention != nil, CPUExperts: o.CPUExperts != nil},
		microBatching: o.microBatching(), grouping: o.Grouping, cache: map[planKey]*plan{},
	}
	for layer, dense := range c.Dense {
		p.shape.MoE = append(p.shape.MoE, !dense)
		// Swaps do not change the number of resident experts of a layer.
		p.shape.Offloaded = append(p.shape.Offloaded, !dense && o.Experts != nil && o.Experts.Plan().OffloadedIn(layer) > 0)
	}
	if p.anyOffloaded() && o.Machine.Capabilities().KeepsData {
		p.onDemand = o.onDemandTokens(c, o.Limits)
	}
	return p
}

// anyOffloaded reports whether some layer has offloaded experts.
func (p *plans) anyOffloaded() bool { return slices.Contains(p.shape.Offloaded, true) }

// get returns the plan of a step of this many tokens. Only one of a single group can be in place. unpredicted: if
// it is OnDemand, no experts are predicted.
func (p *plans) get(tokens int, a access, unpredicted bool) *plan {
	n, _ := p.microBatching.split(tokens)
	key := planKey{microBatches: n, inPlace: a == inPlace}
	key.onDemand = !key.inPlace && tokens <= p.onDemand
	key.unpredicted = key.onDemand && unpredicted
	cached, ok := p.cache[key]
	if ok {
		return cached
	}
	s := p.shape
	s.MicroBatches, s.Groups, s.Unpredicted = n, min(p.microBatching.groups, n), key.unpredicted
	if key.onDemand || key.inPlace {
		s.Groups = 1
	}
	s.RouteInExperts = key.inPlace || !key.onDemand && !p.anyOffloaded()
	var actions []Action
	var name string
	switch {
	case key.inPlace:
		name, actions = "in place", InPlace(s)
	case key.onDemand:
		name, actions = "on-demand", OnDemand(s)
	case p.grouping == configs.PerMicroBatch:
		name, actions = "CGOPipe", CGOPipe(s)
	case s.HostAttention:
		name, actions = "overlapped CPU attention", OverlappedCPUAttention(s)
	default:
		name, actions = "layerwise", Layerwise(s)
	}
	end := len(actions) - n // a head for each micro-batch
	cached = &plan{
		name: name, inPlace: key.inPlace, graph: key.inPlace || !p.anyOffloaded(), shape: s,
		uploads: actions[:n], layers: actions[n:end], heads: actions[end:],
	}
	p.cache[key] = cached
	return cached
}
