package emulated

import (
	"math"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/moeserve/moeserve/device"
)

// flow is one copy or Work in progress: an amount that drains over its resources after a
// delay. Copies drain bytes over links; Work drains seconds of its processor, which
// provides one second per second.
type flow struct {
	stream *stream
	// resources are the indices into fluid.rates of the resources that have a limit.
	resources []int
	// limit is the flow's own maximum rate; 0: none.
	limit float64
	// left is the amount still to drain, rate the current rate per second.
	left, rate float64
	// start is the time at which the delay ends.
	start         time.Duration
	running, done bool
	// wake is signaled, on the wall clock, when the flow has ended or may end earlier.
	wake chan struct{}
}

// fluid shares the rates of resources max-min fairly among flows: all flows' rates grow
// alike until a resource is saturated or a flow is at its own limit.
type fluid struct {
	// rates of the resources; 0: unlimited.
	rates []float64
	// at is the time to which the flows have been advanced.
	at    time.Duration
	flows []*flow
	// background are flows of other programs, limits other rates of resources, for some time.
	background []*background
	limits     []limit
	// room, users, active and fixed are scratch space of share.
	room   []float64
	users  []int
	active []*flow
	fixed  []*flow
}

// flow returns the flow of o, or nil if o takes no time.
func (m *Machine) flow(s *stream, o *op) *flow {
	fl := &flow{stream: s, start: max(m.clock()+o.stallTime, o.noticed)}
	if o.kind == opCopy {
		p := m.topo.Paths[device.Pair{From: o.srcMem.space.id, To: o.dstMem.space.id}]
		fl.start += p.Latency
		fl.limit = p.BytesPerSecond
		for _, l := range p.Links {
			if m.fluid.rates[l] > 0 {
				fl.resources = append(fl.resources, l)
			}
		}
		if fl.limit > 0 || len(fl.resources) > 0 {
			fl.left = float64(o.bytes)
		}
	} else {
		i, _ := m.topo.Info(s.sp.id)
		if i.FlopsPerSecond > 0 {
			fl.left = float64(o.work.Flops) / i.FlopsPerSecond
		}
		if i.BytesPerSecond > 0 {
			fl.left = max(fl.left, float64(o.work.Bytes)/i.BytesPerSecond)
		}
		fl.resources = []int{len(m.topo.Links) + int(s.sp.id)}
	}
	if fl.left == 0 && fl.start <= m.clock() {
		return nil
	}
	if !m.o.Virtual {
		fl.wake = make(chan struct{}, 1)
	}
	return fl
}

// add starts a flow at f.at.
func (f *fluid) add(fl *flow) {
	fl.running = fl.start <= f.at
	f.flows = append(f.flows, fl)
	f.share()
}

// end returns when fl ends at the current rates or, if fl has not started, when its delay
// ends.
func (f *fluid) end(fl *flow) time.Duration {
	switch {
	case !fl.running:
		return fl.start
	case fl.left <= 0:
		return f.at
	}
	return f.at + time.Duration(math.Ceil(fl.left/fl.rate*1e9))
}

// next returns the time at which the first flow starts or ends, or rates change before; false if there
// is no flow.
func (f *fluid) next() (time.Duration, bool) {
	if len(f.flows) == 0 {
		return 0, false
	}
	first := f.change()
	for _, fl := range f.flows {
		first = min(first, f.end(fl))
	}
	return first, true
}

// advance drains all flows up to time to and calls ended for each flow that ends.
func (f *fluid) advance(to time.Duration, ended func(*flow)) {
	for {
		t, ok := f.next()
		if !ok || t > to {
			break
		}
		f.drain(t)
		for _, fl := range f.flows {
			if !fl.running {
				fl.running = fl.start <= t
			}
			// An amount that drains in 0.001 ns is rounding error.
			fl.done = fl.running && fl.left <= fl.rate*1e-12
		}
		f.flows = slices.DeleteFunc(f.flows, func(fl *flow) bool {
			if fl.done {
				ended(fl)
			}
			return fl.done
		})
		f.share()
		for _, fl := range f.flows {
			fl.signalWake()
		}
	}
	f.drain(to)
}

func (fl *flow) signalWake() {
	if fl.wake == nil {
		return
	}
	select {
	case fl.wake <- struct{}{}:
	default:
	}
}

func (f *fluid) drain(to time.Duration) {
	dt := (to - f.at).Seconds()
	if dt <= 0 {
		return
	}
	f.at = to
	for _, fl := range f.flows {
		if fl.running {
			fl.left -= fl.rate * dt
		}
	}
}

// share sets the rates of all running flows.
func (f *fluid) share() {
	active := f.sharing()
	f.users = append(f.users[:0], make([]int, len(f.rates))...)
	open := len(active)
	for _, fl := range active {
		for _, r := range fl.resources {
			f.users[r]++
		}
	}
	for open > 0 {
		// The minimum share, of a resource or of a flow's own limit, is final for the flows
		// that it bounds.
		tightest := math.Inf(1)
		for r, n := range f.users {
			if n > 0 {
				tightest = min(tightest, f.room[r]/float64(n))
			}
		}
		for _, fl := range active {
			if fl.rate == 0 && fl.limit > 0 {
				tightest = min(tightest, fl.limit)
			}
		}
		// Rounding may leave a resource with no rate; no flow may have rate 0.
		tightest = max(tightest, 1e-9)
		for _, fl := range active {
			if fl.rate == 0 && f.bound(fl, tightest) {
				fl.rate = tightest
				open--
				f.fixed = append(f.fixed, fl)
			}
		}
		for _, fl := range f.fixed {
			for _, r := range fl.resources {
				f.room[r] = max(f.room[r]-tightest, 0)
				f.users[r]--
			}
		}
		f.fixed = f.fixed[:0]
	}
}

// bound reports whether tightest is the rate of fl.
func (f *fluid) bound(fl *flow, tightest float64) bool {
	if math.IsInf(tightest, 1) || fl.limit > 0 && fl.limit <= tightest {
		return true
	}
	for _, r := range fl.resources {
		if f.room[r]/float64(f.users[r]) <= tightest*(1+1e-12) {
			return true
		}
	}
	return false
}

// Timers of the Go runtime may be 1 ms late, the system's sleep about 1/20 of that: pace
// sleeps on a timer until timerSlack before the end, then in short system sleeps, and spins
// for the remaining spin.
const (
	timerSlack = 2 * time.Millisecond
	spin       = 60 * time.Microsecond
)

// pace waits on the wall clock until fl has ended. The lock is held on entry and return,
// and released while waiting.
func (m *Machine) pace(fl *flow) {
	for {
		m.fluid.advance(m.clock(), ended)
		if fl.done {
			return
		}
		end := min(m.fluid.end(fl), m.fluid.change())
		m.mu.Unlock()
		fl.sleep(end - m.wall.Now())
		m.mu.Lock()
	}
}

// sleep waits for at most left; it returns early when the flow may end earlier.
func (fl *flow) sleep(left time.Duration) {
	switch {
	case left > timerSlack:
		timer := time.NewTimer(left - timerSlack)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-fl.wake:
		}
	case left > spin:
		// The result is ignored: the caller checks the clock again.
		ts := unix.NsecToTimespec(int64(min(left-spin, spin*4)))
		_ = unix.Nanosleep(&ts, nil)
	default:
		runtime.Gosched()
	}
}
