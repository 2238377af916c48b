package pipeline

import (
	"fmt"
	"strings"
)

// Kind is what one action of a plan does.
type Kind uint8

// The actions, in the order in which a token meets them.
const (
	// Upload sends a micro-batch's row data to the device.
	Upload Kind = iota
	// Embed looks up a micro-batch's tokens.
	Embed
	// Resolve finds out where a layer's experts are, and sends their addresses to
	// the device.
	Resolve
	// Prefetch submits the copies of a layer's missing experts.
	Prefetch
	// Attend runs a micro-batch's attention block: norm, q, k, v, RoPE, KV append,
	// attention.
	Attend
	// Route runs what follows attention: output projection, norm, and for an MoE
	// layer the router and the grouping of rows by expert.
	Route
	// Shared runs a layer's shared expert, which needs no fetched weights.
	Shared
	// Experts runs a layer's routed experts, wave after wave, each wave behind its
	// own copies, then combines them.
	Experts
	// MLP runs the feed-forward block of a dense layer.
	MLP
	// Head computes logits and samples.
	Head
)

var kindNames = [...]string{"upload", "embed", "resolve", "prefetch", "attend", "route", "shared", "experts", "mlp", "head"}

func (k Kind) String() string { return kindNames[k] }

// Action is one entry of a step plan. Layer and MicroBatch count only where the
// kind has them.
type Action struct {
	Kind       Kind
	Layer      int
	MicroBatch int
}

func (a Action) String() string {
	switch a.Kind {
	case Upload, Embed, Head:
		return fmt.Sprintf("%s mb=%d", a.Kind, a.MicroBatch)
	case Resolve, Prefetch, Shared, Experts, MLP:
		return fmt.Sprintf("%s layer=%d", a.Kind, a.Layer)
	default:
		return fmt.Sprintf("%s layer=%d mb=%d", a.Kind, a.Layer, a.MicroBatch)
	}
}

// Shape is what a plan depends on.
type Shape struct {
	// MoE says of each layer whether it has experts.
	MoE []bool
	// SharedExpert says whether MoE layers have one beside the routed ones.
	SharedExpert bool
	// MicroBatches the step is cut into, at least 1.
	MicroBatches int
}

// LayerByLayer is the plan of a step in which every layer is finished over all
// rows before the next begins: attention per micro-batch, experts once over the
// rows of all of them, and the next MoE layer's missing experts on their way while
// this one computes. A layer's own are submitted when it is resolved, before its
// attention, unless the layer before has prefetched them; the last MoE layer
// prefetches the first one's for the step that follows.
func LayerByLayer(s Shape) []Action {
	var p []Action
	next := nextMoE(s.MoE)
	for mb := range s.MicroBatches {
		p = append(p, Action{Kind: Upload, MicroBatch: mb})
	}
	for mb := range s.MicroBatches {
		p = append(p, Action{Kind: Embed, MicroBatch: mb})
	}
	for layer, moe := range s.MoE {
		if moe {
			p = append(p, Action{Kind: Resolve, Layer: layer}, Action{Kind: Prefetch, Layer: next[layer]})
		}
		for mb := range s.MicroBatches {
			p = append(p, Action{Kind: Attend, Layer: layer, MicroBatch: mb}, Action{Kind: Route, Layer: layer, MicroBatch: mb})
		}
		switch {
		case !moe:
			p = append(p, Action{Kind: MLP, Layer: layer})
		case s.SharedExpert:
			p = append(p, Action{Kind: Shared, Layer: layer}, Action{Kind: Experts, Layer: layer})
		default:
			p = append(p, Action{Kind: Experts, Layer: layer})
		}
	}
	for mb := range s.MicroBatches {
		p = append(p, Action{Kind: Head, MicroBatch: mb})
	}
	return p
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

// Format prints a plan, an action a line.
func Format(plan []Action) string {
	var b strings.Builder
	for _, a := range plan {
		b.WriteString(a.String())
		b.WriteByte('\n')
	}
	return b.String()
}
