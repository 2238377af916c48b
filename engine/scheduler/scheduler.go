package scheduler

import (
	"cmp"
	"fmt"
	"slices"
)

// Limits bound steps and sequences.
type Limits struct {
	// StepTokens of a step, and Sequences that load or run at once.
	StepTokens, Sequences int
	// CacheTokens that the whole KV cache holds, and so the most of one sequence.
	CacheTokens int
}

// Blocks are the KV blocks of one sequence, as a part of an account that all sequences
// share. *kvcache.Table has them.
type Blocks interface {
	// Match takes the blocks that hold the sequence's first tokens, at most most of
	// them, and returns how many tokens these are; not ready: they must be loaded
	// first, into blocks that are reserved for them. The sequence has no blocks before.
	Match(most int) (tokens int, ready bool)
	// Room says whether Reserve would succeed.
	Room(tokens int) bool
	// Reserve takes the blocks that the sequence's first tokens need and it has not:
	// all of them, or none and returns false.
	Reserve(tokens int) bool
	// Filled says that the first tokens are in the cache; those behind them are not.
	Filled(tokens int)
	// Release gives all blocks back. With keep what they hold can be matched until they
	// are reused.
	Release(keep bool)
}

// ID names a sequence; ascending in order of arrival.
type ID int64

// Chunk is what one sequence does in a step: it computes tokens [From, To), and
// draws a token behind the last of them where Draw is set.
type Chunk struct {
	ID       ID
	From, To int
	Draw     bool
	sequence *sequence
}

// Load is what a sequence needs before it can run: the keys and values of its first
// tokens, in the blocks that it has.
type Load struct {
	ID     ID
	Tokens int
}

// Plan is one step.
type Plan struct {
	// Preempted sequences have lost their blocks.
	Preempted []ID
	// Admitted sequences wait no more (again, if they were preempted).
	Admitted []ID
	// Loads begin now, of those admitted that do not run at once. Loaded ends each.
	Loads []Load
	// Chunks are the step's rows, valid until the next Plan. None: there is nothing to
	// do before a sequence arrives or is loaded.
	Chunks []Chunk
	// short: a sequence has no rows because it found no block.
	short bool
}

// Scheduler holds what waits, loads and runs. One goroutine uses it.
type Scheduler struct {
	limits  Limits
	waiting []*sequence // as the others, ascending by ID
	loading []*sequence
	running []*sequence
	preempt int64
	chunks  []Chunk // the room of a Plan's
}

// sequence is one sequence's state.
type sequence struct {
	id       ID
	blocks   Blocks
	tokens   int // known: prompt and drawn
	most     int // that it can have in the end
	computed int // with keys and values in the cache
}

// New makes an empty scheduler.
func New(l Limits) *Scheduler {
	if l.StepTokens < 1 || l.Sequences < 1 || l.CacheTokens < 1 {
		panic(fmt.Sprintf("scheduler: limits %+v", l))
	}
	return &Scheduler{limits: l}
}

// Add lets a new sequence wait: tokens known, and most how many it can have in the
// end. Its id is higher than all before it.
func (s *Scheduler) Add(id ID, b Blocks, tokens, most int) {
	if tokens < 1 || most < tokens || most > s.limits.CacheTokens {
		panic(fmt.Sprintf("scheduler: sequence %d of %d to %d tokens in a cache of %d", id, tokens, most, s.limits.CacheTokens))
	}
	if n := len(s.waiting); n > 0 && s.waiting[n-1].id >= id {
		panic(fmt.Sprintf("scheduler: sequence %d comes after %d", id, s.waiting[n-1].id))
	}
	s.waiting = append(s.waiting, &sequence{id: id, blocks: b, tokens: tokens, most: most})
}

// Remove takes a sequence out, wherever it is, and releases its blocks, whose content
// is kept. Nothing is written to them any more: who removes one that loads has ended
// the load.
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

// index is the place of a sequence in a list, or the one where it would be.
func index(list []*sequence, id ID) (int, bool) {
	return slices.BinarySearchFunc(list, id, func(q *sequence, id ID) int { return cmp.Compare(q.id, id) })
}

func insert(list []*sequence, q *sequence) []*sequence {
	i, _ := index(list, q.id)
	return slices.Insert(list, i, q)
}

// Done says that the step has carried out a chunk of the latest Plan: its tokens now have
// their keys and values in the cache, and behind them so many were drawn.
func (s *Scheduler) Done(c Chunk, drawn int) {
	c.sequence.computed = c.To
	c.sequence.tokens += drawn
	c.sequence.blocks.Filled(c.To)
}

