package offload

import "math"

// Part is a run of blocks that one tier has.
type Part struct {
	Medium         string
	Blocks, Tokens int
	Bytes          int64
	// QueuedBytes are loaded from the medium before.
	QueuedBytes int64
	// Latency in seconds, and BytesPerSecond, are what is expected of a load; a rate of 0:
	// unknown.
	Latency, BytesPerSecond float64
}

// Decisions count what the cost model was asked.
type Decisions struct {
	// Runs that were loaded whole, in part, and not at all.
	Loaded, Split, Computed int64
	// Tokens that were loaded, and that were computed though a tier had them.
	LoadedTokens, ComputedTokens int64
}

// costs decides whether the blocks of a run are faster loaded or computed again. It is pure.
//
// A load takes its latency, and what the queue before it and its bytes take on the path, by what
// loads of all sizes took; parts from different mediums are loaded at the same time. Computing takes what measured steps took, by the number
// of their tokens. The sequence waits for the load before the rest is computed, so a choice
// costs the time of the slowest load and that of computing what is not loaded. Only prefixes of
// the run can be loaded; all that end with a part are compared. While nothing is measured,
// everything is loaded.
//
// Two measures keep the choice steady and true: a medium that was chosen before is charged 10 %
// less, one that was not 10 % more; and every 32nd time that it is not chosen it is loaded from
// nevertheless, so that its rate is measured again.
type costs struct {
	steps     line // seconds by tokens
	mediums   map[string]*choice
	decisions Decisions
}

// choice is the last one about a medium.
type choice struct {
	refused bool
	// refusals since the last load.
	refusals int
}

const (
	hysteresis = 0.1
	probeEvery = 32
)

// computed reports a step.
func (c *costs) computed(tokens int, seconds float64) {
	if tokens > 0 && seconds > 0 {
		c.steps.add(lineDecay, float64(tokens), seconds)
	}
}

// seconds to compute that number of tokens, in steps no larger than those measured.
func (c *costs) seconds(tokens int) float64 {
	if tokens == 0 {
		return 0
	}
	whole := math.Floor(float64(tokens) / c.steps.most)
	s := whole * c.steps.at(c.steps.most)
	if rest := float64(tokens) - whole*c.steps.most; rest > 0 {
		s += c.steps.at(rest)
	}
	return s
}

// share of so many tokens in the seconds of a large step; 0: nothing is measured.
func (c *costs) share(tokens int) float64 {
	if c.steps.n == 0 {
		return 0
	}
	return c.steps.at(c.steps.most) / c.steps.most * float64(tokens)
}

func (c *costs) of(medium string) *choice {
	if c.mediums == nil {
		c.mediums = map[string]*choice{}
	}
	x := c.mediums[medium]
	if x == nil {
		x = &choice{}
		c.mediums[medium] = x
	}
	return x
}

// choose returns how many parts of a run, from the first on, are worth loading.
func (c *costs) choose(run []Part) int {
	if c.steps.n == 0 {
		return len(run)
	}
	rest := 0
	for _, p := range run {
		rest += p.Tokens
	}
	best, least := 0, c.seconds(rest)
	slowest := 0.0
	loads := map[string]float64{}
	for i, p := range run {
		if p.BytesPerSecond <= 0 {
			return len(run)
		}
		if _, ok := loads[p.Medium]; !ok {
			loads[p.Medium] = c.hysteresis(p.Medium)*p.Latency + float64(p.QueuedBytes)/p.BytesPerSecond
		}
		loads[p.Medium] += c.hysteresis(p.Medium) * float64(p.Bytes) / p.BytesPerSecond
		slowest = max(slowest, loads[p.Medium])
		rest -= p.Tokens
		if s := slowest + c.seconds(rest); s < least {
			best, least = i+1, s
		}
	}
	for best < len(run) && c.of(run[best].Medium).refusals+1 >= probeEvery {
		best++
	}
	return best
}

// hysteresis is the factor of a load's time by the last choice.
func (c *costs) hysteresis(medium string) float64 {
	if c.of(medium).refused {
		return 1 + hysteresis
	}
	return 1 - hysteresis
}

// count records that the first parts of a run are loaded and the others are not.
func (c *costs) count(run []Part, loaded int) {
	for i, p := range run {
		x := c.of(p.Medium)
		if x.refused = i >= loaded; x.refused {
			x.refusals++
			c.decisions.ComputedTokens += int64(p.Tokens)
		} else {
			x.refusals = 0
			c.decisions.LoadedTokens += int64(p.Tokens)
		}
	}
	switch loaded {
	case len(run):
		c.decisions.Loaded++
	case 0:
		c.decisions.Computed++
	default:
		c.decisions.Split++
	}
}

// line is a straight line fitted to measurements, of which recent ones count more.
type line struct {
	n, x, y, xx, xy float64
	// most is the largest x so far.
	most float64
}

const (
	// lineDecay is the weight of steps measured before in a new measurement.
	lineDecay = 0.97
	// minVariance of x, relative to its mean's square, from which a slope is known.
	minVariance = 0.01
)

// add adds a measurement; decay is the weight of those before.
func (l *line) add(decay, x, y float64) {
	for _, s := range []*float64{&l.n, &l.x, &l.y, &l.xx, &l.xy} {
		*s *= decay
	}
	l.n, l.x, l.y, l.xx, l.xy = l.n+1, l.x+x, l.y+y, l.xx+x*x, l.xy+x*y
	l.most = max(l.most, x)
}

// slope is between that of a constant and of a line through the origin; it is the latter's where
// x has hardly varied.
func (l *line) slope() (s float64, varied bool) {
	meanX, meanY := l.x/l.n, l.y/l.n
	variance := l.xx/l.n - meanX*meanX
	if variance <= minVariance*meanX*meanX {
		return meanY / meanX, false
	}
	return min(max((l.xy/l.n-meanX*meanY)/variance, 0), meanY/meanX), true
}

// at is the line's value.
func (l *line) at(x float64) float64 {
	s, _ := l.slope()
	return l.y/l.n + s*(x-l.x/l.n)
}
