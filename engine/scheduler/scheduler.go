package scheduler

import (
	"cmp"
	"fmt"
	"slices"
)

// Limits bound steps and sequences.
type Limits struct {
	// StepTokens is the maximum number of tokens per step (the token budget), Sequences
	// that of sequences that are loading or running.
	StepTokens, Sequences int
	// CacheTokens is the capacity of the KV cache, and so the maximum of one sequence.
	CacheTokens int
}

// Blocks is the block table of one sequence; all tables share one pool of blocks.
// *kvcache.Table implements it.
type Blocks interface {
	// Match adds the blocks that already hold the sequence's first tokens, at most
	// maxTokens of them, to an empty table, and returns their number of tokens. Not
	// ready: their content must first be loaded into the reserved blocks.
	Match(maxTokens int) (tokens int, ready bool)
	// CanReserve reports whether Reserve would succeed.
	CanReserve(tokens int) bool
	// Reserve allocates the blocks that the sequence's first tokens need in addition,
	// or returns false and allocates none.
	Reserve(tokens int) bool
	// SetFilled records how many of the first tokens the blocks hold.
	SetFilled(tokens int)
	// Release releases all blocks. With keep, their content can be matched until they are
	// evicted.
	Release(keep bool)
}

// ID identifies a sequence; ids ascend in order of arrival.
type ID int64

// Chunk is one sequence's part of a step: it computes tokens [From, To) and, where Sample
// is set, samples the token after them.
type Chunk struct {
	ID       ID
	From, To int
	Sample   bool
	sequence *sequence
}

// Load is a request to load the KV cache of a sequence's first Tokens into the blocks
// that the sequence has; the sequence cannot run before.
type Load struct {
	ID     ID
	Tokens int
}

// Plan is one step.
type Plan struct {
	// Preempted sequences have released their blocks.
	Preempted []ID
	// Admitted sequences were waiting, new or preempted before.
	Admitted []ID
	// Loads to start now, for admitted sequences that cannot run at once. Loaded ends each.
	Loads []Load
	// Chunks of the step, valid until the next Plan. Empty: there is nothing to compute
	// until a sequence arrives or is loaded.
	Chunks []Chunk
	// outOfBlocks: a running sequence was skipped because it lacked a block.
	outOfBlocks bool
}

// Scheduler holds all sequences by state. One goroutine uses it.
type Scheduler struct {
	limits      Limits
	waiting     []*sequence // ascending by ID, as are the others
	loading     []*sequence
	running     []*sequence
	preemptions int64
	chunks      []Chunk // buffer of Plan.Chunks
}

// sequence is one sequence's state.
type sequence struct {
	id        ID
	blocks    Blocks
	tokens    int // known tokens: prompt and sampled
	maxTokens int // maximum at its end
	computed  int // tokens in the KV cache
}

// New returns an empty scheduler. It panics on limits below 1.
func New(l Limits) *Scheduler {
	if l.StepTokens < 1 || l.Sequences < 1 || l.CacheTokens < 1 {
		panic(fmt.Sprintf("scheduler: limits %+v", l))
	}
	return &Scheduler{limits: l}
}

// Add adds a waiting sequence with the number of its known tokens and the maximum at its
// end. Ids must ascend.
func (s *Scheduler) Add(id ID, b Blocks, tokens, maxTokens int) {
	if tokens < 1 || maxTokens < tokens || maxTokens > s.limits.CacheTokens {
		panic(fmt.Sprintf("scheduler: sequence %d of %d to %d tokens in a KV cache of %d", id, tokens, maxTokens, s.limits.CacheTokens))
	}
	if n := len(s.waiting); n > 0 && s.waiting[n-1].id >= id {
		panic(fmt.Sprintf("scheduler: sequence %d comes after %d", id, s.waiting[n-1].id))
	}
	s.waiting = append(s.waiting, &sequence{id: id, blocks: b, tokens: tokens, maxTokens: maxTokens})
}

// Remove removes a sequence in any state and releases its blocks, whose content can
// still be matched. The caller has ended the load of a loading sequence, so nothing is
// written to the blocks any more.
func (s *Scheduler) Remove(id ID) {
	for _, list := range []*[]*sequence{&s.running, &s.loading, &s.waiting} {
		if i, found := index(*list, id); found {
			(*list)[i].blocks.Release(true)
			*list = slices.Delete(*list, i, i+1)
			return
		}
	}
	panic(fmt.Sprintf("scheduler: there is no sequence %d", id))
}

// index returns a sequence's position in a list, or where to insert it.
func index(list []*sequence, id ID) (int, bool) {
	return slices.BinarySearchFunc(list, id, func(q *sequence, id ID) int { return cmp.Compare(q.id, id) })
}

func insert(list []*sequence, q *sequence) []*sequence {
	i, _ := index(list, q.id)
	return slices.Insert(list, i, q)
}

// Done records that the step has carried out a chunk of the latest Plan: its tokens are
// in the KV cache, and so many new tokens were sampled.
func (s *Scheduler) Done(c Chunk, sampled int) {
	c.sequence.computed = c.To
	c.sequence.tokens += sampled
	c.sequence.blocks.SetFilled(c.To)
}

