package offload

import (
	"errors"
	"time"

	"github.com/moeserve/moeserve/harvest"
)

// Budget is for mediums whose memory others want, too: how much of it a tier has depends on
// what its blocks are worth there. The engine's goroutine uses it.
type Budget interface {
	// Report reports how the tier's blocks are used, and which use those would have that are
	// not there. Where there is no memory for these, it asks others to give way. It returns how
	// many more blocks would find memory now, as far as is known.
	Report(u harvest.Use) (room int, err error)
}

// budgetInterval is the time between two reports to a Budget.
const budgetInterval = 100 * time.Millisecond

// budget is the state of a level with a Budget.
type budget struct {
	next time.Duration // report
	// here are the uses of the level's blocks, below of those that only slower levels have.
	here, below harvest.Reuse
	// closed: until the next report nothing is stored.
	closed bool
}

// shareMemory reports to the budgets how blocks are used. The accounts allocate no more
// blocks than there is memory for: new blocks then take the place of old ones. mu is held.
func (t *Tiers) shareMemory() {
	now := t.o.Machine.Now()
	for i, l := range t.levels {
		if l.Budget == nil || now < l.budget.next {
			continue
		}
		l.budget.next = now + budgetInterval
		room, err := l.Budget.Report(t.use(i, now))
		if err != nil && !errors.Is(err, harvest.ErrClosed) {
			t.log.Warn("kv peer tier not weighed against other clients", "in", l.Name, "err", err)
		}
		l.account.Withhold(l.account.Stats().Free - room)
		l.budget.closed = false
	}
}

// use is how the blocks of a level are used. mu is held.
func (t *Tiers) use(level int, now time.Duration) harvest.Use {
	l := t.levels[level]
	s := l.account.Stats()
	here, below := s.Evictable+s.Pinned, 0
	var loaded int64 // from slower levels
	for _, slower := range t.levels[level+1:] {
		s := slower.account.Stats()
		below = max(below, s.Evictable+s.Pinned)
		loaded += s.Loaded
	}
	if l.backed {
		below = max(below-here, 0) // slower levels have what is here, too
	}
	l.budget.here.Observe(s.Loaded, float64(here), now)
	l.budget.below.Observe(loaded, float64(below), now)
	u := harvest.Use{PerSecond: l.budget.here.PerSecond(), WantedPerSecond: l.budget.below.PerSecond()}
	wanted := min(below, s.Free)
	if level == len(t.levels)-1 { // nothing is known of blocks that are not here
		wanted, u.WantedPerSecond = s.Free, u.PerSecond
	}
	bytes := int64(t.factor) * t.o.Pool.Shape().BlockBytes()
	u.Wanted, u.Saved = int64(wanted)*bytes, t.saved(level, bytes)
	return u
}

// saved is the time that a load of a block saves over the next best source: a slower level, if
// that has the block, or computing it. mu is held.
func (t *Tiers) saved(level int, bytes int64) time.Duration {
	l := t.levels[level]
	otherwise := t.costs.share(t.factor * t.o.Blocks.BlockTokens()) // seconds
	if l.backed && level+1 < len(t.levels) {
		if r := t.levels[level+1].rate(); r > 0 && (otherwise == 0 || float64(bytes)/r < otherwise) {
			otherwise = float64(bytes) / r
		}
	}
	if r := l.rate(); r > 0 {
		otherwise -= float64(bytes) / r
	}
	return max(0, time.Duration(otherwise*float64(time.Second)))
}
