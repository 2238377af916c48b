package cpu

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// pool is a fixed set of goroutines that help the callers of parallel. Several goroutines may
// call it at once; helpers then join the call that began last.
type pool struct {
	set     *instructions
	threads int
	spin    time.Duration
	// latest is the loop that was begun last, or nil once it has ended.
	latest atomic.Pointer[region]
	closed atomic.Bool
	// asleep is how many helpers receive from wake, or will.
	asleep  atomic.Int32
	wake    chan struct{}
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
	p := &pool{set: s, threads: threads, spin: spin, wake: make(chan struct{}, threads)}
	for range threads - 1 {
		p.workers.Go(func() {
			for r := p.join(); r != nil; r = p.join() {
				r.work()
			}
		})
	}
	return p
}

const (
	// pauses between two looks of a goroutine that polls: about 0.1 us.
	pauses = 3
	// looks after which it reads the clock, or lets others run.
	looks = 64
)

// join waits for a loop that has parts left; nil: the pool is closed. It polls for a while before
// it sleeps.
func (p *pool) join() *region {
	for {
		for start := time.Now(); ; {
			for range looks {
				if r := p.latest.Load(); r != nil && r.next.Load() < r.parts {
					return r
				}
				pause(pauses)
			}
			if p.closed.Load() {
				return nil
			}
			if p.spin == 0 || time.Since(start) > p.spin {
				break
			}
		}
		// A loop that is begun from here on is seen, or sends.
		p.asleep.Add(1)
		if r := p.latest.Load(); (r == nil || r.next.Load() >= r.parts) && !p.closed.Load() {
			<-p.wake
		}
		p.asleep.Add(-1)
	}
}

// close ends the goroutines; no call of parallel may be in progress.
func (p *pool) close() {
	p.closed.Store(true)
	close(p.wake)
	p.workers.Wait()
}

// parallel calls body for each part in [0, parts), on up to threads goroutines including the
// caller's, and returns when all parts have ended. Parts begin in their order, so body may wait for
// parts before its own.
func (p *pool) parallel(parts int, body func(part int)) {
	helpers := min(p.threads, parts) - 1
	if helpers <= 0 {
		for i := range parts {
			body(i)
		}
		return
	}
	r := &region{body: body, parts: int64(parts), done: make(chan struct{})}
	p.latest.Store(r)
wake:
	for range min(helpers, int(p.asleep.Load())) {
		select {
		case p.wake <- struct{}{}:
		default: // all have been woken already
			break wake
		}
	}
	r.work()
	p.latest.CompareAndSwap(r, nil)
	if p.spin > 0 {
		for start := time.Now(); r.ended.Load() < r.parts && time.Since(start) < p.spin; {
			pause(pauses)
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

// waitFor waits until a counter, which running goroutines advance, has reached n.
func waitFor(counter *atomic.Int32, n int) {
	for i := 1; counter.Load() < int32(n); i++ {
		if pause(pauses); i%looks == 0 {
			runtime.Gosched()
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
