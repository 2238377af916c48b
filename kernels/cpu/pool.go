package cpu

import (
	"sync"
	"sync/atomic"
	"time"
)

// pool is a fixed set of goroutines that help the callers of parallel. Several goroutines may
// call it at once.
type pool struct {
	set     *instructions
	threads int
	spin    time.Duration
	regions chan *region
	workers sync.WaitGroup
	scratch sync.Pool // *[]float32
	tile    sync.Pool // *scratch
}

// region is one parallel loop: a counter distributes its parts, and the last one to end closes
// done.
type region struct {
	body  func(part int)
	parts int64
	next  atomic.Int64
	ended atomic.Int64
	done  chan struct{}
}

func newPool(threads int, s *instructions, spin time.Duration) *pool {
	p := &pool{set: s, threads: threads, spin: spin, regions: make(chan *region, threads)}
	for range threads - 1 {
		p.workers.Go(func() {
			for r := p.next(); r != nil; r = p.next() {
				r.work()
			}
		})
	}
	return p
}

// next waits for a region; nil: the pool is closed. It polls for a while before it sleeps.
func (p *pool) next() *region {
	if p.spin > 0 {
		for start := time.Now(); time.Since(start) < p.spin; {
			select {
			case r := <-p.regions:
				return r
			default:
			}
		}
	}
	return <-p.regions
}

// close ends the goroutines; no call of parallel may be in progress.
func (p *pool) close() {
	close(p.regions)
	p.workers.Wait()
}

// parallel calls body for each part in [0, parts), on up to threads goroutines including the
// caller's, and returns when all parts have ended.
func (p *pool) parallel(parts int, body func(part int)) {
	helpers := min(p.threads, parts) - 1
	if helpers <= 0 {
		for i := range parts {
			body(i)
		}
		return
	}
	r := &region{body: body, parts: int64(parts), done: make(chan struct{})}
offer:
	for range helpers {
		select {
		case p.regions <- r:
		default: // all are busy with other regions: continue without
			break offer
		}
	}
	r.work()
	if p.spin > 0 {
		for start := time.Now(); r.ended.Load() < r.parts && time.Since(start) < p.spin; {
		}
	}
	<-r.done
}

func (r *region) work() {
	for {
		i := r.next.Add(1) - 1
		if i >= r.parts {
			return
		}
		r.body(int(i))
		if r.ended.Add(1) == r.parts {
			close(r.done)
		}
	}
}

// floats returns a scratch buffer of at least n elements with undefined content; the caller
// returns it by release.
func (p *pool) floats(n int) *[]float32 {
	s, _ := p.scratch.Get().(*[]float32)
	if s == nil || cap(*s) < n {
		s = new([]float32)
		*s = make([]float32, n+n/4)
	}
	*s = (*s)[:n]
	return s
}

func (p *pool) release(s *[]float32) { p.scratch.Put(s) }

// tiles returns the scratch memory of a GEMM's part; the caller returns it by releaseTile.
func (p *pool) tiles() *scratch {
	if s, _ := p.tile.Get().(*scratch); s != nil {
		return s
	}
	return new(scratch)
}

func (p *pool) releaseTile(s *scratch) { p.tile.Put(s) }

// split divides n units of work, each of the given cost in multiply-adds, into parts large
// enough to be worth another goroutine, a multiple of step units each. It returns the units of
// one part.
func split(n, cost, step int) int {
	const worth = 32 << 10
	units := max(worth/max(cost, 1), 1)
	return min((units+step-1)/step*step, max(n, 1))
}

// rows runs body over [0, n) in parts: rows [from, to), each of the given cost.
func (p *pool) rows(n, cost int, body func(from, to int)) {
	each := split(n, cost, 1)
	if each >= n {
		if n > 0 {
			body(0, n)
		}
		return
	}
	p.parallel((n+each-1)/each, func(part int) {
		body(part*each, min((part+1)*each, n))
	})
}
