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

// first is the first request by class and submission for which is returns true, or nil. If
// that takes turns, it is the one of those that do of which the least was launched.
func (q *queue) first(is func(*Request) bool) *Request {
	for class := Classes - 1; class >= 0; class-- {
		var found *Request
		for _, r := range q.byClass[class] {
			switch {
			case !is(r):
			case found == nil:
				found = r
			case r.TakesTurns && r.launched < found.launched:
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

// all lists the requests, highest class first.
func (q *queue) all() []*Request {
	var l []*Request
	for class := Classes - 1; class >= 0; class-- {
		l = append(l, q.byClass[class]...)
	}
	return l
}
