package lending

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kvcache"
)

// CoreOptions tune a Core.
type CoreOptions struct {
	// ExtentBlocks is the number of KV blocks of an extent.
	ExtentBlocks int
	// Factor is how many times as much an extent must be worth to one side as to the other to
	// move. At least 1. Default: 2.
	Factor float64
	// Residence is the minimum time that an extent stays with a side. Default: 5 s.
	Residence time.Duration
	// Ahead is the maximum number of extents that are lent and have no expert yet. Default: 8.
	Ahead int
}

// EnsureDefaults returns o with its defaults filled in.
func (o CoreOptions) EnsureDefaults() CoreOptions {
	setDefault(&o.Factor, 2)
	setDefault(&o.Residence, 5*time.Second)
	setDefault(&o.Ahead, 8)
	return o
}

func setDefault[T comparable](field *T, to T) {
	var zero T
	if *field == zero {
		*field = to
	}
}

// View is the state that a Core decides by.
type View struct {
	// Reuse of KV blocks. Present blocks are those of the KV cache now, of which Free ones are
	// used by no sequence.
	Reuse         kvcache.Reuse
	Present, Free int
	// Lacking is how many blocks must be free for the first waiting request, if it waits for that,
	// else 0. Running is the number of running sequences.
	Lacking, Running int
	// BlockSeconds is what one block saves when it is found; 0: unknown.
	BlockSeconds float64
	// Next is what further extents are worth to experts, in seconds of copies per second, most
	// first, and Fetch the seconds of one copy.
	Next  []float64
	Fetch float64
	// Exposed is the share of experts' copies for which compute waits; Load is the share of time
	// in which experts are copied. Both from 0 to 1.
	Exposed, Load float64
	// Lent extents.
	Lent []Extent
	// Least is the extent that would be withdrawn next.
	Least kvcache.ExtentState
	// Target is how many extents are to be lent, whatever they are worth; nil: the worth decides.
	Target *int
}

// Extent is a lent extent.
type Extent struct {
	// Worth of its expert, as in View.Next; 0: none, or one that is not used.
	Worth float64
	// Since when it is lent.
	Since time.Duration
	// Free: no expert is there, since FreeSince.
	Free      bool
	FreeSince time.Duration
}

// Decision is what a Core decides.
type Decision struct {
	// Lend is how many extents are to be lent in addition.
	Lend int
	// Return are extents to be returned, as indices into View.Lent.
	Return []int
}

// Core decides how many extents experts have. It is pure: time is passed in.
type Core struct {
	o CoreOptions
	// cold are uses of the coldest blocks, all of all cached ones; lost are those that lost ones
	// would have had, late of those lost last.
	cold, all, lost, late harvest.Reuse
	// lendFrom is when extents may be lent again, hold how long they were kept back, and lentAt
	// when one was last lent.
	lendFrom, hold, lentAt time.Duration
}

const (
	// coldShare is the part of the cache that Reuse.ColdHits counts, lateShare that of the lost
	// blocks that LateHits does.
	coldShare, lateShare = 0.25, 0.25
	// growth is the part of the used blocks for which free ones are kept.
	growth = 0.25
	// maxHold is the maximum time for which nothing is lent after extents came back.
	maxHold = time.Minute
)

// NewCore returns a core without history.
func NewCore(o CoreOptions) *Core {
	o = o.EnsureDefaults()
	return &Core{o: o, hold: o.Residence}
}

// Decide is called regularly, at least once a second while there is work.
func (c *Core) Decide(v View, now time.Duration) (d Decision) {
	r := &v.Reuse
	c.cold.Observe(r.ColdHits, coldShare*float64(r.Cached), now)
	c.lost.Observe(r.LostHits, float64(r.Lost), now)
	c.late.Observe(r.LateHits, min(float64(r.Lost), lateShare*float64(r.MaxLost)), now)
	c.all.Observe(r.Hits, float64(r.Cached), now)
	if v.Target != nil {
		return c.follow(&v)
	}
	if d.Return = c.returns(&v, now); len(d.Return) == 0 {
		d.Lend = c.lend(&v, now)
	}
	return d
}

// follow comes nearer to the target, by up to Ahead extents, of which it lends as many as there are
// free blocks for. Where nothing runs that would leave the first waiting request the blocks that it
// lacks, that gets them at once, and the target has to wait.
func (c *Core) follow(v *View) (d Decision) {
	more, most := *v.Target-len(v.Lent), c.o.Ahead
	stuck := v.Lacking > 0 && v.Running == 0
	if lacks := v.Lacking - v.Free; stuck && lacks > 0 {
		n := (lacks + c.o.ExtentBlocks - 1) / c.o.ExtentBlocks
		more, most = min(more, -n), max(most, n)
	}
	switch {
	case more < 0:
		d.Return = byWorth(v.Lent)[:min(-more, most, len(v.Lent))]
	case !stuck:
		room := (v.Free - c.reserve(v) - v.Least.Busy) / c.o.ExtentBlocks
		d.Lend = max(0, min(more, most-ahead(v.Lent), room))
	}
	return d
}