// Loaded says that a load has ended: the sequence runs from the next Plan on, with so
// many of its first tokens in the cache. They are fewer than its Load says, in whole
// blocks, where the load has failed; the rest is computed.
func (s *Scheduler) Loaded(id ID, tokens int) {
	i, found := index(s.loading, id)
	if !found {
		panic(fmt.Sprintf("scheduler: sequence %d does not load", id))
	}
	q := s.loading[i]
	s.loading = slices.Delete(s.loading, i, i+1)
	s.running = insert(s.running, q)
	q.computed = tokens
	q.blocks.Filled(tokens)
}

// Restart makes a running sequence compute all its tokens again, in the blocks it has.
func (s *Scheduler) Restart(id ID) {
	i, found := index(s.running, id)
	if !found {
		panic(fmt.Sprintf("scheduler: sequence %d does not run", id))
	}
	s.running[i].computed = 0
	s.running[i].blocks.Filled(0)
}

// Running is how many sequences run.
func (s *Scheduler) Running() int { return len(s.running) }

// Loading is how many sequences load.
func (s *Scheduler) Loading() int { return len(s.loading) }

// Waiting is how many sequences wait, preempted ones among them.
func (s *Scheduler) Waiting() int { return len(s.waiting) }

// Preemptions so far.
func (s *Scheduler) Preemptions() int64 { return s.preempt }

// Plan decides the next step.
func (s *Scheduler) Plan() Plan {
	p := Plan{Chunks: s.chunks[:0]}
	rows := s.limits.StepTokens
	for _, decode := range []bool{true, false} {
		// Preempting shortens s.running behind i.
		for i := 0; i < len(s.running) && rows > 0; i++ {
			q := s.running[i]
			left := q.tokens - q.computed
			if left == 0 || (left == 1) != decode {
				continue
			}
			n := min(left, rows)
			back, ok := s.room(q, q.computed+n, &p)
			rows += back
			if !ok {
				continue
			}
			rows -= n
			p.Chunks = append(p.Chunks, Chunk{ID: q.id, From: q.computed, To: q.computed + n, Draw: n == left, sequence: q})
		}
	}
	if len(p.Preempted) == 0 && !p.short {
		s.admit(&p, rows)
	}
	s.chunks = p.Chunks
	return p
}

// room reserves the blocks that q needs for tokens, preempting later sequences where
// there are too few; back is how many rows of the step they had. It says no where q
// itself is the latest left: then q waits for the blocks of later ones that load or,
// where there are none, is preempted.
func (s *Scheduler) room(q *sequence, tokens int, p *Plan) (back int, ok bool) {
	for !q.blocks.Reserve(tokens) {
		last := s.running[len(s.running)-1]
		if n := len(s.loading); last == q && n > 0 && s.loading[n-1].id > q.id {
			p.short = true
			return back, false
		}
		back += s.drop(last, p)
		if last == q {
			return back, false
		}
	}
	return back, true
}

// drop preempts the latest running sequence, which loses its rows of this step too, and
// says how many these were.
func (s *Scheduler) drop(q *sequence, p *Plan) (back int) {
	s.running = s.running[:len(s.running)-1]
	q.blocks.Release(false)
	q.computed = 0
	s.waiting = insert(s.waiting, q)
	p.Preempted = append(p.Preempted, q.id)
	p.Chunks = slices.DeleteFunc(p.Chunks, func(c Chunk) bool {
		if c.ID != q.id {
			return false
		}
		back += c.To - c.From
		return true
	})
	s.preempt++
	return back
}

// admit lets waiting sequences load or run while rows, places and blocks last. The
// first that does not fit holds up those behind it.
func (s *Scheduler) admit(p *Plan, rows int) {
	for len(s.waiting) > 0 && rows > 0 && len(s.running)+len(s.loading) < s.limits.Sequences {
		q := s.waiting[0]
		// Its last token is computed in any case, since the next is drawn behind it.
		have, ready := q.blocks.Match(q.tokens - 1)
		take := have
		if ready {
			take = min(q.tokens, have+rows)
		}
		// One token more than it has, so that its first decode finds a place; a
		// sequence as long as it can be has no more to come.
		if !q.blocks.Room(min(q.tokens+1, q.most)) || !q.blocks.Reserve(take) {
			q.blocks.Release(true)
			return
		}
		s.waiting = s.waiting[1:]
		p.Admitted = append(p.Admitted, q.id)
		if !ready {
			s.loading = insert(s.loading, q)
			p.Loads = append(p.Loads, Load{ID: q.id, Tokens: have})
			continue
		}
		q.computed = have
		rows -= take - have
		s.running = insert(s.running, q)
		p.Chunks = append(p.Chunks, Chunk{ID: q.id, From: have, To: take, Draw: take == q.tokens, sequence: q})
	}
}
