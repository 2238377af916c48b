package engine

import (
	"maps"
	"math"
	"slices"

	"github.com/moeserve/moeserve/pipeline"
)

// adjustments are the tokens whose logits a sample changes, each once, in the order
// in which they came up: deterministic, and growing by at most one a step.
type adjustments struct {
	p      *Params
	list   []pipeline.TokenAdjust
	at     map[int32]int // place of a token in list
	stop   []int32
	bans   bool // stop ids are banned until MinTokens
	counts bool // tokens of the answer matter
	drawn  int
}

// banned is a bias at which a token is never drawn.
const banned = -100

func newAdjustments(p *Params, prompt, stop []int32) adjustments {
	a := adjustments{
		p: p, at: map[int32]int{}, stop: stop, bans: p.MinTokens > 0 && len(stop) > 0,
		counts: p.RepetitionPenalty != 1 || p.PresencePenalty != 0 || p.FrequencyPenalty != 0,
	}
	if p.RepetitionPenalty != 1 {
		for _, id := range prompt {
			a.list[a.place(id)].Seen = 0
		}
	}
	for _, id := range slices.Sorted(maps.Keys(p.LogitBias)) {
		a.place(id)
	}
	if a.bans {
		for _, id := range stop {
			a.ban(id, true)
		}
	}
	return a
}

// place finds or makes a token's entry, with its bias.
func (a *adjustments) place(id int32) int {
	i, ok := a.at[id]
	if !ok {
		i = len(a.list)
		a.at[id] = i
		a.list = append(a.list, pipeline.TokenAdjust{ID: id, Seen: -1, Bias: bias(a.p.LogitBias[id])})
	}
	return i
}

func bias(b float32) float32 {
	if b <= banned {
		return float32(math.Inf(-1))
	}
	return b
}

func (a *adjustments) ban(id int32, on bool) {
	e := &a.list[a.place(id)]
	e.Bias = bias(a.p.LogitBias[id])
	if on {
		e.Bias = float32(math.Inf(-1))
	}
}

// drew counts a token of the answer.
func (a *adjustments) drew(id int32) {
	a.drawn++
	if a.counts {
		e := &a.list[a.place(id)]
		e.Seen = max(e.Seen, 0) + 1
	}
	if a.bans && a.drawn >= a.p.MinTokens {
		a.bans = false
		for _, id := range a.stop {
			a.ban(id, false)
		}
	}
}

// draw fills in d, which is empty: how the sequence's next token is drawn.
func (q *sequence) draw(d *pipeline.Draw) {
	p := &q.sub.req.Params
	d.Temperature, d.Seed, d.Sample = p.Temperature, p.Seed, int32(q.sample)
	d.TopK, d.TopP, d.MinP = int32(p.TopK), p.TopP, p.MinP
	d.RepetitionPenalty, d.PresencePenalty, d.FrequencyPenalty = p.RepetitionPenalty, p.PresencePenalty, p.FrequencyPenalty
	d.Adjust, d.LogProbs = q.adjust.list, p.LogProbs
}
