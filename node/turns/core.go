package turns

import (
	"fmt"
	"time"
)

// Limits of turns.
type Limits struct {
	// Turn is how long a model with requests stays awake at least while others wait, and then how
	// long its running requests may take to finish.
	Turn time.Duration
	// Linger is how long a model without requests stays awake for those that its clients may
	// send. Default: a tenth of Turn.
	Linger time.Duration
	// Retry is the pause after a failed sleep or wake. Default: 1 s.
	Retry time.Duration
}

// EnsureDefaults returns l with its defaults filled in.
func (l Limits) EnsureDefaults() Limits {
	if l.Linger == 0 {
		l.Linger = l.Turn / 10
	}
	if l.Retry == 0 {
		l.Retry = time.Second
	}
	return l
}

// Load is how many sequences of a model run, and wait.
type Load struct{ Running, Waiting int }

func (l Load) any() bool { return l.Running+l.Waiting > 0 }

// Kind of an action.
type Kind int

// The kinds of actions.
const (
	// Nothing is to be done until Action.At, or until something happens.
	Nothing Kind = iota
	// Sleep puts a model to sleep once its running requests have finished. Slept reports the end.
	Sleep
	// Hurry has the Sleep under way preempt the running requests.
	Hurry
	// Wake wakes a model. Woken reports the end.
	Wake
)

func (k Kind) String() string { return [...]string{"nothing", "sleep", "hurry", "wake"}[k] }

// Action is what to do now.
type Action struct {
	Kind  Kind
	Model int
	// At is when Decide is to be called again at the latest; negative: when something happens.
	At time.Duration
}

// phase is what a core waits for.
type phase int

const (
	serving phase = iota // a model is awake
	leaving              // it is being put to sleep
	down                 // none is awake
	rising               // one is being woken
)

// Core decides who is awake. One goroutine uses it.
type Core struct {
	limits Limits
	phase  phase
	// model that is awake, or going to sleep, or waking; of down: the last one.
	model int
	// since is when the model was woken, active when it last had requests, left when it began to go to
	// sleep; hurried: Hurry was given out.
	since, active, left time.Duration
	hurried             bool
	// waiting is since when each sleeping model has requests; -1: it has none.
	waiting []time.Duration
	// notBefore is the end of the pause after a failure.
	notBefore time.Duration
	// failed is the model whose wake failed last, -1: none.
	failed int
}

// NewCore makes a core of so many models, of which one is awake since now.
func NewCore(l Limits, models, awake int, now time.Duration) *Core {
	l = l.EnsureDefaults()
	if l.Turn < 0 || l.Linger < 0 || l.Retry < 0 || models < 1 || awake < 0 || awake >= models {
		panic(fmt.Sprintf("turns: limits %+v of %d models, %d awake", l, models, awake))
	}
	c := &Core{limits: l, model: awake, since: now, active: now, waiting: make([]time.Duration, models), failed: -1}
	for i := range c.waiting {
		c.waiting[i] = -1
	}
	return c
}

// Awake is the model that is awake, -1: none is.
func (c *Core) Awake() int {
	if c.phase == serving {
		return c.model
	}
	return -1
}

// Decide returns what to do now, with the load of each model.
func (c *Core) Decide(now time.Duration, loads []Load) Action {
	c.observe(now, loads)
	nothing := Action{At: -1}
	switch c.phase {
	case serving:
		return c.serve(now, loads[c.model].any())
	case leaving:
		switch end := c.left + c.limits.Turn; {
		case c.hurried:
			return nothing
		case now < end:
			return Action{At: end}
		}
		c.hurried = true
		return Action{Kind: Hurry, Model: c.model, At: -1}
	case down:
		if now < c.notBefore {
			return Action{At: c.notBefore}
		}
		if next := c.next(); next >= 0 {
			c.model = next
		}
		c.phase = rising
		return Action{Kind: Wake, Model: c.model, At: -1}
	}
	return nothing
}

// observe notes since when requests wait for models that sleep.
func (c *Core) observe(now time.Duration, loads []Load) {
	for i, l := range loads {
		switch {
		case i == c.model && (c.phase == serving || c.phase == rising) || !l.any():
			c.waiting[i] = -1
		case c.waiting[i] < 0:
			c.waiting[i] = now
		}
	}
	if c.phase == serving && loads[c.model].any() {
		c.active = now
	}
}

// serve decides whether the turn of the model that is awake ends.
func (c *Core) serve(now time.Duration, busy bool) Action {
	if c.next() < 0 {
		return Action{At: -1}
	}
	end := c.since + c.limits.Turn
	if !busy {
		end = min(end, c.active+c.limits.Linger)
	}
	if end = max(end, c.notBefore); now < end {
		return Action{At: end}
	}
	c.phase, c.left, c.hurried = leaving, now, false
	return Action{Kind: Sleep, Model: c.model, At: -1}
}

// next is the sleeping model whose requests have waited longest, -1: none has any. One whose wake has
// just failed comes last.
func (c *Core) next() int {
	best := -1
	for i, at := range c.waiting {
		if at < 0 || i == c.model && c.phase == serving {
			continue
		}
		if best < 0 || best == c.failed || i != c.failed && at < c.waiting[best] {
			best = i
		}
	}
	return best
}

// Slept reports the end of a Sleep. Without success the model is awake.
func (c *Core) Slept(now time.Duration, ok bool) {
	if c.phase = down; !ok {
		c.phase, c.notBefore = serving, now+c.limits.Retry
		c.active = now
	}
}

// Woken reports the end of a Wake. Without success no model is awake.
func (c *Core) Woken(now time.Duration, ok bool) {
	if !ok {
		c.phase, c.failed, c.notBefore = down, c.model, now+c.limits.Retry
		return
	}
	c.phase, c.since, c.active, c.failed = serving, now, now, -1
}
