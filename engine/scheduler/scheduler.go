package scheduler

import (
	"cmp"
	"fmt"
	"slices"
)

// Limits bound steps and the cache.
type Limits struct {
	// Rows of a step, and Sequences that run at once.
	Rows, Sequences int
	// Blocks of the KV cache, of BlockTokens each.
	Blocks, BlockTokens int
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

// Plan is one step.
type Plan struct {
	// Preempted sequences lose their blocks first.
	Preempted []ID
	// Admitted sequences run from this step on (again, if they were preempted).
	Admitted []ID
	// Chunks are the step's rows, valid until the next Plan. None: there is nothing to do.
	Chunks []Chunk
}

// Scheduler holds what runs and what waits. One goroutine uses it.
type Scheduler struct {
	limits  Limits
	free    int // blocks
	running []*sequence
	waiting []*sequence // both ascending by ID
	preempt int64
	chunks  []Chunk // the room of a Plan's
}

// sequence is one sequence's state.
type sequence struct {
	id       ID
	tokens   int // known: prompt and drawn
	computed int // with keys and values in the cache
	blocks   int // taken
}

// New makes an empty scheduler.
func New(l Limits) *Scheduler {
	if l.Rows < 1 || l.Sequences < 1 || l.Blocks < 1 || l.BlockTokens < 1 {
		panic(fmt.Sprintf("scheduler: limits %+v", l))
	}
	return &Scheduler{limits: l, free: l.Blocks}
}

func (s *Scheduler) blocksFor(tokens int) int {
	return (tokens + s.limits.BlockTokens - 1) / s.limits.BlockTokens
}

// Fits says whether a sequence of that many tokens can run when it is alone.
func (s *Scheduler) Fits(tokens int) bool { return s.blocksFor(tokens) <= s.limits.Blocks }

// Add lets a new sequence wait: tokens known, and most how many it can have in the
// end, which Fits. Its id is higher than all before it.
func (s *Scheduler) Add(id ID, tokens, most int) {
	if tokens < 1 || most < tokens || !s.Fits(most) {
		panic(fmt.Sprintf("scheduler: sequence %d of %d to %d tokens in a cache of %d blocks", id, tokens, most, s.limits.Blocks))
	}
	if n := len(s.waiting); n > 0 && s.waiting[n-1].id >= id {
		panic(fmt.Sprintf("scheduler: sequence %d comes after %d", id, s.waiting[n-1].id))
	}
	s.waiting = append(s.waiting, &sequence{id: id, tokens: tokens})
}

// Remove takes a sequence out, wherever it is; its blocks are free again. It says
// whether it ran.
func (s *Scheduler) Remove(id ID) bool {
	if i := index(s.running, id); i >= 0 {
		s.free += s.running[i].blocks
		s.running = slices.Delete(s.running, i, i+1)
		return true
	}
	if i := index(s.waiting, id); i >= 0 {
		s.waiting = slices.Delete(s.waiting, i, i+1)
		return false
	}
	panic(fmt.Sprintf("scheduler: there is no sequence %d", id))
}

func index(list []*sequence, id ID) int {
	i, found := slices.BinarySearchFunc(list, id, func(q *sequence, id ID) int { return cmp.Compare(q.id, id) })
	if !found {
		return -1
	}
	return i
}

// Done says that the step has carried out a chunk of the latest Plan: its tokens now have
// their keys and values in the cache, and behind them so many were drawn.
func (s *Scheduler) Done(c Chunk, drawn int) {
	c.sequence.computed = c.To
	c.sequence.tokens += drawn
}

// Restart makes a running sequence compute all its tokens again, in the blocks it has.
func (s *Scheduler) Restart(id ID) { s.get(id).computed = 0 }

func (s *Scheduler) get(id ID) *sequence {
	i := index(s.running, id)
	if i < 0 {
		panic(fmt.Sprintf("scheduler: sequence %d does not run", id))
	}
	return s.running[i]
}

// Running is how many sequences run.
func (s *Scheduler) Running() int { return len(s.running) }

// Waiting is how many sequences wait, preempted ones among them.
func (s *Scheduler) Waiting() int { return len(s.waiting) }

// FreeBlocks is how many blocks nobody has.
func (s *Scheduler) FreeBlocks() int { return s.free }

// Preemptions so far.
func (s *Scheduler) Preemptions() int64 { return s.preempt }

// Plan decides the next step.
func (s *Scheduler) Plan() Plan {
	p := Plan{Chunks: s.chunks[:0]}
	rows := s.limits.Rows
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
	if len(p.Preempted) == 0 {
		s.admit(&p, rows)
	}
	s.chunks = p.Chunks
	return p
}

// room takes the blocks that q needs for tokens, preempting later sequences where
// there are too few; back is how many rows of the step they had. It says no where q
// itself is the latest left, and then preempts q.
func (s *Scheduler) room(q *sequence, tokens int, p *Plan) (back int, ok bool) {
	need := s.blocksFor(tokens) - q.blocks
	if need <= 0 {
		return 0, true
	}
	for s.free < need {
		last := s.running[len(s.running)-1]
		back += s.drop(last, p)
		if last == q {
			return back, false
		}
	}
	s.free -= need
	q.blocks += need
	return back, true
}

// drop preempts a running sequence, which loses its rows of this step too, and
// says how many these were.
func (s *Scheduler) drop(q *sequence, p *Plan) (back int) {
	s.running = s.running[:len(s.running)-1]
	s.free += q.blocks
	q.blocks, q.computed = 0, 0
	at, _ := slices.BinarySearchFunc(s.waiting, q.id, func(w *sequence, id ID) int { return int(w.id - id) })
	s.waiting = slices.Insert(s.waiting, at, q)
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

// admit lets waiting sequences run while rows, places and blocks last. The first
// that does not fit holds up those behind it.
func (s *Scheduler) admit(p *Plan, rows int) {
	for len(s.waiting) > 0 && rows > 0 && len(s.running) < s.limits.Sequences {
		q := s.waiting[0]
		// One token more than it has, so that its first decode finds a place; a
		// sequence as long as the cache has no more to come.
		need := min(s.blocksFor(q.tokens+1), s.limits.Blocks)
		if s.free < need {
			return
		}
		n := min(q.tokens, rows)
		q.blocks = s.blocksFor(n)
		s.free -= q.blocks
		rows -= n
		s.waiting = s.waiting[1:]
		at, _ := slices.BinarySearchFunc(s.running, q.id, func(r *sequence, id ID) int { return int(r.id - id) })
		s.running = slices.Insert(s.running, at, q)
		p.Admitted = append(p.Admitted, q.id)
		p.Chunks = append(p.Chunks, Chunk{ID: q.id, From: 0, To: n, Draw: n == q.tokens, sequence: q})
	}
}
