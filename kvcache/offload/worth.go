package offload

import (
	"time"

	"github.com/moeserve/moeserve/harvest"
)

// borrower is a Memory that others borrow from, too. It gets how its blocks are used, so
// that the memory goes to those who save the most time by it.
type borrower interface {
	SetUse(harvest.Use) error
}

// worth measures how a tier's blocks are used: those that it has, and those that are only in
// slower tiers.
type worth struct {
	here, below harvest.Reuse
	next        time.Duration
}

// worthInterval is the time between two reports.
const worthInterval = 250 * time.Millisecond

// reportWorth reports the use of borrowed tiers. mu is held.
func (t *Tiers) reportWorth() {
	now := t.o.Machine.Now()
	for i, l := range t.levels {
		b, ok := l.Memory.(borrower)
		if !ok || now < l.worth.next {
			continue
		}
		l.worth.next = now + worthInterval
		if err := b.SetUse(t.use(i, now)); err != nil {
			t.warn("use of a kv tier not reported", "medium", l.Name, "err", err)
		}
	}
}

// use is how the blocks of a level are used. mu is held.
func (t *Tiers) use(i int, now time.Duration) harvest.Use {
	l := t.levels[i]
	s := l.account.Stats()
	held := s.Evictable + s.Pinned
	var slower int
	var uses int64
	for _, o := range t.levels[i+1:] {
		s := o.account.Stats()
		slower = max(slower, s.Evictable+s.Pinned)
		uses += s.Loaded
	}
	if l.backed {
		slower -= held // they have what is here, too
	}
	below := max(slower, 0)
	l.worth.here.Observe(s.Loaded, float64(held), now)
	l.worth.below.Observe(uses, float64(below), now)
	bytes := int64(t.factor) * t.o.Pool.Shape().BlockBytes()
	return harvest.Use{
		PerSecond: l.worth.here.PerSecond(), Saved: t.saved(i, bytes),
		Wanted: int64(min(below, s.Capacity-held)) * bytes, WantedPerSecond: l.worth.below.PerSecond(),
	}
}

// saved is the time that a load of a block saves over the next best source: a slower tier, if
// that has the block, or computing. mu is held.
func (t *Tiers) saved(i int, bytes int64) time.Duration {
	l := t.levels[i]
	otherwise := 0.0 // seconds
	if t.costs.steps.n > 0 {
		tokens := t.factor * t.o.Blocks.BlockTokens()
		otherwise = t.costs.seconds(int(t.costs.steps.most)) / t.costs.steps.most * float64(tokens)
	}
	if l.backed && i+1 < len(t.levels) {
		if r := t.levels[i+1].rate(); r > 0 && (otherwise == 0 || float64(bytes)/r < otherwise) {
			otherwise = float64(bytes) / r
		}
	}
	if r := l.rate(); r > 0 {
		otherwise -= float64(bytes) / r
	}
	return max(0, time.Duration(otherwise*float64(time.Second)))
}
