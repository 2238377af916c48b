package scheduler

import "slices"

// Lacking is how many blocks must be free for the first waiting sequence that does not wait for
// content, if it waits because there are not so many; else 0. These are the blocks that it would
// not share with others, and those promised to admitted sequences.
func (s *Scheduler) Lacking() int {
	i := slices.IndexFunc(s.waiting, func(q *sequence) bool { return !q.waits })
	if i < 0 || s.full() {
		return 0
	}
	q := s.waiting[i]
	return q.blocks.Lacks(s.policy.needs(q), s.promises())
}
