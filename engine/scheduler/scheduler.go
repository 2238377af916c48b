package scheduler

import (
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
	// Pace limits prompts in steps that also decode. Default: only StepTokens does.
	Pace Pace
}

// Mix is what the time of a step depends on.
type Mix struct {
	// Decodes is the number of sequences that compute one token; DecodeContext are their tokens
	// in the KV cache, of all together.
	Decodes, DecodeContext int
	// Prompt is the number of tokens of all other sequences, those that compute a prompt;
	// PromptContext are the tokens in the KV cache of the first of them.
	Prompt, PromptContext int
}

// Pace limits the prompt tokens of steps that also decode, so that these do not take too long.
type Pace interface {
	// PromptTokens is how many prompt tokens a step may have beside the decodes of m, from 1 to
	// most. Of m all but Prompt is set.
	PromptTokens(m Mix, most int) int
}

// Cached says where the content of matched tokens is.
type Cached uint8

const (
	// Ready content is in the sequence's blocks.
	Ready Cached = iota
	// MustLoad: a part of it must first be loaded into blocks that are then reserved.
	MustLoad
	// MustWait: a part of it is on its way, for another sequence or to where it can be
	// loaded from. The sequence waits, without holding up others.
	MustWait
)

// Blocks is the block table of one sequence; all tables share one pool of blocks. It is
// *kvcache.Table but for Match, which knows of other tiers.
type Blocks interface {
	// Match adds the blocks that already hold the sequence's first tokens, at most
	// maxTokens of them, to an empty table. It returns their number of tokens, those that
	// must be loaded included. Where the answer is MustWait it adds none, and asking again is
	// cheap until that has changed.
	Match(maxTokens int) (tokens int, at Cached)
	// Missing is the number of blocks that Reserve allocates.
	Missing(tokens int) int
	// MayReserve is false where CanReserve is certainly false after a Match, at no cost.
	MayReserve(tokens, leave int) bool
	// Lacks is how many blocks must be free for CanReserve to be true after a Match; 0: as many
	// are.
	Lacks(tokens, leave int) int
	// CanReserve reports whether Reserve would succeed, and leave so many blocks free.
	CanReserve(tokens, leave int) bool
	// WillReserve is CanReserve, if copies under way, which hold free blocks, had ended.
	WillReserve(tokens, leave int) bool
	// Reserve allocates the blocks that the sequence's first tokens need in addition,
	// or returns false and allocates none.
	Reserve(tokens int) bool
	// SetFilled records how many of the first tokens the blocks hold.
	SetFilled(tokens int)
	// Release releases all blocks. With keep, their content can be matched until they are
	// evicted.
	Release(keep bool)
	// Exclusive is the number of blocks that no other sequence uses: those that Release
	// frees.
	Exclusive() int
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
}

// Scheduler holds all sequences by state. One goroutine uses it.
type Scheduler struct {
	limits      Limits
	policy      Policy
	waiting     []*sequence // in the policy's order, as are the others
	loading     []*sequence
	running     []*sequence
	preemptions int64
	plans       int64
	last        ID      // latest added
	floor       int64   // rank at which sequences start under Fair; never decreases
	chunks      []Chunk // buffer of Plan.Chunks
	// held: no waiting sequence is admitted.
	held bool
}

// sequence is one sequence's state.
type sequence struct {
	id        ID
	blocks    Blocks
	prompt    int // tokens at first
	tokens    int // known tokens: prompt and sampled
	maxTokens int // maximum at its end
	computed  int // tokens in the KV cache
	chunk     int // index of its chunk in the present plan, if that is its own
	// waits: when last asked, a part of its content was on its way. waitsIn is the latest plan in
	// which it was.
	waits   bool
	waitsIn int64
	// rank is its place among others, lower ones first: its priority, or its virtual runtime,
	// which each sampled token raises by cost.
	rank, cost int64
	// secured are the tokens up to which an admitted sequence is sure of its blocks under
	// Fair, the end of its quantum; else 0.
	secured int
}

// New returns an empty scheduler. It panics on limits below 1, and on a fair policy without
// granularity.
func New(l Limits, p Policy) *Scheduler {
	if l.StepTokens < 1 || l.Sequences < 1 || l.CacheTokens < 1 || p.Order == Fair && p.Granularity < 1 {
		panic(fmt.Sprintf("scheduler: limits %+v, policy %+v", l, p))
	}
	return &Scheduler{limits: l, policy: p, last: -1}
}

