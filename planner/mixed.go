package planner

// MixedStep is a step that decodes some sequences and computes a part of the prompts of others.
type MixedStep struct {
	// Decodes is the number of sequences that decode a token; DecodeContext are their earlier
	// tokens, of all together.
	Decodes, DecodeContext float64
	// PromptTokens are computed of prompts, behind PromptContext earlier tokens each.
	PromptTokens, PromptContext float64
	// Groups is as in RooflineCase; Fraction of the experts that the step needs are fetched over
	// links that carry Rate bytes/s together.
	Groups         int
	Fraction, Rate float64
}

// MixedSeconds is the minimum time of a step, in seconds: the sum of its phases, each at its own
// bound, or its copies, whichever is longer. Up to some hundreds of tokens for each expert
// the weights bound it, which are read once, so prompt tokens beside decodes are nearly free;
// beyond, each takes as long as its operations. The model has its defaults (EnsureDefaults).
func MixedSeconds(m *Model, h *Hardware, s MixedStep) float64 {
	n := s.Decodes + s.PromptTokens
	if n == 0 {
		return 0
	}
	groups := float64(max(s.Groups, 1))
	seen := m.seen(s.PromptContext)
	t := h.roofline(m, stepShape{
		// Prompts end in few of their steps: most of their tokens have no logits.
		tokens: n, logits: max(s.Decodes, 1), pairs: s.DecodeContext + s.PromptTokens*seen, kvTokens: s.DecodeContext + seen + s.PromptTokens,
		context: s.PromptContext + 1, projections: groups, experts: groups,
	})
	seconds := t.total()
	if s.Fraction > 0 && s.Rate > 0 {
		seconds = max(seconds, s.Fraction*float64(m.MoELayers())*m.Distinct(n)*float64(m.ExpertBytes())/s.Rate)
	}
	return seconds
}
