package scheduler

// Lacking is how many blocks the first waiting sequence needs, if it waits because there are not
// so many; else 0.
func (s *Scheduler) Lacking() int {
	if len(s.waiting) == 0 || s.full() {
		return 0
	}
	q := s.waiting[0]
	needs := s.policy.needs(q)
	if q.blocks.CanReserve(needs, 0) {
		return 0
	}
	return q.blocks.Missing(needs)
}
