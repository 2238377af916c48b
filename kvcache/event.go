package kvcache

// MediumGPU is the medium of a Manager's events: the memory of the GPU that computes.
const MediumGPU = "GPU"

// Event reports blocks that sequences can find in a medium from now on (Stored), or can no longer
// (Removed). One of the two is empty. Every key that is stored is removed once, before it is stored in that
// medium again; so who applies all events in their order has the set of the keys that can be found.
//
// Nobody changes an event's slices: Stored and Tokens are those of the sequence.
type Event struct {
	// Medium is MediumGPU, or the name of a tier.
	Medium string
	// Stored are the keys of successive blocks: those of the GPU, also where a tier's hold several of them.
	Stored []Key
	// Parent is the key of the block before the first of Stored. Zero: there is none, or it is unknown.
	Parent Key
	// Tokens of the Stored blocks, where they are known.
	Tokens []int32
	// Removed are keys in no order that means anything.
	Removed []Key
}

// TakeEvents returns what happened since the last call, in order, if ManagerOptions.Events is set.
func (m *Manager) TakeEvents() []Event {
	e := m.events
	m.events = nil
	return e
}

// stored reports that blocks [first, end) of a sequence got their keys.
func (m *Manager) stored(t *Table, first, end int) {
	if !m.record || first == end {
		return
	}
	e := Event{Medium: MediumGPU, Stored: t.keys[first:end:end]}
	if first > 0 {
		e.Parent = t.keys[first-1]
	}
	if b := m.blockTokens; len(t.tokens) >= end*b {
		e.Tokens = t.tokens[first*b : end*b : end*b]
	}
	m.events = append(m.events, e)
}

// removed reports that a key has no block any more.
func (m *Manager) removed(k Key) {
	if !m.record {
		return
	}
	if n := len(m.events); n > 0 && len(m.events[n-1].Removed) > 0 {
		m.events[n-1].Removed = append(m.events[n-1].Removed, k)
		return
	}
	m.events = append(m.events, Event{Medium: MediumGPU, Removed: []Key{k}})
}
