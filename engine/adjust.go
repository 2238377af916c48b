package engine

import (
	"cmp"
	"maps"
	"math"
	"slices"

	"github.com/moeserve/moeserve/pipeline"
)

// requestAdjustments are what the samples of a request begin with. It is made once, outside the
// engine's goroutine, as its lists may be as long as the vocabulary, and is immutable.
type requestAdjustments struct {
	p       *Params
	list    []pipeline.TokenAdjust // by id
	stop    []int32                // sorted, each once
	never   []int32                // likewise: ids that are not sampled at all
	phrases [][]int32              // bad words of several tokens
	bans    bool                   // stop ids are banned until MinTokens
}

// banned is the bias that bans a token.
const banned = -100

// newAdjustments returns those of a request; stop are the model's ids besides the request's.
func newAdjustments(p *Params, prompt, stop []int32, vocab int) *requestAdjustments {
	a := &requestAdjustments{p: p, stop: sortedIDs(p.StopIDs, stop)}
	for _, w := range p.BadWords {
		if len(w) == 1 {
			a.never = append(a.never, w[0])
		} else {
			a.phrases = append(a.phrases, w)
		}
	}
	if len(p.AllowedIDs) > 0 {
		a.never = append(a.never, others(sortedIDs(p.AllowedIDs), vocab)...)
	}
	a.never = sortedIDs(a.never)
	a.bans = p.MinTokens > 0 && len(a.stop) > 0
	var seen, banned []int32
	if p.RepetitionPenalty != 1 {
		seen = sortedIDs(prompt)
	}
	if a.bans {
		banned = a.stop
	}
	ids := sortedIDs(seen, banned, a.never, slices.Collect(maps.Keys(p.LogitBias)))
	a.list = make([]pipeline.TokenAdjust, len(ids))
	for i, id := range ids {
		a.list[i] = pipeline.TokenAdjust{ID: id, Seen: -1, Bias: a.bias(id)}
		if len(seen) > 0 && seen[0] == id {
			a.list[i].Seen, seen = 0, seen[1:]
		}
		if len(banned) > 0 && banned[0] == id {
			a.list[i].Bias, banned = float32(math.Inf(-1)), banned[1:]
		}
	}
	return a
}

// sortedIDs returns the ids of all lists, each once.
func sortedIDs(lists ...[]int32) []int32 {
	ids := slices.Concat(lists...)
	slices.Sort(ids)
	return slices.Compact(ids)
}

// others are the ids of the vocabulary that are not in a sorted list.
func others(ids []int32, vocab int) []int32 {
	rest := make([]int32, 0, vocab)
	for id := range int32(vocab) {
		if len(ids) > 0 && ids[0] == id {
			ids = ids[1:]
			continue
		}
		rest = append(rest, id)
	}
	return rest
}

// bias of a token, whether or not it is a stop id.
func (a *requestAdjustments) bias(id int32) float32 {
	b := a.p.LogitBias[id]
	if _, never := slices.BinarySearch(a.never, id); never || b <= banned {
		return float32(math.Inf(-1))
	}
	return b
}

// adjustments lists the tokens whose logits penalties, biases and bans change for one sample. Each
// token is in the list once, in a deterministic order; a step adds at most one.
type adjustments struct {
	*requestAdjustments
	// list is the request's, which samples share, until the first change. Tokens that the request's
	// does not have follow it; index has their positions.
	list      []pipeline.TokenAdjust
	own       bool
	index     map[int32]int
	bans      bool
	counts    bool // penalties need the tokens of the completion
	generated int
	// said is the completion, and unsaid are the tokens that bad words ban next: only if there are phrases.
	said, unsaid []int32
}

func (a *requestAdjustments) sample() adjustments {
	return adjustments{
		requestAdjustments: a, list: a.list, bans: a.bans,
		counts: a.p.RepetitionPenalty != 1 || a.p.PresencePenalty != 0 || a.p.FrequencyPenalty != 0,
	}
}

// ends says whether a token ends the sample.
func (a *adjustments) ends(id int32) bool {
	_, ok := slices.BinarySearch(a.stop, id)
	return ok
}

// change makes the list the sample's own.
func (a *adjustments) change() {
	if !a.own {
		a.list, a.own = slices.Clone(a.list), true
	}
}

// entry returns the entry of a token, which it adds where there is none.
func (a *adjustments) entry(id int32) *pipeline.TokenAdjust {
	i, ok := slices.BinarySearchFunc(a.requestAdjustments.list, id, func(t pipeline.TokenAdjust, id int32) int { return cmp.Compare(t.ID, id) })
	if !ok {
		if i, ok = a.index[id]; !ok {
			if a.index == nil {
				a.index = map[int32]int{}
			}
			i = len(a.list)
			a.index[id] = i
			a.list = append(a.list, pipeline.TokenAdjust{ID: id, Seen: -1})
		}
	}
	return &a.list[i]
}

// addToken counts a token of the completion.
func (a *adjustments) addToken(id int32) {
	a.generated++
	if a.counts {
		a.change()
		e := a.entry(id)
		e.Seen = max(e.Seen, 0) + 1
	}
	if a.bans && a.generated >= a.p.MinTokens {
		a.bans = false
		a.change()
		stop := a.stop
		for i := range a.requestAdjustments.list { // both are sorted
			if e := &a.list[i]; len(stop) > 0 && stop[0] == e.ID {
				e.Bias, stop = a.bias(e.ID), stop[1:]
			}
		}
	}
	if len(a.phrases) > 0 {
		a.banPhrases(id)
	}
}

// banPhrases bans the last tokens of the bad words whose others end the completion, and no longer those
// that were banned for this token.
func (a *adjustments) banPhrases(id int32) {
	for _, id := range a.unsaid {
		e := a.entry(id)
		if e.Bias = a.bias(id); a.bans && a.ends(id) {
			e.Bias = float32(math.Inf(-1))
		}
	}
	a.said, a.unsaid = append(a.said, id), a.unsaid[:0]
	for _, w := range a.phrases {
		n := len(w) - 1
		if len(a.said) < n || !slices.Equal(a.said[len(a.said)-n:], w[:n]) {
			continue
		}
		a.change()
		a.entry(w[n]).Bias = float32(math.Inf(-1))
		a.unsaid = append(a.unsaid, w[n])
	}
}

// samplingParams sets d, which is zero, for sampling the sequence's next token.
func (q *sequence) samplingParams(d *pipeline.SamplingParams) {
	p := &q.sub.req.Params
	d.Temperature, d.Seed, d.Sample = p.Temperature, p.Seed, int32(q.sample)
	d.TopK, d.TopP, d.MinP = int32(p.TopK), p.TopP, p.MinP
	d.RepetitionPenalty, d.PresencePenalty, d.FrequencyPenalty = p.RepetitionPenalty, p.PresencePenalty, p.FrequencyPenalty
	d.Adjust, d.LogProbs = q.adjust.list, p.LogProbs
	if q.constraint != nil {
		d.Mask = q.constraint
	}
}