// wanted is how often per second a block that was lost would be found: on average over all of
// them, or of those lost last, whichever is more.
func (c *Core) wanted() float64 { return max(c.lost.PerSecond(), c.late.PerSecond()) }

// reserve is how many blocks are kept free for running sequences to grow.
func (c *Core) reserve(v *View) int { return int(growth * float64(v.Present-v.Free)) }

// ahead is the number of extents that no expert has come to.
func ahead(lent []Extent) (n int) {
	for _, x := range lent {
		if x.Free {
			n++
		}
	}
	return n
}

// byWorth are the indices of extents, of those that are worth least first.
func byWorth(lent []Extent) []int {
	order := make([]int, len(lent))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(lent[a].Worth, lent[b].Worth) })
	return order
}

// lend is how many extents experts get in addition.
func (c *Core) lend(v *View, now time.Duration) (n int) {
	if now < c.lendFrom || v.Lacking > 0 {
		return 0
	}
	free, empty := v.Free-c.reserve(v), v.Reuse.Empty-c.reserve(v)
	for i := ahead(v.Lent); i < min(len(v.Next), c.o.Ahead) && free >= c.o.ExtentBlocks+v.Least.Busy; i++ {
		gain := v.Next[i] * v.Exposed
		// Empty blocks are worth what comes back to them of what was lost.
		lost := min(max(c.o.ExtentBlocks-empty, 0), c.o.ExtentBlocks)
		wanted := min(max(c.o.ExtentBlocks-lost-(empty-v.Reuse.Lost), 0), c.o.ExtentBlocks-lost)
		loss := (float64(lost)*max(c.cold.PerSecond(), c.wanted()) + float64(wanted)*c.wanted()) * v.BlockSeconds
		// Of the blocks that are dropped now some are computed again, at most once.
		again := float64(min(lost, v.Least.Cached)) * min(1, c.all.PerSecond()*harvest.Horizon.Seconds()) * v.BlockSeconds
		if gain <= c.o.Factor*loss || (gain-loss)*harvest.Horizon.Seconds() <= v.Fetch+again {
			break
		}
		n++
		free, empty = free-c.o.ExtentBlocks, empty-c.o.ExtentBlocks
	}
	if n > 0 {
		c.lentAt = now
	}
	return n
}

// returns are the extents that the KV cache gets back.
func (c *Core) returns(v *View, now time.Duration) (back []int) {
	lacking := v.Lacking - v.Free
	pressed := v.Lacking > 0 && lacking > 0
	lost := v.Reuse.Lost
	if v.Reuse.Empty > c.reserve(v)+c.o.ExtentBlocks {
		lost = 0 // there is room for them
	}
	for _, i := range byWorth(v.Lent) {
		x := &v.Lent[i]
		due := now-x.Since >= c.o.Residence
		gain := float64(min(max(lost, 0), c.o.ExtentBlocks)) * c.wanted() * v.BlockSeconds
		if lacking > 0 {
			gain += float64(min(lacking, c.o.ExtentBlocks)) / float64(v.Lacking) / float64(v.Running+1)
			due = true
		}
		// What is hidden now would not be if experts had less memory and the link were busy.
		loss := x.Worth * max(v.Exposed, v.Load)
		unused := x.Free && now-x.FreeSince >= c.o.Residence && due
		if !due || !unused && (gain <= 0 || gain <= c.o.Factor*loss) {
			if due {
				break
			}
			continue
		}
		back = append(back, i)
		lost, lacking = lost-c.o.ExtentBlocks, lacking-c.o.ExtentBlocks
	}
	if len(back) > 0 {
		c.holdBack(pressed, now)
	}
	return back
}

// holdBack has nothing be lent for a time: longer where requests lacked what had just been lent.
func (c *Core) holdBack(pressed bool, now time.Duration) {
	if now < c.lendFrom {
		return // the same return goes on
	}
	if pressed && now-c.lentAt < 4*c.hold {
		c.hold = min(2*c.hold, maxHold)
	} else {
		c.hold = c.o.Residence
	}
	c.lendFrom = now + c.hold
}

// share is part/whole, from 0 to 1; 0 where nothing is known.
func share(part, whole float64) float64 {
	if !(whole > 0) {
		return 0
	}
	return math.Min(1, math.Max(0, part/whole))
}
