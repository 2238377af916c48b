package engine

import (
	"maps"
	"math"
	"slices"

	"github.com/moeserve/moeserve/pipeline"
)

// adjustments lists the tokens whose logits penalties, biases and bans change for one
// sample. Each token is in the list once, in a deterministic order; a step adds at most
// one.
type adjustments struct {
	p         *Params
	list      []pipeline.TokenAdjust
	index     map[int32]int // token id -> position in list
	stop      []int32
	bans      bool // stop ids are banned until MinTokens
	counts    bool // penalties need the tokens of the completion
	generated int
}

// banned is the bias that bans a token.
const banned = -100

func newAdjustments(p *Params, prompt, stop []int32) adjustments {
	a := adjustments{
		p: p, index: map[int32]int{}, stop: stop, bans: p.MinTokens > 0 && len(stop) > 0,
		counts: p.RepetitionPenalty != 1 || p.PresencePenalty != 0 || p.FrequencyPenalty != 0,
	}
	if p.RepetitionPenalty != 1 {
		for _, id := range prompt {
			a.list[a.entry(id)].Seen = 0
		}
	}
	for _, id := range slices.Sorted(maps.Keys(p.LogitBias)) {
		a.entry(id)
	}
	if a.bans {
		for _, id := range stop {
			a.ban(id, true)
		}
	}
	return a
}

// entry returns the position of a token's entry, adding one with its bias where needed.
func (a *adjustments) entry(id int32) int {
	i, ok := a.index[id]
	if !ok {
		i = len(a.list)
		a.index[id] = i
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
	e := &a.list[a.entry(id)]
	e.Bias = bias(a.p.LogitBias[id])
	if on {
		e.Bias = float32(math.Inf(-1))
	}
}

// addToken counts a token of the completion.
func (a *adjustments) addToken(id int32) {
	a.generated++
	if a.counts {
		e := &a.list[a.entry(id)]
		e.Seen = max(e.Seen, 0) + 1
	}
	if a.bans && a.generated >= a.p.MinTokens {
		a.bans = false
		for _, id := range a.stop {
			a.ban(id, false)
		}
	}
}

// samplingParams sets d, which is zero, for sampling the sequence's next token.
func (q *sequence) samplingParams(d *pipeline.SamplingParams) {
	p := &q.sub.req.Params
	d.Temperature, d.Seed, d.Sample = p.Temperature, p.Seed, int32(q.sample)
	d.TopK, d.TopP, d.MinP = int32(p.TopK), p.TopP, p.MinP
	d.RepetitionPenalty, d.PresencePenalty, d.FrequencyPenalty = p.RepetitionPenalty, p.PresencePenalty, p.FrequencyPenalty
	d.Adjust, d.LogProbs = q.adjust.list, p.LogProbs
}
