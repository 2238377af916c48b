package emulated

import "slices"

// vclock is a vector clock: for each actor (0 is the host, then the streams) the time up to
// which its accesses are known. A missing entry is 0.
type vclock []uint32

func (v vclock) at(actor int) uint32 {
	if actor < len(v) {
		return v[actor]
	}
	return 0
}

// covers reports whether v knows everything that w knows.
func (v vclock) covers(w vclock) bool {
	for i, n := range w {
		if n > v.at(i) {
			return false
		}
	}
	return true
}

// joined returns the maximum of a and b in each entry. The result is a or b itself if that
// one covers the other, else a new slice.
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

// met returns the minimum of a and b in each entry.
func met(a, b vclock) vclock {
	c := make(vclock, min(len(a), len(b)))
	for i := range c {
		c[i] = min(a[i], b[i])
	}
	return c
}

// actor is the host or a stream: it makes accesses and learns of other actors' accesses.
type actor struct {
	id    int
	clock vclock
	// shared reports that clock was handed out by snapshot: it is copied before it changes,
	// and the actor's next access counts as later than the snapshot.
	shared bool
}

// snapshot returns the actor's clock, including its own accesses so far. The caller must
// not change it.
func (a *actor) snapshot() vclock {
	a.shared = true
	return a.clock
}

// join adds v's knowledge to the actor's.
func (a *actor) join(v vclock) {
	if a.clock.covers(v) {
		return
	}
	own := a.clock.at(a.id)
	stale := a.shared
	a.clock = slices.Clone(joined(a.clock, v))
	a.shared = false
	if stale {
		// The next access must count as later than the earlier snapshot.
		a.clock[a.id] = own + 1
	}
}

// tick makes the actor's next access later than any snapshot, and returns its time.
func (a *actor) tick() uint32 {
	if a.shared {
		a.clock = slices.Clone(a.clock)
		a.clock[a.id]++
		a.shared = false
	}
	return a.clock[a.id]
}
