package dispatch

import (
	"cmp"
	"slices"

	"github.com/moeserve/moeserve/device"
)

// queue holds the requests for one destination that have bytes left to launch, including
// those that wait for points.
type queue struct {
	to device.Space
	// byClass is in order of submission.
	byClass [Classes][]*Request
}

func bySeq(r *Request, seq uint64) int { return cmp.Compare(r.seq, seq) }

func (q *queue) insert(r *Request) {
	l := q.byClass[r.Class]
	i, _ := slices.BinarySearchFunc(l, r.seq, bySeq)
	q.byClass[r.Class] = slices.Insert(l, i, r)
}

// remove removes r and reports whether it was in the queue.
func (q *queue) remove(r *Request) bool {
	l := q.byClass[r.Class]
	i, ok := slices.BinarySearchFunc(l, r.seq, bySeq)
	if ok = ok && l[i] == r; ok {
		q.byClass[r.Class] = slices.Delete(l, i, i+1)
	}
	return ok
}

// first is the first request by class and submission for which is returns true, or nil.
func (q *queue) first(is func(*Request) bool) *Request {
	for class := Classes - 1; class >= 0; class-- {
		if i := slices.IndexFunc(q.byClass[class], is); i >= 0 {
			return q.byClass[class][i]
		}
	}
	return nil
}

// next is the request whose chunk the link takes next, or nil: the first by class and
// submission that it can carry and whose points are reached. If that takes turns, it is the
// one of those that do which has the least virtual time at the end of its next chunk. With
// relayed, it is the one of which a relay takes a chunk.
func (q *queue) next(l *link, relayed bool) *Request {
	var waiting int64 // bytes, for the link
	for class := Classes - 1; class >= 0; class-- {
		var found *Request
		if relayed && waiting < l.RelayFrom {
			waiting += q.bytes(l, class, l.RelayFrom)
		}
		for _, r := range q.byClass[class] {
			switch {
			case len(r.waiting) > 0 || !l.carries(r):
			case relayed && (r.launched == r.bytes || !l.shares(r, waiting)):
			case found == nil:
				found = r
			case r.TakesTurns && l.before(r, found):
				found = r
			}
			if found != nil && !found.TakesTurns {
				break
			}
		}
		if found != nil {
			return found
		}
	}
	return nil
}

// before reports whether a's turn is before b's, which was submitted earlier.
func (l *link) before(a, b *Request) bool {
	ends := func(r *Request) int64 { return r.turn + l.nextBytes(r) }
	return cmp.Or(cmp.Compare(ends(a), ends(b)), cmp.Compare(a.launched, b.launched)) < 0
}

// nextBytes is the maximum size of the next chunk of a queued request.
func (l *link) nextBytes(r *Request) int64 {
	if len(r.returned) > 0 {
		return r.returned[0].chunk.Bytes
	}
	return chunkSize(r.bytes-r.launched, l.ChunkBytes)
}

// bytes is the number of bytes of a class that the link could launch and relays could carry,
// counted until there are enough.
func (q *queue) bytes(l *link, class int, enough int64) (n int64) {
	for _, r := range q.byClass[class] {
		if n >= enough {
			break
		}
		if len(r.waiting) == 0 && !r.Direct && l.carries(r) {
			n += r.bytes - r.launched
		}
	}
	return n
}

// has reports whether r is in the queue.
func (q *queue) has(r *Request) bool {
	l := q.byClass[r.Class]
	i, ok := slices.BinarySearchFunc(l, r.seq, bySeq)
	return ok && l[i] == r
}

// join lets a request begin to take turns, or to take them in another class: at the virtual
// time of those that do, so that it has no claim to what was launched before.
func (l *link) join(r *Request) { r.turn = l.virtual[r.Class] }

// took counts a chunk that the request has launched.
func (l *link) took(r *Request, bytes int64) {
	r.turn += bytes
	l.virtual[r.Class] = max(l.virtual[r.Class], r.turn)
}

// all lists the requests, highest class first.
func (q *queue) all() []*Request {
	var l []*Request
	for class := Classes - 1; class >= 0; class-- {
		l = append(l, q.byClass[class]...)
	}
	return l
}
