package transfer

import (
	"slices"

	"github.com/moeserve/moeserve/device"
)

// request is a Request on its way.
type request struct {
	Request
	ticket Ticket
	after  []device.Point
	seq    uint64
	// mark is raised when the request has ended either way. Done cannot say so: its
	// fence may be failed by a later request while this one is still under way.
	mark device.Point
	// ready: all After points are reached.
	ready bool
	// issued bytes were given to the device, landed ones have arrived.
	issued, landed int64
	// flying is how many chunks are with the device.
	flying int
	// failure is why nothing more of it goes there.
	failure error
	// ended: Done was raised, or failed with err. forgone: it was raised without a copy.
	ended, forgone bool
	err            error
}

// chunk is a piece of a request.
type chunk struct {
	req       *request
	offset, n int64
}

// queue holds the requests of one link that have bytes left to give to the
// device. It is pure: it decides the order and nothing else.
type queue struct {
	// byPriority are in order of submission.
	byPriority [priorities][]*request
	seq        uint64
}

// push adds a request behind those of its priority.
func (q *queue) push(r *request) {
	q.seq++
	r.seq = q.seq
	q.insert(r)
}

func (q *queue) insert(r *request) {
	l := q.byPriority[r.Priority]
	i, _ := slices.BinarySearchFunc(l, r.seq, func(x *request, seq uint64) int {
		if x.seq < seq {
			return -1
		}
		return 1
	})
	q.byPriority[r.Priority] = slices.Insert(l, i, r)
}

// promote gives r a higher priority, among whose requests it stands where its
// submission puts it. A lower one changes nothing.
func (q *queue) promote(r *request, p Priority) {
	if p <= r.Priority {
		return
	}
	queued := q.remove(r)
	r.Priority = p
	if queued {
		q.insert(r)
	}
}

// remove takes r out and reports whether it was in.
func (q *queue) remove(r *request) bool {
	l := q.byPriority[r.Priority]
	i := slices.Index(l, r)
	if i < 0 {
		return false
	}
	q.byPriority[r.Priority] = slices.Delete(l, i, i+1)
	return true
}

// next takes out the chunk that goes now: of the first ready request of the
// highest priority. Requests that are not ready are passed over.
func (q *queue) next(chunkBytes int64) (chunk, bool) {
	for p := priorities - 1; p >= 0; p-- {
		for _, r := range q.byPriority[p] {
			if !r.ready {
				continue
			}
			c := chunk{req: r, offset: r.issued, n: part(r.Src.Bytes-r.issued, chunkBytes)}
			r.issued += c.n
			if r.issued == r.Src.Bytes {
				q.remove(r)
			}
			return c, true
		}
	}
	return chunk{}, false
}

// part is the next chunk of so many bytes: they are cut into equal ones, as few as
// chunkBytes allows. A small rest would end before the device has been given the chunk
// behind it, and the link would stand still.
func part(bytes, chunkBytes int64) int64 {
	n := (bytes + chunkBytes - 1) / chunkBytes
	each := (bytes + n - 1) / n
	return min(device.Align(each), chunkBytes, bytes)
}

// all lists the requests, the most urgent first.
func (q *queue) all() []*request {
	var l []*request
	for p := priorities - 1; p >= 0; p-- {
		l = append(l, q.byPriority[p]...)
	}
	return l
}
