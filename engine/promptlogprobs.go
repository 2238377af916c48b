package engine

import "github.com/moeserve/moeserve/pipeline"

// PromptLogProb is a token of a prompt as the model sees it behind the tokens before.
type PromptLogProb struct {
	Token
	// Rank of the token: how many are at least as probable at its position, itself included.
	Rank int
}

// promptLogProbs are those of a request's prompt, which its samples share: whichever computes the prompt
// computes them. The KV cache does not keep them, so as long as they are not complete a sequence reads
// from it only what lies before the first that lacks.
type promptLogProbs struct {
	prompt []int32
	top    int
	// list is that of prompt[1:], as far as it was computed.
	list []PromptLogProb
}

// newPromptLogProbs returns those that a request asks for; nil: none.
func newPromptLogProbs(r *Request) *promptLogProbs {
	if !r.Params.PromptLogProbs {
		return nil
	}
	return &promptLogProbs{prompt: r.Prompt, top: r.Params.TopPromptLogProbs, list: make([]PromptLogProb, 0, len(r.Prompt)-1)}
}

func (p *promptLogProbs) complete() bool { return p == nil || len(p.list) == len(p.prompt)-1 }

// cacheable is how many of a sequence's first tokens need not be computed, of so many.
func (p *promptLogProbs) cacheable(tokens int) int {
	if p.complete() {
		return tokens
	}
	return min(tokens, len(p.list))
}

// targets are the tokens that follow those of a chunk of the prompt; nil where nothing is to be learned
// of them.
func (p *promptLogProbs) targets(from, to int) []int32 {
	if p == nil {
		return nil
	}
	if to = min(to+1, len(p.prompt)); to-1 <= len(p.list) {
		return nil
	}
	return p.prompt[from+1 : to]
}

// add adds what a step has computed for the targets of a chunk, and reports whether the list is complete
// by that.
func (p *promptLogProbs) add(from int, results []pipeline.LogProb) (complete bool) {
	if p == nil || p.complete() {
		return false
	}
	for i, r := range results {
		if from+i != len(p.list) {
			continue // a sequence that was preempted computes again what was known
		}
		t := PromptLogProb{Token: Token{ID: p.prompt[from+i+1]}, Rank: int(r.Rank)}
		t.LogProb, t.Top = logProbs(r, p.top)
		p.list = append(p.list, t)
	}
	return p.complete()
}
