package emulated

import "slices"

// vclock is a vector clock: how far each actor (the host is 0, then the streams)
// was known to be. A missing entry is 0.
type vclock []uint32

func (v vclock) at(actor int) uint32 {
	if actor < len(v) {
		return v[actor]
	}
	return 0
}

// covers says whether all that w knows is known to v.
func (v vclock) covers(w vclock) bool {
	for i, n := range w {
		if n > v.at(i) {
			return false
		}
	}
	return true
}

// joined returns what a and b know together, in a slice of its own unless one of
// them is it.
func joined(a, b vclock) vclock {
	switch {
	case a.covers(b):
		return a
	case b.covers(a):
		return b
	}
	c := make(vclock, max(len(a), len(b)))
	for i := range c {
		c[i] = max(a.at(i), b.at(i))
	}
	return c
}

// met returns what both a and b know.
func met(a, b vclock) vclock {
	c := make(vclock, min(len(a), len(b)))
	for i := range c {
		c[i] = min(a[i], b[i])
	}
	return c
}

// actor is the host or a stream: who does accesses, and learns of others'.
type actor struct {
	id    int
	clock vclock
	// shared says that clock was handed out: it is copied before it changes, and
	// the actor's next access counts as later than what was handed out.
	shared bool
}

// snapshot returns what the actor knows and did so far. It must not be changed.
func (a *actor) snapshot() vclock {
	a.shared = true
	return a.clock
}

// join adds what v knows to what the actor knows.
func (a *actor) join(v vclock) {
	if a.clock.covers(v) {
		return
	}
	own := a.clock.at(a.id)
	stale := a.shared
	a.clock = slices.Clone(joined(a.clock, v))
	a.shared = false
	if stale {
		// The next access must not look like part of the snapshot taken before.
		a.clock[a.id] = own + 1
	}
}

// tick makes the actor's next access later than any snapshot, and returns its
// time.
func (a *actor) tick() uint32 {
	if a.shared {
		a.clock = slices.Clone(a.clock)
		a.clock[a.id]++
		a.shared = false
	}
	return a.clock[a.id]
}
