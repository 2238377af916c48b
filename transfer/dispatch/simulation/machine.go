package simulation

import (
	"math"
	"slices"
	"time"
)

// Machine is a host with GPUs.
type Machine struct {
	GPUs int
	// PCIe is the rate of each GPU's link with the host, in each direction, and NVLink that of its
	// port to and from other GPUs, in bytes per second.
	PCIe, NVLink float64
	// Roots are rates that several GPUs' links with the host share, in each direction.
	Roots []Root
	// Flows are copies of other programs. Changes are changes of links' rates.
	Flows   []Flow
	Changes []Change
	// Notice is how long after the end of a copy the host learns of it: at random between these.
	Notice [2]time.Duration
	// Enqueue is what the host needs for one chunk, Start the device from one copy to the next.
	Enqueue, Start time.Duration
}

// Root is a rate that several GPUs' links share, in bytes per second.
type Root struct {
	GPUs []int
	Rate float64
}

// Flow is a copy between the host and a GPU, on its link, for some time.
type Flow struct {
	GPU      int
	From, To time.Duration
}

// Change sets the rate of a GPU's link, in bytes per second.
type Change struct {
	GPU  int
	At   time.Duration
	Rate float64
}

// wire is a capacity that copies share. Those of GPU g are pcie(g), root of it, port(g).
type wires struct {
	m        *Machine
	capacity []float64
	root     []int // of each GPU; -1: none
}

func (m *Machine) wires(now time.Duration) *wires {
	w := &wires{m: m, root: slices.Repeat([]int{-1}, m.GPUs)}
	for range m.GPUs {
		w.capacity = append(w.capacity, m.PCIe)
	}
	for _, c := range m.Changes { // in order of time
		if c.At <= now {
			w.capacity[c.GPU] = c.Rate
		}
	}
	for range 2 * m.GPUs {
		w.capacity = append(w.capacity, m.NVLink)
	}
	for i, r := range m.Roots {
		for _, g := range r.GPUs {
			w.root[g] = 3*m.GPUs + i
		}
		w.capacity = append(w.capacity, r.Rate)
	}
	return w
}

// host is what a copy between the host and a GPU uses, peer one from a GPU to another.
func (w *wires) host(g int) []int {
	if w.root[g] < 0 {
		return []int{g}
	}
	return []int{g, w.root[g]}
}

func (w *wires) peer(from, to int) []int { return []int{w.m.GPUs + from, 2*w.m.GPUs + to} }

// share divides the wires' capacities between copies, of which each uses some: all grow until a
// wire is full, whose copies stay there.
func (w *wires) share(uses [][]int) []float64 {
	rates := make([]float64, len(uses))
	left := slices.Clone(w.capacity)
	growing := make([]bool, len(uses))
	for i := range growing {
		growing[i] = true
	}
	for {
		users := make([]int, len(left))
		for i, u := range uses {
			if growing[i] {
				for _, k := range u {
					users[k]++
				}
			}
		}
		step := math.Inf(1)
		for k, n := range users {
			if n > 0 {
				step = min(step, left[k]/float64(n))
			}
		}
		if math.IsInf(step, 1) {
			return rates
		}
		for k, n := range users {
			left[k] -= step * float64(n)
		}
		for i, u := range uses {
			if growing[i] {
				rates[i] += step
				growing[i] = !slices.ContainsFunc(u, func(k int) bool { return left[k] <= w.capacity[k]*1e-9 })
			}
		}
	}
}

// flows are the copies of other programs at a time.
func (m *Machine) flows(w *wires, now time.Duration) (uses [][]int) {
	for _, f := range m.Flows {
		if f.From <= now && now < f.To {
			uses = append(uses, w.host(f.GPU))
		}
	}
	return uses
}

// next is when flows or rates change after now.
func (m *Machine) next(now time.Duration) time.Duration {
	next := time.Duration(math.MaxInt64)
	at := func(t time.Duration) {
		if t > now {
			next = min(next, t)
		}
	}
	for _, f := range m.Flows {
		at(f.From)
		at(f.To)
	}
	for _, c := range m.Changes {
		at(c.At)
	}
	return next
}

// Oracle is when copies of these bytes, one after the other, to or from the first GPU would
// end at best, from the time begin on.
func (m *Machine) Oracle(bytes int64, begin time.Duration) time.Duration {
	left, now := float64(bytes), begin
	for {
		w := m.wires(now)
		uses := m.flows(w, now)
		n := len(uses)
		for g := range m.GPUs {
			uses = append(uses, w.host(g))
		}
		rate, relayed := 0.0, 0.0
		for g, r := range w.share(uses)[n:] {
			if g > 0 {
				relayed += r
			} else {
				rate += r
			}
		}
		rate += min(relayed, m.NVLink)
		next := m.next(now)
		if end := now + seconds(left/rate); end <= next {
			return end
		}
		left -= rate * (next - now).Seconds()
		now = next
	}
}

// Static is when a copy would end of which each GPU's link copies a share.
func (m *Machine) Static(bytes int64, shares []float64, begin time.Duration) time.Duration {
	left := make([]float64, m.GPUs)
	for g := range left {
		left[g] = float64(bytes) * shares[g]
	}
	now := begin
	for {
		w := m.wires(now)
		uses := m.flows(w, now)
		n := len(uses)
		var of []int
		for g := range left {
			if left[g] > 0.5 {
				uses, of = append(uses, w.host(g)), append(of, g)
			}
		}
		if len(of) == 0 {
			return now
		}
		rates := w.share(uses)[n:]
		next := m.next(now)
		for i, g := range of {
			next = min(next, now+max(1, seconds(left[g]/rates[i])))
		}
		for i, g := range of {
			left[g] -= rates[i] * (next - now).Seconds()
		}
		now = next
	}
}

func seconds(s float64) time.Duration { return time.Duration(math.Ceil(s * 1e9)) }