// Add adds a waiting sequence with the number of its known tokens and the maximum at its
// end. Ids must ascend, from 0. The priority is of ByPriority, and under Fair a nice level:
// see Order.
func (s *Scheduler) Add(id ID, b Blocks, tokens, maxTokens, priority int) {
	if tokens < 1 || maxTokens < tokens || maxTokens > s.limits.CacheTokens {
		panic(fmt.Sprintf("scheduler: sequence %d of %d to %d tokens in a KV cache of %d", id, tokens, maxTokens, s.limits.CacheTokens))
	}
	if id <= s.last {
		panic(fmt.Sprintf("scheduler: sequence %d comes after %d", id, s.last))
	}
	s.last = id
	q := &sequence{id: id, blocks: b, prompt: tokens, tokens: tokens, maxTokens: maxTokens}
	s.policy.rank(q, priority, s.floor)
	s.waiting = insert(s.waiting, q)
}

// Remove removes a sequence in any state and releases its blocks, whose content can
// still be matched where keep is set. The load of a loading sequence holds the blocks that it
// still writes.
func (s *Scheduler) Remove(id ID, keep bool) {
	for _, list := range []*[]*sequence{&s.running, &s.loading, &s.waiting} {
		if i := find(*list, id); i >= 0 {
			(*list)[i].blocks.Release(keep)
			*list = slices.Delete(*list, i, i+1)
			return
		}
	}
	panic(fmt.Sprintf("scheduler: there is no sequence %d", id))
}

// find returns a sequence's position in a list, -1: it is not there.
func find(list []*sequence, id ID) int {
	return slices.IndexFunc(list, func(q *sequence) bool { return q.id == id })
}

// insert inserts a sequence where the policy's order has it.
func insert(list []*sequence, q *sequence) []*sequence {
	i, _ := slices.BinarySearchFunc(list, q, compare)
	return slices.Insert(list, i, q)
}

// Done records that the step has carried out a chunk of the latest Plan: its tokens are
// in the KV cache, and so many new tokens were sampled.
func (s *Scheduler) Done(c Chunk, sampled int) {
	c.sequence.computed = c.To
	c.sequence.tokens += sampled
	c.sequence.rank += int64(sampled) * c.sequence.cost
	c.sequence.blocks.SetFilled(c.To)
}

