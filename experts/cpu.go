package experts

import (
	"cmp"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// CPUShare decides which of the experts that a router selected, and that lie in host memory alone,
// the CPU computes there; the others are fetched. Its methods may be called from several goroutines.
//
// Without a fraction, the CPU and the link to the GPU end together, as far as whole experts allow,
// by their measured rates. Prefetches follow the same division: an expert that is predicted for the
// next layer is fetched only if it would arrive before the CPU had computed it.
//
// A fraction is of the experts that are neither cached nor being fetched. With 1 the CPU computes
// all that have no peer copy, even if they are cached: which experts it computes does not depend on
// time.
type CPUShare struct {
	// fraction of the experts; negative: as described. 1: also of those in the expert cache.
	fraction float64

	mu   sync.Mutex
	rate CPURate
}

// CPURate is how fast the CPU computes experts where they lie.
type CPURate struct {
	// BytesPerSecond at which weights are read, and FlopsPerSecond of arithmetic: experts take the
	// longer of both times.
	BytesPerSecond, FlopsPerSecond float64
	// Latency of the experts of one layer: of starting threads, and of copying rows there and back.
	Latency time.Duration
}

// AutoCPUShare is the fraction for NewCPUShare by which CPU and link end together.
const AutoCPUShare = -1

// NewCPUShare returns a share with a fraction of experts from 0 to 1, or AutoCPUShare, and the rate
// that is assumed until Measured has been called.
func NewCPUShare(fraction float64, assumed CPURate) *CPUShare {
	return &CPUShare{fraction: fraction, rate: assumed}
}

// Rate is the recent rate.
func (c *CPUShare) Rate() CPURate {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rate
}

// Measured averages the rate with that of experts of one layer, which the CPU computed in the time
// took, for these numbers of rows.
func (c *CPUShare) Measured(l *kernels.ExpertLayout, rows []int, took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	expected := c.rate.seconds(l, rows) - c.rate.Latency.Seconds()
	if took <= 0 || expected <= 0 {
		return
	}
	// Whatever bounds the time was off by this factor; one measurement counts an eighth.
	off := 1 + (expected/took.Seconds()-1)/8
	off = min(max(off, 0.5), 2)
	if c.rate.readsLonger(l, rows) {
		c.rate.BytesPerSecond *= off
	} else {
		c.rate.FlopsPerSecond *= off
	}
}

// seconds is the time of experts of one layer with these numbers of rows; 0 for none.
func (r CPURate) seconds(l *kernels.ExpertLayout, rows []int) float64 {
	if len(rows) == 0 {
		return 0
	}
	t := r.Latency.Seconds()
	for _, n := range rows {
		t += r.one(l, n)
	}
	return t
}

// one is the time of one expert, without the latency.
func (r CPURate) one(l *kernels.ExpertLayout, rows int) float64 {
	return max(r.reading(l), float64(rows)*r.row(l))
}

// reading is the time of reading an expert's weights, row that of one row's arithmetic.
func (r CPURate) reading(l *kernels.ExpertLayout) float64 {
	return float64(l.Bytes()) / r.BytesPerSecond
}

func (r CPURate) row(l *kernels.ExpertLayout) float64 {
	return 6 * float64(l.Hidden) * float64(l.Intermediate) / r.FlopsPerSecond
}

// readsLonger reports whether most of these experts take the time of reading their weights.
func (r CPURate) readsLonger(l *kernels.ExpertLayout, rows []int) bool {
	all := 0
	for _, n := range rows {
		all += n
	}
	return float64(len(rows))*r.reading(l) >= float64(all)*r.row(l)
}

// candidate is an expert that may be computed on the CPU.
type candidate struct {
	expert, rows int
	// left is the bytes that the link has still to copy; less than the whole expert where a
	// prefetch is in progress.
	left int64
}

// hostLink is the link from host memory.
type hostLink struct {
	bytesPerSecond float64
	latency        time.Duration // of a copy
	// head is how long the link can copy before the experts are needed; negative: how long it is
	// still busy with other copies.
	head time.Duration
}

// seconds until the last of these experts has arrived.
func (k hostLink) seconds(list []candidate) float64 {
	t := -k.head.Seconds()
	for i := range list {
		t += k.latency.Seconds() + float64(list[i].left)/k.bytesPerSecond
	}
	return max(t, 0)
}

// forCPU orders candidates: the CPU gets first what the link has not begun to copy, and of that what
// has the fewest rows.
func forCPU(list []candidate) {
	slices.SortFunc(list, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(b.left, a.left), cmp.Compare(a.rows, b.rows), cmp.Compare(b.expert, a.expert))
	})
}

