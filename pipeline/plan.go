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
	// Resolve finds out where a layer's experts are, has all fetched that are missing,
	// and sends their addresses to the device.
	Resolve
	// Open does the same for a layer of which only chosen experts are fetched: none so
	// far.
	Open
	// Prefetch submits the copies of a layer's missing experts.
	Prefetch
	// Attend runs a micro-batch's attention block: norm, q, k, v, RoPE, KV append,
	// attention.
	Attend
	// Route runs what follows attention: output projection, norm, and for an MoE
	// layer the router.
	Route
	// Ask sends what a layer's router chose to the host.
	Ask
	// Guess runs a later layer's router on today's hidden state, and sends what it
	// chose to the host.
	Guess
	// Shared runs a layer's shared expert, which needs no fetched weights.
	Shared
	// Experts groups rows by expert and runs a layer's routed experts, wave after wave,
	// each wave behind its own copies, then combines them.
	Experts
	// Local groups rows by expert and runs those of a layer's routed experts that are
	// local.
	Local
	// Choose waits on the host for what Ask sends, and submits the copies of the
	// chosen experts that are missing.
	Choose
	// Fetched runs a layer's chosen experts that are not local, wave after wave, each
	// wave behind its own copies, then combines all.
	Fetched
	// Hint waits on the host for what Guess sends, and submits the copies of the
	// experts of that layer that are missing.
	Hint
	// MLP runs the feed-forward block of a dense layer.
	MLP
	// Head computes logits and samples.
	Head
)

var kindNames = [...]string{
	"upload", "embed", "resolve", "open", "prefetch", "attend", "route", "ask", "guess", "shared", "experts",
	"local", "choose", "fetched", "hint", "mlp", "head",
}

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
	case Attend, Route:
		return fmt.Sprintf("%s layer=%d mb=%d", a.Kind, a.Layer, a.MicroBatch)
	default:
		return fmt.Sprintf("%s layer=%d", a.Kind, a.Layer)
	}
}

// Shape is what a plan depends on.
type Shape struct {
	// MoE says of each layer whether it has experts.
	MoE []bool
	// Missing says of each layer whether it has experts that are not local. Only
	// ChosenOnly looks at it.
	Missing []bool
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
	next := nextMoE(s.MoE)
	return s.plan(func(p []Action, layer int) []Action {
		p = append(p, Action{Kind: Resolve, Layer: layer}, Action{Kind: Prefetch, Layer: next[layer]})
		p = s.attention(p, layer)
		return append(s.shared(p, layer), Action{Kind: Experts, Layer: layer})
	})
}

// ChosenOnly is the plan of a step of few rows (see SmallBatch): as LayerByLayer, but
// of a layer's missing experts only those are fetched that its router chose. So the
// host has to see the choice. While it comes and the copies are on their way, the
// device guesses what the router of the next layer with missing experts will choose,
// and runs the layer's shared expert and its local ones. The guess is asked for
// behind the choice, and answered once the layer's own work is enqueued, so that it
// delays neither. Layers that miss nothing do not ask. The last layer that does
// guesses nothing: the tokens of the next step are not known yet.
func ChosenOnly(s Shape) []Action {
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
			p = s.attention(append(p, Action{Kind: Resolve, Layer: layer}), layer)
			return append(s.shared(p, layer), Action{Kind: Experts, Layer: layer})
		}
		p = s.attention(append(p, Action{Kind: Open, Layer: layer}), layer)
		p = append(p, Action{Kind: Ask, Layer: layer})
		if next[layer] >= 0 {
			p = append(p, Action{Kind: Guess, Layer: next[layer]})
		}
		p = append(s.shared(p, layer), Action{Kind: Local, Layer: layer}, Action{Kind: Choose, Layer: layer}, Action{Kind: Fetched, Layer: layer})
		if next[layer] >= 0 {
			p = append(p, Action{Kind: Hint, Layer: next[layer]})
		}
		return p
	})
}

// SmallBatch is the most rows of a step for which ChosenOnly is worth its waits, of a
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
	var p []Action
	for mb := range s.MicroBatches {
		p = append(p, Action{Kind: Upload, MicroBatch: mb})
	}
	for mb := range s.MicroBatches {
		p = append(p, Action{Kind: Embed, MicroBatch: mb})
	}
	for layer := range s.MoE {
		if s.MoE[layer] {
			p = moe(p, layer)
		} else {
			p = append(s.attention(p, layer), Action{Kind: MLP, Layer: layer})
		}
	}
	for mb := range s.MicroBatches {
		p = append(p, Action{Kind: Head, MicroBatch: mb})
	}
	return p
}

func (s Shape) attention(p []Action, layer int) []Action {
	for mb := range s.MicroBatches {
		p = append(p, Action{Kind: Attend, Layer: layer, MicroBatch: mb}, Action{Kind: Route, Layer: layer, MicroBatch: mb})
	}
	return p
}

func (s Shape) shared(p []Action, layer int) []Action {
	if s.SharedExpert {
		p = append(p, Action{Kind: Shared, Layer: layer})
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