// Loaded records the end of a load: the sequence runs from the next Plan on, with so many
// of its first tokens in the KV cache. After a failed load these are fewer than in its
// Load, in whole blocks, and the rest is computed.
func (s *Scheduler) Loaded(id ID, tokens int) {
	i := find(s.loading, id)
	if i < 0 {
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
	i := find(s.running, id)
	if i < 0 {
		panic(fmt.Sprintf("scheduler: sequence %d is not running", id))
	}
	s.running[i].computed = 0
	s.running[i].blocks.SetFilled(0)
}

// HoldAdmission has Plan admit no waiting sequence while it is set.
func (s *Scheduler) HoldAdmission(held bool) { s.held = held }

// PreemptAll preempts all running sequences, for which HoldAdmission is set, or the next Plan would admit
// them again. Loading ones stay.
func (s *Scheduler) PreemptAll() (preempted []ID) {
	st := step{Scheduler: s}
	for len(s.running) > 0 {
		st.preempt(s.running[len(s.running)-1])
	}
	return st.Preempted
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
	s.plans++
	s.settle()
	st := step{Scheduler: s, Plan: Plan{Chunks: s.chunks[:0]}, budget: s.limits.StepTokens}
	if s.policy.Order == Fair {
		st.promised = s.promises()
	}
	st.decodes()
	st.pace()
	st.prompts()
	if !st.outOfBlocks {
		st.admit(false)
	}
	st.extend()
	if !st.outOfBlocks {
		st.admit(true)
	}
	s.chunks = st.Chunks
	return st.Plan
}

// step is a plan that is being made.
type step struct {
	*Scheduler
	Plan
	// budget is what is left of the step's tokens.
	budget int
	// outOfBlocks: a running sequence lacked a block, so it was skipped or another preempted.
	outOfBlocks bool
	// promised are the blocks promised to others, while running sequences are scheduled.
	promised int
	// oldest is the first sequence with a prompt to compute; nil: there is none yet.
	oldest *sequence
}

// othersShare is the part of a step's tokens, one in so many, that is kept from the oldest
// prompt for others that fit whole.
const othersShare = 4

// each calls f with each running sequence while there is budget left. f may preempt it, and
// those after it.
func (st *step) each(f func(q *sequence)) {
	for i := 0; i < len(st.running) && st.budget > 0; {
		q := st.running[i]
		f(q)
		if i < len(st.running) && st.running[i] == q {
			i++
		}
	}
}

// decodes schedules the running sequences with one token left.
func (st *step) decodes() {
	st.each(func(q *sequence) {
		if q.tokens-q.computed == 1 {
			st.compute(q, 1)
		}
	})
}

// pace lowers the budget of prompts beside the decodes that are scheduled.
func (st *step) pace() {
	if st.limits.Pace == nil || len(st.Chunks) == 0 || st.budget == 0 {
		return
	}
	m := Mix{Decodes: len(st.Chunks)}
	for i := range st.Chunks {
		m.DecodeContext += st.Chunks[i].From
	}
	i := slices.IndexFunc(st.running, func(q *sequence) bool { return q.tokens-q.computed > 1 })
	switch {
	case i >= 0:
		m.PromptContext = st.running[i].computed
	case st.held || len(st.waiting) == 0:
		return
	}
	st.budget = min(st.budget, max(1, st.limits.Pace.PromptTokens(m, st.budget)))
}

// prompts schedules the oldest running prompt, up to its share, and others that fit whole.
func (st *step) prompts() {
	st.each(func(q *sequence) {
		left := q.tokens - q.computed
		if left < 2 {
			return
		}
		if n := st.portion(left); n > 0 {
			st.compute(q, n)
		}
		if st.oldest == nil {
			st.oldest = q
		}
	})
}

// portion is how many tokens of a prompt go into the step before others are considered.
func (st *step) portion(left int) int {
	switch {
	case left <= st.budget:
		return left
	case st.oldest == nil:
		return st.budget - st.budget/othersShare
	}
	return 0
}

// extend gives what is left of the budget to running prompts, in order.
func (st *step) extend() {
	st.each(func(q *sequence) {
		// Again where that preempts another, whose tokens are free then.
		for n := 1; n > 0; {
			if n = min(q.tokens-st.end(q), st.budget); n > 0 && !st.compute(q, n) {
				break
			}
		}
	})
}

// chunk is the index of a sequence's chunk, -1: it has none.
func (st *step) chunk(q *sequence) int {
	if q.chunk < len(st.Chunks) && st.Chunks[q.chunk].sequence == q {
		return q.chunk
	}
	return -1
}

// add adds a sequence's chunk.
func (st *step) add(q *sequence, to int) {
	q.chunk = len(st.Chunks)
	st.Chunks = append(st.Chunks, Chunk{ID: q.id, From: q.computed, To: to, Sample: to == q.tokens, sequence: q})
}

// end is where a sequence's chunk ends, or will begin.
func (st *step) end(q *sequence) int {
	if i := st.chunk(q); i >= 0 {
		return st.Chunks[i].To
	}
	return q.computed
}

// compute adds n tokens of a running sequence to the step, if there are blocks for them.
func (st *step) compute(q *sequence, n int) bool {
	to := st.end(q) + n
	if !st.reserve(q, to) {
		return false
	}
	st.budget -= n
	if i := st.chunk(q); i >= 0 {
		c := &st.Chunks[i]
		c.To, c.Sample = to, to == q.tokens
	} else {
		st.add(q, to)
	}
	return true
}

// reserve reserves the blocks that q needs for tokens and preempts later sequences where
// there are too few, whose tokens return to the budget. It fails where q itself is the one to
// be preempted: q is then skipped while later sequences are loading, and else preempted. q is
// also skipped where blocks will be free once copies have ended: those of preempted sequences
// that are being stored, for example.
func (st *step) reserve(q *sequence, tokens int) bool {
	for !st.take(q, tokens) {
		st.outOfBlocks = true
		v := st.victim(q)
		n := len(st.loading)
		if q.blocks.WillReserve(tokens, st.leave(q, tokens)) || v == q && n > 0 && compare(st.loading[n-1], q) > 0 {
			return false
		}
		st.preempt(v)
		if v == q {
			return false
		}
	}
	return true
}

// take reserves q's blocks for tokens, if there are so many that q may have.
func (st *step) take(q *sequence, tokens int) bool {
	if st.policy.Order != Fair || q.blocks.Missing(tokens) == 0 {
		return q.blocks.Reserve(tokens)
	}
	own := st.promise(q)
	if !q.blocks.CanReserve(tokens, st.leave(q, tokens)) || !q.blocks.Reserve(tokens) {
		return false
	}
	st.promised += st.promise(q) - own
	return true
}

// leave is the number of blocks that q leaves free for others: those promised to them, where q
// is not sure of its own.
func (st *step) leave(q *sequence, tokens int) int {
	if st.policy.Order != Fair || tokens <= q.secured {
		return 0
	}
	return st.promised - st.promise(q)
}

// victim is the running sequence to preempt where q lacks a block: the last one that is past
// its quantum, but none before q. Where none is, more was reserved than promised, and it is
// the last one.
func (st *step) victim(q *sequence) *sequence {
	last := len(st.running) - 1
	for i := last; i >= 0; i-- {
		v := st.running[i]
		if v.pastQuantum() {
			return v
		}
		if v == q {
			break
		}
	}
	return st.running[last]
}

// preempt preempts a running sequence and removes its chunk from this step.
func (st *step) preempt(q *sequence) {
	if st.policy.Order == Fair {
		st.promised -= st.promise(q)
	}
	i := slices.Index(st.running, q)
	st.running = slices.Delete(st.running, i, i+1)
	q.blocks.Release(true)
	q.computed, q.secured = 0, 0
	st.waiting = insert(st.waiting, q)
	st.Preempted = append(st.Preempted, q.id)
	if i := st.chunk(q); i >= 0 {
		st.budget += st.Chunks[i].To - st.Chunks[i].From
		st.Chunks = slices.Delete(st.Chunks, i, i+1)
		for ; i < len(st.Chunks); i++ {
			st.Chunks[i].sequence.chunk = i
		}
	}
	st.preemptions++
}

// promise is the number of blocks that an admitted sequence has yet to take of those that it
// is sure of: for its prompt and one token more, and its quantum.
func (s *Scheduler) promise(q *sequence) int {
	tokens := q.secured
	if q.tokens-q.computed > 1 {
		tokens = max(tokens, min(q.tokens+1, q.maxTokens))
	}
	if tokens <= q.computed {
		return 0
	}
	return q.blocks.Missing(tokens)
}

// promises is the number of blocks that are promised to running and loading sequences.
func (s *Scheduler) promises() (blocks int) {
	for _, list := range [...][]*sequence{s.running, s.loading} {
		for _, q := range list {
			blocks += s.promise(q)
		}
	}
	return blocks
}

// full reports whether as many sequences run or are loading as may.
func (s *Scheduler) full() bool { return len(s.running)+len(s.loading) >= s.limits.Sequences }

// admit moves waiting sequences to loading or running while the token budget, the limit of
// sequences, and the blocks that are neither used nor promised allow, for which running ones
// may give way. The first that does not fit blocks those after it; one that must wait for a copy
// does not. Prompts that do not fit whole into the budget get a part of it only where partly is
// set; else they are admitted without one, if one behind them fits whole.
func (st *step) admit(partly bool) {
	if st.held || len(st.waiting) == 0 || st.budget == 0 {
		return
	}
	st.promised = st.promises()
	for i := 0; i < len(st.waiting) && st.budget > 0; {
		full := st.full()
		if full && st.policy.Order != Fair {
			return
		}
		q := st.waiting[i]
		if q.waitsIn == st.plans {
			i++
			continue
		}
		// What waits for content holds up nobody, so it is asked also where there is no room.
		if !q.waits && !st.mayFit(q, full) {
			return
		}
		// The last token is always computed, since its logits give the next one.
		cached, at := q.blocks.Match(q.tokens - 1)
		if q.waits = at == MustWait; q.waits {
			q.waitsIn = st.plans
			i++
			continue
		}
		left := q.tokens - cached
		n := st.portion(left)
		switch {
		case at == MustLoad:
			n = 0
		case partly:
			n = min(left, st.budget)
		case n == 0 && !slices.ContainsFunc(st.waiting[i+1:], func(q *sequence) bool { return q.tokens <= st.budget }):
			q.blocks.Release(true)
			return
		}
		if full || !st.fits(q) {
			st.makeRoom(q)
			full = st.full()
		}
		if full || !st.fits(q) || !q.blocks.Reserve(cached+n) {
			q.blocks.Release(true)
			return
		}
		q.secured = st.policy.secured(q)
		st.promised += q.blocks.Missing(st.policy.needs(q))
		// What gave way for q is behind it.
		copy(st.waiting[1:i+1], st.waiting[:i])
		st.waiting = st.waiting[1:]
		st.Admitted = append(st.Admitted, q.id)
		if at == MustLoad {
			st.loading = insert(st.loading, q)
			st.Loads = append(st.Loads, Load{ID: q.id, Tokens: cached})
			continue
		}
		q.computed = cached
		st.running = insert(st.running, q)
		if st.oldest == nil {
			st.oldest = q
		}
		if n > 0 {
			st.budget -= n
			st.add(q, cached+n)
		}
	}
}
