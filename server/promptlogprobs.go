package server

import (
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/moeserve/moeserve/engine"
)

// positionLogProbs are the log-probabilities of tokens at one position of a prompt, in vLLM's form: an
// object by token ids, of which the first is the prompt's, or null for the first position.
type positionLogProbs []rankedLogProb

type rankedLogProb struct {
	id int32

	LogProb float64 `json:"logprob"`
	// Rank is 1 for the most probable token.
	Rank         int    `json:"rank"`
	DecodedToken string `json:"decoded_token"`
}

// MarshalJSON implements json.Marshaler. The members keep their order.
func (p positionLogProbs) MarshalJSON() ([]byte, error) {
	if p == nil {
		return []byte("null"), nil
	}
	b := []byte{'{'}
	for i, t := range p {
		if i > 0 {
			b = append(b, ',')
		}
		value, err := json.Marshal(t)
		if err != nil {
			return nil, fmt.Errorf("token %d: %w", t.id, err)
		}
		b = append(append(strconv.AppendQuote(b, strconv.Itoa(int(t.id))), ':'), value...)
	}
	return append(b, '}'), nil
}

// promptPositions are the log-probabilities of a prompt's tokens, if the request asks for them; nil if not.
func (c *common) promptPositions(text *tokenTexts, prompt int, ids []int32) []positionLogProbs {
	if !c.promptLogProbs {
		return nil
	}
	all := make([]positionLogProbs, 1, len(ids))
	for _, t := range c.promptTokens[prompt] {
		all = append(all, text.position(t, c.promptTop))
	}
	return all
}

// position is what the response has of one position, with the most probable tokens there.
func (t *tokenTexts) position(p engine.PromptLogProb, top int) positionLogProbs {
	one := func(id int32, lp float32, rank int) rankedLogProb {
		return rankedLogProb{id: id, LogProb: logProb(lp), Rank: rank, DecodedToken: t.text(id)}
	}
	list := positionLogProbs{one(p.ID, p.LogProb, p.Rank)}
	for i, o := range p.Top[:min(top, len(p.Top))] {
		if o.ID != p.ID && o.ID >= 0 {
			list = append(list, one(o.ID, o.LogProb, i+1))
		}
	}
	return list
}
