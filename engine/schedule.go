package engine

// Candidate is what the scheduler knows of one running sequence.
type Candidate struct {
	// Tokens known: the prompt and what was generated, the last not yet computed.
	Tokens int
	// Computed is how many of them have their keys and values in the cache.
	Computed int
}

// Chunk is what one sequence does in a step: it computes tokens [From, To), and
// draws a token behind the last of them where Sample is set.
type Chunk struct {
	Index    int
	From, To int
	Sample   bool
}

// Schedule divides a step of at most budget rows among the candidates, in their
// order: first those that need a single row (decoding), then prompts, cut into
// chunks where the budget ends. It is pure: the same candidates give the same
// chunks.
func Schedule(candidates []Candidate, budget int) []Chunk {
	var chunks []Chunk
	take := func(decode bool) {
		for i, c := range candidates {
			left := c.Tokens - c.Computed
			if left <= 0 || budget == 0 || (left == 1) != decode {
				continue
			}
			n := min(left, budget)
			chunks = append(chunks, Chunk{Index: i, From: c.Computed, To: c.Computed + n, Sample: n == left})
			budget -= n
		}
	}
	take(true)
	take(false)
	return chunks
}