// divide returns how many of the first candidates the CPU computes so that all experts are there,
// or computed, as early as possible, and the time until then. A copy in progress goes on, in vain,
// where the CPU computes its expert.
func (r CPURate) divide(l *kernels.ExpertLayout, link hostLink, list []candidate) (onCPU int, seconds float64) {
	if link.bytesPerSecond <= 0 {
		return 0, 0 // nothing to compare with
	}
	computing, vain := 0.0, 0.0
	seconds = math.Inf(1)
	for n := 0; ; n++ {
		copying := 0.0
		if n < len(list) {
			copying = link.seconds(list[n:]) + vain
		}
		if t := max(copying, computing); t < seconds {
			onCPU, seconds = n, t
		}
		if n == len(list) {
			return onCPU, seconds
		}
		if n == 0 {
			computing = r.Latency.Seconds()
		}
		computing += r.one(l, list[n].rows)
		if list[n].left < l.Size {
			vain += float64(list[n].left) / link.bytesPerSecond
		}
	}
}

// HostExpert is an expert to be computed on the CPU, where it lies.
type HostExpert struct {
	Expert int
	// Range is its extent, in pinned host memory.
	device.Range
}

// linkLatency is assumed of the copies of experts from host memory.
const linkLatency = 20 * time.Microsecond

// cpuWork is the part of an open layer that the CPU computes.
type cpuWork struct {
	share *CPUShare // nil: none
	// rows of each expert in this use.
	rows []int
	// list is what chooseCPU selected, chose the same for Use.OnCPU.
	list  []candidate
	chose []HostExpert
	// head: see hostLink, for the next layer's experts.
	head time.Duration
}

// chooseCPU unmarks those experts that the CPU computes among the marked ones of a layer, and leaves
// them in cpuWork.list. predicted: they are those predicted for the next layer.
func (s *steps) chooseCPU(position int, marked []bool, predicted bool) {
	w := &s.cpu
	w.list = w.list[:0]
	size, begun := s.plan.Layout.Size, int64(0)
	for e := range marked {
		id := ID{position, e}
		if !marked[e] || s.places.resident(id) {
			continue
		}
		left, fromHost := s.fetch.left(id)
		switch {
		case !fromHost:
			continue
		case w.share.fraction == 1:
			left = size
		case left == 0, s.fetch.has(id) && (predicted || w.share.fraction >= 0):
			continue // it is there, or being fetched
		case s.fetch.has(id):
			begun += left
		}
		w.list = append(w.list, candidate{expert: e, rows: w.rows[e], left: left})
	}
	forCPU(w.list)
	n := int(math.Round(w.share.fraction * float64(len(w.list))))
	if w.share.fraction < 0 {
		link := hostLink{bytesPerSecond: s.fetch.links.Rate(device.Host), latency: linkLatency}
		if predicted {
			link.head = w.head
		} else if link.bytesPerSecond > 0 {
			link.head = -time.Duration(float64(max(0, s.fetch.hostBytesLeft()-begun)) / link.bytesPerSecond * float64(time.Second))
		}
		var seconds float64
		n, seconds = w.share.Rate().divide(&s.plan.Layout, link, w.list)
		if !predicted && link.bytesPerSecond > 0 {
			// The link is free for the next layer's experts from when it has copied this one's.
			w.head = time.Duration((seconds - link.seconds(w.list[n:])) * float64(time.Second))
		}
	}
	w.list = w.list[:n]
	for _, c := range w.list {
		marked[c.expert] = false
	}
}

// computeOnCPU unmarks those of the open layer's routed experts that the CPU computes, counts and
// returns them.
func (s *steps) computeOnCPU(position int, chosen []int32) []HostExpert {
	if s.cpu.share == nil {
		return nil
	}
	s.countRows(chosen)
	s.chooseCPU(position, s.layers[position].routed, false)
	w := &s.cpu
	w.chose = w.chose[:0]
	for _, c := range w.list {
		s.counts.use(position, c.expert, Host)
		w.chose = append(w.chose, HostExpert{Expert: c.expert, Range: s.places.hostRegion(ID{position, c.expert}).Range})
	}
	slices.SortFunc(w.chose, func(a, b HostExpert) int { return cmp.Compare(a.Expert, b.Expert) })
	s.counts.OnCPU += int64(len(w.chose))
	return w.chose
}

// countRows counts how often each expert is chosen, in s.cpu.rows.
func (s *steps) countRows(chosen []int32) {
	clear(s.cpu.rows)
	for _, e := range chosen {
		s.cpu.rows[e]++
	}
}

// hostBytesLeft is the bytes that fetches from host memory have still to bring.
func (f *fetcher) hostBytesLeft() (bytes int64) {
	for _, c := range f.fetches {
		if c.from == device.Host && c.ticket != nil && !c.ticket.Ended() {
			bytes += c.bytes - c.ticket.Landed()
		}
	}
	return bytes
}

// left is the bytes that a copy from host memory has still to bring of an offloaded expert; 0 if it
// is cached. false: its copy is from a peer, or would be.
func (f *fetcher) left(id ID) (bytes int64, fromHost bool) {
	if !f.has(id) {
		return f.plan.Layout.Size, f.peerBackoff > 0 || f.peers.Find(id) == nil
	}
	a := f.slotFetch(id)
	for _, c := range a.copies {
		if c.ticket != nil && !c.ticket.Ended() {
			bytes += c.bytes - c.ticket.Landed()
		}
	}
	return min(bytes, f.plan.Layout.Size), a.from == Host
}
