package scheduler

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// Order is which of two sequences comes first: is admitted before the other, and preempted
// after it.
type Order uint8

// The orders.
const (
	// FCFS is first come, first served.
	FCFS Order = iota
	// ByPriority is by priority, lower values first, and those of one priority in order of
	// arrival: vLLM's policy of that name.
	ByPriority
	// Fair is by virtual runtime, after Linux's completely fair scheduler: see the package's
	// comment.
	Fair
)

func (o Order) String() string {
	if names := [...]string{"fcfs", "priority", "fair"}; int(o) < len(names) {
		return names[o]
	}
	return fmt.Sprintf("Order(%d)", uint8(o))
}

// Policy decides how sequences compete for the KV cache. The zero value is FCFS.
type Policy struct {
	Order Order
	// Granularity is, under Fair, the number of tokens that an admitted sequence samples
	// before it can be preempted (its quantum), and by which a sequence must be ahead of a
	// waiting one to make room for it. At least 1 under Fair, else unused.
	Granularity int
}

// WantedPriority is what priorities are allowed; empty where this one is.
func (p Policy) WantedPriority(priority int) string {
	switch {
	case p.Order == FCFS && priority != 0:
		return "0: requests come first in the order in which they arrive (--scheduling-policy fcfs)"
	case p.Order == Fair && (priority < MinNice || priority > MaxNice):
		return fmt.Sprintf("from %d to %d (--scheduling-policy fair)", MinNice, MaxNice)
	}
	return ""
}

// Priorities under Fair are nice levels: each is a weight of 1.25 times the next one's.
const (
	MinNice = -20
	MaxNice = 19
)

// tokenCost is the virtual runtime of one token at priority 0.
const tokenCost = 1 << 20

// cost is the virtual runtime of one token at a priority: tokenCost divided by its weight.
func cost(priority int) int64 {
	return int64(math.Round(tokenCost * math.Pow(1.25, float64(max(MinNice, min(priority, MaxNice))))))
}

// rank sets the place of a new sequence.
func (p Policy) rank(q *sequence, priority int, floor int64) {
	switch p.Order {
	case ByPriority:
		q.rank = int64(priority)
	case Fair:
		q.rank, q.cost = floor, cost(priority)
	}
}

// compare orders sequences by rank, then by arrival.
func compare(a, b *sequence) int {
	return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.id, b.id))
}

// needs are the tokens for which a waiting sequence must find blocks to be admitted: one more
// than it has, so that its first decode finds one, and under Fair those of its quantum; none
// beyond its maximum length.
func (p Policy) needs(q *sequence) int {
	ahead := 1
	if p.Order == Fair {
		ahead = p.Granularity
	}
	return min(q.tokens+ahead, q.maxTokens)
}

// secured is the end of the quantum that begins when a sequence is admitted.
func (p Policy) secured(q *sequence) int {
	if p.Order != Fair {
		return 0
	}
	return p.needs(q)
}

// pastQuantum reports whether a running sequence has sampled the tokens of its quantum. It
// always has where the policy knows none.
func (q *sequence) pastQuantum() bool { return q.tokens >= q.secured }

// givesWay reports whether a running sequence is to be preempted so that a waiting one is
// admitted.
func (p Policy) givesWay(running, waiting *sequence) bool {
	return p.Order == Fair && running.pastQuantum() && running.rank-waiting.rank >= int64(p.Granularity)*running.cost
}

// settle prepares ranks for a plan: the virtual runtimes of running sequences have grown since
// the last one.
func (s *Scheduler) settle() {
	if s.policy.Order != Fair {
		return
	}
	// A sequence that has not yet sampled a quantum does not count. Else those that keep
	// arriving would all start where the first of them did, and be admitted before
	// sequences that have run longer, which would starve.
	first := int64(math.MaxInt64)
	for _, list := range [...][]*sequence{s.running, s.loading, s.waiting} {
		for _, q := range list {
			if q.tokens-q.prompt >= s.policy.Granularity {
				first = min(first, q.rank)
			}
		}
	}
	if first != math.MaxInt64 {
		s.floor = max(s.floor, first)
	}
	if len(s.waiting) == 0 {
		// While nobody waits a sequence takes nothing from others. So what one of low weight,
		// or whose neighbors compute prompts, gets ahead is not held against it later.
		limit := s.floor + int64(s.policy.Granularity)*tokenCost
		for _, list := range [...][]*sequence{s.running, s.loading} {
			for _, q := range list {
				q.rank = min(q.rank, limit)
			}
		}
		slices.SortFunc(s.loading, compare)
	}
	slices.SortFunc(s.running, compare)
}

// mayFit is false where a waiting sequence certainly finds no place or no blocks, whatever a Match
// finds, and no other gives way to it.
func (st *step) mayFit(q *sequence, full bool) bool {
	if !full && q.blocks.MayReserve(st.policy.needs(q), st.promised) {
		return true
	}
	return slices.ContainsFunc(st.running, func(r *sequence) bool { return st.policy.givesWay(r, q) })
}

// fits reports whether a waiting sequence finds its blocks beside those promised to others.
func (st *step) fits(q *sequence) bool { return q.blocks.CanReserve(st.policy.needs(q), st.promised) }

// willFit reports whether it does once copies have ended, with so many blocks released in
// addition.
func (st *step) willFit(q *sequence, released int) bool {
	return q.blocks.WillReserve(st.policy.needs(q), st.promised-released)
}

// makeRoom preempts running sequences that give way to a waiting one, those of the highest rank
// first, until it will fit. It preempts none if it would not fit then, except where all give way:
// their blocks, of which they share some, suffice.
func (st *step) makeRoom(q *sequence) {
	if !st.full() && st.willFit(q, 0) {
		return
	}
	var victims []*sequence
	released := 0
	for i := len(st.running) - 1; i >= 0 && (len(victims) == 0 || !st.willFit(q, released)); i-- {
		if r := st.running[i]; st.policy.givesWay(r, q) {
			victims = append(victims, r)
			released += r.blocks.Exclusive()
		}
	}
	if !st.willFit(q, released) && len(victims) < len(st.running)+len(st.loading) {
		return
	}
	for i, v := range victims {
		if i > 0 && st.willFit(q, 0) {
			break
		}
		st.preempt(v)
	}
}
