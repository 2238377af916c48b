package pipeline

import (
	"slices"

	"github.com/moeserve/moeserve/configs"
)

// plans says which plan a step has, and makes each plan once.
type plans struct {
	// shape is what all plans have in common.
	shape    Shape
	cutting  cutting
	grouping configs.Grouping
	// onDemand is the most rows of a step for which only chosen experts are fetched.
	onDemand int
	made     map[planKey]*plan
}

// planKey is what the plan of a step depends on, beside what all have in common.
type planKey struct {
	microBatches int
	onDemand     bool
}

// plan is the actions of a step of a shape; the uploads of row data come first.
type plan struct {
	name          string
	shape         Shape
	uploads, rest []Action
}

func newPlans(o *Options) *plans {
	c := o.config()
	p := &plans{
		shape:   Shape{SharedExpert: c.SharedWidth > 0, HostAttention: o.HostAttention != nil},
		cutting: o.cutting(), grouping: o.Grouping, made: map[planKey]*plan{},
	}
	for layer, dense := range c.Dense {
		p.shape.MoE = append(p.shape.MoE, !dense)
		// How many of a layer's experts are local stays the same, whichever they are.
		p.shape.Missing = append(p.shape.Missing, !dense && o.Experts != nil && o.Experts.Plan().OffloadedIn(layer) > 0)
	}
	if p.missing() && o.Machine.Capabilities().KeepsData {
		p.onDemand = max(0, min(o.SmallBatchTokens, o.GroupLimits(o.Limits).MaxTokens)) // they are in one group
	}
	return p
}

// missing says whether some layer has experts that are not local.
func (p *plans) missing() bool { return slices.Contains(p.shape.Missing, true) }

// of is the plan of a step of so many rows.
func (p *plans) of(rows int) *plan {
	n, _ := p.cutting.of(rows)
	key := planKey{microBatches: n, onDemand: rows <= p.onDemand}
	made, ok := p.made[key]
	if ok {
		return made
	}
	s := p.shape
	s.MicroBatches, s.Groups = n, min(p.cutting.groups, n)
	if key.onDemand {
		s.Groups = 1
	}
	var actions []Action
	var name string
	switch {
	case key.onDemand:
		name, actions = "on-demand", OnDemand(s)
	case p.grouping == configs.PerMicroBatch:
		name, actions = "CGOPipe", CGOPipe(s)
	case s.HostAttention:
		name, actions = "overlapped CPU attention", OverlappedCPUAttention(s)
	default:
		name, actions = "layerwise", Layerwise(s)
	}
	made = &plan{name: name, shape: s, uploads: actions[:n], rest: actions[n:]}
	p.made[key] = made
	return made
}