// Loaded records the end of a load: the sequence runs from the next Plan on, with so many
// of its first tokens in the KV cache. After a failed load these are fewer than in its
// Load, in whole blocks, and the rest is computed.
func (s *Scheduler) Loaded(id ID, tokens int) {
	i, found := index(s.loading, id)
	if !found {
		panic(fmt.Sprintf("scheduler: sequence %d is not loading", id))
	}
	q := s.loading[i]
	s.loading = slices.Delete(s.loading, i, i+1)
	s.running = insert(s.running, q)
	q.computed = tokens
	q.blocks.SetFilled(tokens)
}

// Restart makes a running sequence compute all its tokens again, in its present blocks.
func (s *Scheduler) Restart(id ID) {
	i, found := index(s.running, id)
	if !found {
		panic(fmt.Sprintf("scheduler: sequence %d is not running", id))
	}
	s.running[i].computed = 0
	s.running[i].blocks.SetFilled(0)
}

// Running is the number of running sequences.
func (s *Scheduler) Running() int { return len(s.running) }

// Loading is the number of loading sequences.
func (s *Scheduler) Loading() int { return len(s.loading) }

// Waiting is the number of waiting sequences, preempted ones included.
func (s *Scheduler) Waiting() int { return len(s.waiting) }

// Preemptions is the number of preemptions so far.
func (s *Scheduler) Preemptions() int64 { return s.preemptions }

// Plan decides the next step.
func (s *Scheduler) Plan() Plan {
	p := Plan{Chunks: s.chunks[:0]}
	budget := s.limits.StepTokens
	for _, decode := range []bool{true, false} {
		// Preempting shortens s.running after i.
		for i := 0; i < len(s.running) && budget > 0; i++ {
			q := s.running[i]
			left := q.tokens - q.computed
			if left == 0 || (left == 1) != decode {
				continue
			}
			n := min(left, budget)
			freed, ok := s.reserve(q, q.computed+n, &p)
			budget += freed
			if !ok {
				continue
			}
			budget -= n
			p.Chunks = append(p.Chunks, Chunk{ID: q.id, From: q.computed, To: q.computed + n, Sample: n == left, sequence: q})
		}
	}
	if len(p.Preempted) == 0 && !p.outOfBlocks {
		s.admit(&p, budget)
	}
	s.chunks = p.Chunks
	return p
}

// reserve reserves the blocks that q needs for tokens and preempts later sequences where
// there are too few; freed is the part of the token budget that these return. It fails
// where q itself is the latest: q is then skipped while later sequences are loading, and
// else preempted.
func (s *Scheduler) reserve(q *sequence, tokens int, p *Plan) (freed int, ok bool) {
	for !q.blocks.Reserve(tokens) {
		last := s.running[len(s.running)-1]
		if n := len(s.loading); last == q && n > 0 && s.loading[n-1].id > q.id {
			p.outOfBlocks = true
			return freed, false
		}
		freed += s.preemptSequence(last, p)
		if last == q {
			return freed, false
		}
	}
	return freed, true
}

// preemptSequence preempts the latest running sequence, removes its chunk from this step
// and returns the tokens that the chunk had.
func (s *Scheduler) preemptSequence(q *sequence, p *Plan) (freed int) {
	s.running = s.running[:len(s.running)-1]
	q.blocks.Release(false)
	q.computed = 0
	s.waiting = insert(s.waiting, q)
	p.Preempted = append(p.Preempted, q.id)
	p.Chunks = slices.DeleteFunc(p.Chunks, func(c Chunk) bool {
		if c.ID != q.id {
			return false
		}
		freed += c.To - c.From
		return true
	})
	s.preemptions++
	return freed
}

// admit moves waiting sequences to loading or running while the token budget, the limit
// of sequences and free blocks allow. The first that does not fit blocks those after it.
func (s *Scheduler) admit(p *Plan, budget int) {
	for len(s.waiting) > 0 && budget > 0 && len(s.running)+len(s.loading) < s.limits.Sequences {
		q := s.waiting[0]
		// The last token is always computed, since its logits give the next one.
		cached, ready := q.blocks.Match(q.tokens - 1)
		end := cached
		if ready {
			end = min(q.tokens, cached+budget)
		}
		// One token more than it has, so that its first decode finds a block, unless
		// the sequence has its maximum length.
		if !q.blocks.CanReserve(min(q.tokens+1, q.maxTokens)) || !q.blocks.Reserve(end) {
			q.blocks.Release(true)
			return
		}
		s.waiting = s.waiting[1:]
		p.Admitted = append(p.Admitted, q.id)
		if !ready {
			s.loading = insert(s.loading, q)
			p.Loads = append(p.Loads, Load{ID: q.id, Tokens: cached})
			continue
		}
		q.computed = cached
		budget -= end - cached
		s.running = insert(s.running, q)
		p.Chunks = append(p.Chunks, Chunk{ID: q.id, From: cached, To: end, Sample: end == q.tokens, sequence: q})
	}
}
