package compute

import (
	"fmt"

	"github.com/moeserve/moeserve/planner"
)

// Case is a model with the steps that are timed of it.
type Case struct {
	Model planner.Model
	Steps []planner.ComputeStep
}

// Rows of the decode steps of each case, and the length of their prompts: decode steps at the
// following positions are the same CUDA graph.
var decodeRows = []int{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096}

const decodePrompt = 33

// Prefill steps of each case: sequences and tokens of each.
var prefills = [][2]int{{1, 8}, {1, 64}, {8, 64}, {32, 64}, {128, 64}}

// Steps of attention: decode steps over longer contexts, and longer prompts.
var (
	contexts = [][2]int{{1, 4097}, {8, 2049}, {64, 1025}, {512, 257}}
	prompts  = [][2]int{{16, 512}, {4, 2048}, {1, 8192}}
)

// DefaultCases are models that differ from the first in one thing each, but for the one of many small
// experts.
func DefaultCases() []Case {
	base := planner.Model{
		Name: "base", Layers: 6, Hidden: 3072, Heads: 24, KVHeads: 8, HeadDim: 128, Experts: 16, TopK: 4, ExpertWidth: 1024, Vocab: 32768,
	}
	with := func(name string, layers int, change func(m *planner.Model)) planner.Model {
		m := base
		m.Name, m.Layers = name, layers
		change(&m)
		return m
	}
	models := []planner.Model{
		base,
		with("few layers", 2, func(*planner.Model) {}),
		with("more experts", 2, func(m *planner.Model) { m.Experts = 48 }),
		with("wide experts", 3, func(m *planner.Model) { m.Experts, m.TopK, m.ExpertWidth = 8, 2, 8192 }),
		with("small experts", 3, func(m *planner.Model) {
			m.Hidden, m.Heads, m.KVHeads, m.Experts, m.TopK, m.ExpertWidth, m.Vocab = 2560, 20, 4, 96, 8, 640, 131072
		}),
		with("shared expert", 3, func(m *planner.Model) { m.SharedWidth = 4096 }),
		with("vocabulary", 2, func(m *planner.Model) { m.Vocab = 131072 }),
		with("heads", 3, func(m *planner.Model) { m.Heads, m.KVHeads = 48, 48 }),
	}
	var cases []Case
	for i, m := range models {
		c := Case{Model: m}
		for _, n := range decodeRows {
			c.Steps = append(c.Steps, planner.ComputeStep{Sequences: n, Tokens: 1, Context: decodePrompt + 1})
		}
		add := func(list [][2]int, prefill bool) {
			for _, x := range list {
				s := planner.ComputeStep{Sequences: x[0], Tokens: 1, Context: x[1] + 1}
				if prefill {
					s = planner.ComputeStep{Sequences: x[0], Tokens: x[1], Context: x[1], Enqueued: true}
				}
				c.Steps = append(c.Steps, s)
			}
		}
		add(prefills, true)
		if i == 0 || m.Name == "heads" {
			add(contexts, false)
			add(prompts, true)
		}
		cases = append(cases, c)
	}
	return cases
}

// Small are the same cases with all that is large divided, for devices that a processor emulates.
func Small(cases []Case) []Case {
	const by, most = 16, 256
	var small []Case
	for _, c := range cases {
		m := c.Model
		m.Hidden, m.HeadDim, m.ExpertWidth, m.SharedWidth, m.Vocab = m.Hidden/by, m.HeadDim/by, m.ExpertWidth/by, m.SharedWidth/by, m.Vocab/by/8
		s := Case{Model: m}
		for _, x := range c.Steps {
			if x.Sequences*x.Tokens <= most && x.Sequences*x.Context <= 16*most {
				s.Steps = append(s.Steps, x)
			}
		}
		small = append(small, s)
	}
	return small
}

// Needs is what a node of the case has room for: sequences at once, tokens of a step, tokens of a
// sequence, and tokens of all sequences, each rounded up to a multiple of blockTokens.
func (c *Case) Needs(blockTokens int) (sequences, stepTokens, length, tokens int) {
	for _, s := range c.Steps {
		each := (s.Context + newTokens(s) + blockTokens) / blockTokens * blockTokens
		sequences, stepTokens, length = max(sequences, s.Sequences), max(stepTokens, s.Sequences*s.Tokens), max(length, each)
		tokens = max(tokens, s.Sequences*each)
	}
	return sequences, max(stepTokens, 2048), length, tokens
}

func (c *Case) validate() error {
	for _, s := range c.Steps {
		if s.Sequences < 1 || s.Tokens < 1 || s.Context < 1 {
			return fmt.Errorf("eval: a step of %d sequences with %d tokens each and a context of %d: all must be at least 1", s.Sequences, s.Tokens, s.Context)
		}
	}
	return c.Model.Validate()
}
