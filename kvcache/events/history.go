package events

import "sync"

// maxKeptBytes is how much of encoded batches is kept at most, beside the last one.
const maxKeptBytes = 64 << 20

// history keeps the last batches, encoded, for subscribers and for replays. Any goroutine may use it.
type history struct {
	most int // batches

	mu     sync.Mutex
	grown  sync.Cond
	first  uint64 // number of kept[0]
	kept   [][]byte
	bytes  int
	events int64 // of all batches
	closed bool
}

func newHistory(most int) *history {
	h := &history{most: most}
	h.grown.L = &h.mu
	return h
}

// add keeps the next batch, of so many events.
func (h *history) add(payload []byte, events int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events += int64(events)
	h.kept = append(h.kept, payload)
	h.bytes += len(payload)
	for len(h.kept) > h.most || h.bytes > maxKeptBytes && len(h.kept) > 1 {
		h.bytes -= len(h.kept[0])
		h.kept[0] = nil
		h.kept = h.kept[1:]
		h.first++
	}
	h.grown.Broadcast()
}

// added returns how many batches and events were added: also those that a reader has just got.
func (h *history) added() (batches, events int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return int64(h.end()), h.events
}

// end is the number of the next batch. mu is held.
func (h *history) end() uint64 { return h.first + uint64(len(h.kept)) }

// close ends all waiting.
func (h *history) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	h.grown.Broadcast()
}

// from returns batch n, or the first one behind it that is kept; false: there is none.
func (h *history) from(n uint64) (number uint64, payload []byte, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n = max(n, h.first); h.closed || n >= h.end() {
		return 0, nil, false
	}
	return n, h.kept[n-h.first], true
}

// reader is the place of a subscriber in the history. Its history's mu guards it.
type reader struct {
	next uint64
	// topics are how often it has subscribed to each prefix; on: one of them is that of the topic.
	topics map[string]int
	on     bool
	gone   bool
}

// change changes what a reader has subscribed to. It gets the batches that come from then on.
func (h *history) change(r *reader, topic, prefix string, subscribe bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if subscribe {
		if len(r.topics) < maxTopics || r.topics[prefix] > 0 {
			r.topics[prefix]++
		}
	} else if r.topics[prefix]--; r.topics[prefix] <= 0 {
		delete(r.topics, prefix)
	}
	on := false
	for p := range r.topics {
		on = on || len(p) <= len(topic) && topic[:len(p)] == p
	}
	if on && !r.on {
		r.next = h.end()
	}
	r.on = on
	h.grown.Broadcast()
}

// leave ends the waiting of a reader.
func (h *history) leave(r *reader) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r.gone = true
	h.grown.Broadcast()
}

// await waits for the next batch of a reader. One that is more than so many batches behind, or behind all that are
// kept, has missed some. ok is false when the reader has left, or the history is closed.
func (h *history) await(r *reader, behind int) (number uint64, payload []byte, missed uint64, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for !h.closed && !r.gone && (!r.on || r.next == h.end()) {
		h.grown.Wait()
	}
	if h.closed || r.gone {
		return 0, nil, 0, false
	}
	number = max(r.next, h.first)
	if end := h.end(); end-number > uint64(behind) {
		number = end - uint64(behind)
	}
	missed, r.next = number-r.next, number+1
	return number, h.kept[number-h.first], missed, true
}
