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
// Without a fraction, the CPU and the link to the GPU end together, by estimates of both times from
// recent layers. One expert of a layer may be divided (see split): kernels read its first columns over
// the link, in host memory, and the CPU computes with the others. Each time has a fixed part and one for each expert (see
// estimate), so that a CPU that gets few experts, most of whose time is that of starting, does not
// look slow. Where recent layers do not tell the parts apart, or one of the two got nothing for long,
// a layer is divided otherwise now and then.
// Prefetches follow the same division: an expert that is predicted for the next layer is fetched
// only if it would arrive before the CPU had computed it.
//
// A fraction is of the selected experts in host memory, those included that are cached on the GPU. So
// which experts the CPU computes does not depend on time.
type CPUShare struct {
	// fraction of the experts; negative: as described.
	fraction float64
	rate     CPURate

	mu sync.Mutex
	// all: the CPU computes all of them, and nothing is fetched from host memory.
	all bool
	// divides: one expert of a layer may be divided, unless whole.
	divides, whole bool
	// cpu and link are estimates of the times of a layer: of 1, the experts, and their rows beyond
	// the first; and of 1 and the bytes. read is one of the time of a layer's divided expert, of 1 and the
	// bytes that kernels read; link is of layers without one. copying is the bytes of copies of the latest
	// layer. bytesPerSecond was assumed of the link lately.
	//
	// alone is of the CPU in layers of which the link got nothing: where host memory does not feed both,
	// that is less than cpu, which is of all layers, and beside times cpu, in the others.
	cpu, alone, link, read estimate
	beside                 float64
	copying                int64
	bytesPerSecond         float64
	// decided is when the latest layer was divided.
	decided time.Duration
	// layers counts divided layers; computed and copied are the latest of them in which the CPU, and
	// the link, got experts, split is the latest with a divided one, and explored the latest that was
	// divided otherwise; exploredLink and exploredAlone are the latest for the estimates of these names.
	layers, computed, copied, split, explored int
	exploredLink, exploredAlone               int
}

// CPURate is how fast the CPU computes experts where they lie, as far as it is known before it has.
type CPURate struct {
	// BytesPerSecond at which weights are read, and FlopsPerSecond of arithmetic: experts take the
	// longer of both times.
	BytesPerSecond, FlopsPerSecond float64
	// Latency of the experts of one layer: of starting threads, and of copying rows there and back.
	Latency time.Duration
}

// CPUTime is how long the CPU takes for the experts of one layer, in seconds: for the layer if there
// are any, for each expert, and for each row of an expert beyond the first.
type CPUTime struct {
	Layer, Expert, Row float64
}

// time is the time by a rate: an expert takes as long as reading its weights, or its rows' arithmetic.
func (r CPURate) time(l *kernels.ExpertLayout) CPUTime {
	reading := float64(l.Bytes()) / r.BytesPerSecond
	row := 6 * float64(l.Hidden) * float64(l.Intermediate) / r.FlopsPerSecond
	return CPUTime{Layer: r.Latency.Seconds(), Expert: max(reading, row), Row: row}
}

// AutoCPUShare is the fraction for NewCPUShare by which CPU and link end together.
const AutoCPUShare = -1

// NewCPUShare returns a share with a fraction of experts from 0 to 1, or AutoCPUShare, and the rate
// that is assumed until Computed has been called.
func NewCPUShare(fraction float64, assumed CPURate) *CPUShare {
	return &CPUShare{fraction: fraction, rate: assumed, beside: 1}
}

// Divide lets one expert of a layer be divided between the CPU and kernels that read it, where they can:
// the caller computes both parts of Use.OnCPU and adds them.
func (c *CPUShare) Divide() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.divides = true
}

// Divides reports whether one expert of a layer may be divided.
func (c *CPUShare) Divides() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.divides
}

// Restrict restricts the division of the layers from now on, where they are divided by time: with all the CPU
// computes all experts that lie in host memory alone, with whole no expert is divided.
func (c *CPUShare) Restrict(all, whole bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all, c.whole = all, whole
}

// TakesAll reports whether nothing will be fetched from host memory.
func (c *CPUShare) TakesAll() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.all || c.fraction == 1
}

// Auto reports whether layers are divided by time.
func (c *CPUShare) Auto() bool { return c.fraction < 0 }

// time is the CPU's time beside a busy link, aloneTime that beside an idle one.
func (c *CPUShare) time(l *kernels.ExpertLayout) CPUTime {
	x := c.mean(l)
	for i := range x {
		x[i] *= c.beside
	}
	return CPUTime{x[0], x[1], x[2]}
}

func (c *CPUShare) aloneTime(l *kernels.ExpertLayout) CPUTime {
	x := c.alone.coefficients(c.mean(l))
	return CPUTime{x[0], x[1], x[2]}
}

// mean are the coefficients of the CPU's time in all layers.
func (c *CPUShare) mean(l *kernels.ExpertLayout) [terms]float64 {
	return c.cpu.coefficients(c.rate.time(l).terms())
}

func (t CPUTime) terms() [terms]float64 { return [terms]float64{t.Layer, t.Expert, t.Row} }

// MissTimes are the estimated times of a layer's experts that lie in host memory alone: on the CPU, and
// over the link to the GPU, for the layer and for each byte, in seconds.
type MissTimes struct {
	CPU                 CPUTime
	LinkStart, LinkByte float64
	// ReadStart and ReadByte are of an expert that is divided, and that kernels read over the link.
	ReadStart, ReadByte float64
}

// MissTimes returns the present estimates; false: experts are not divided by time.
func (s *Store) MissTimes() (MissTimes, bool) {
	c := s.steps.cpu.share
	if c == nil || !c.Auto() {
		return MissTimes{}, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	link := c.measuredLink(hostLink{bytesPerSecond: c.bytesPerSecond})
	t := MissTimes{CPU: c.time(&s.plan.Layout), LinkStart: link.start.Seconds()}
	if link.bytesPerSecond > 0 {
		t.LinkByte = 1 / link.bytesPerSecond
		read := c.read.coefficients(c.readTerms())
		t.ReadStart, t.ReadByte = read[0], read[1]
	}
	return t, true
}

// Decided is when the latest layer was divided by time, on the machine's clock.
func (c *CPUShare) Decided() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.decided
}

// ComputedExpert is an expert that the CPU has computed: for so many rows, this share of its columns.
type ComputedExpert struct {
	Rows  int
	Share float64
}

// Computed records how long after it was divided the CPU had computed those experts of a layer that it
// got.
func (c *CPUShare) Computed(l *kernels.ExpertLayout, list []ComputedExpert, took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(list) == 0 || took <= 0 || !c.Auto() {
		return
	}
	c.computed = c.layers
	if c.copying == 0 && !slices.ContainsFunc(list, func(e ComputedExpert) bool { return e.Share < 1 }) {
		c.exploredAlone = c.layers
		c.alone.add(c.mean(l), quantities(list), took.Seconds())
	} else {
		ratio := took.Seconds() / sum(c.mean(l), quantities(list))
		c.beside += (min(ratio, outlier) - c.beside) / besideRemembered
	}
	c.cpu.add(c.rate.time(l).terms(), quantities(list), took.Seconds())
}

// allOnCPU is the time until the CPU has computed all candidates, by its time beside an idle link.
func (t CPUTime) allOnCPU(list []candidate) (seconds float64) {
	x := [terms]float64{1, float64(len(list)), 0}
	for i := range list {
		x[2] += float64(list[i].rows - 1)
	}
	return sum(t.terms(), x)
}

// quantities are the terms of the CPU's time for experts.
func quantities(list []ComputedExpert) [terms]float64 {
	x := [terms]float64{1, 0, 0}
	for _, e := range list {
		x[1] += e.Share
		x[2] += e.Share * float64(e.Rows-1)
	}
	return x
}

// ReadInPlace records how long after the layer was divided kernels had read so many bytes of its divided
// expert in host memory, and computed with them.
func (c *CPUShare) ReadInPlace(bytes int64, took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.Auto() || c.bytesPerSecond <= 0 || bytes <= 0 {
		return
	}
	x, seconds := [terms]float64{1, float64(bytes), 0}, took.Seconds()
	if c.copying > 0 { // it tells something only where copies have not held kernels up, or less than estimated
		link := c.link.coefficients(c.linkTerms())
		together := link[0] + link[1]*float64(bytes+c.copying)
		if seconds < heldUp*together && seconds > sum(c.read.coefficients(c.readTerms()), x) {
			return
		}
	}
	c.read.add(c.readTerms(), x, seconds)
}

// heldUp is the factor by which kernels that read take longer than they and copies together take of the
// link, from which on it is not for the copies.
const heldUp = 1.1

// readShare is assumed of the rate at which kernels read host memory, as a share of that of copies.
const readShare = 0.925

func (c *CPUShare) readTerms() [terms]float64 {
	return [terms]float64{linkStart.Seconds(), 1 / (readShare * c.bytesPerSecond), 0}
}

// fetching records how many bytes the link copies for the layer that was divided last.
func (c *CPUShare) fetching(bytes int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.copying = bytes
}

// linkStart is assumed of the time between a layer's division and its first byte on the link.
const linkStart = 40 * time.Microsecond

func (c *CPUShare) linkTerms() [terms]float64 {
	return [terms]float64{linkStart.Seconds(), 1 / c.bytesPerSecond, 0}
}

// Fetched records how long after the latest layer was divided kernels had computed with the experts that
// the link copied for it (see Use.AwaitsHost).
func (c *CPUShare) Fetched(took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.bytesPerSecond <= 0 || c.copying <= 0 || c.split == c.layers && c.layers > 0 {
		return // of a layer with a divided expert: kernels have read over the link, too
	}
	c.copied = c.layers
	c.link.add(c.linkTerms(), [terms]float64{1, float64(c.copying), 0}, took.Seconds())
}

// candidate is an expert that may be computed on the CPU.
type candidate struct {
	expert, rows int
	// left is the bytes that the link has still to copy; less than the whole expert where a
	// prefetch is in progress.
	left int64
	// inFlight is what of it the link copies already, and goes on with in vain where the CPU computes the
	// expert; the rest is skipped then.
	inFlight int64
}

// hostLink is the link from host memory.
type hostLink struct {
	bytesPerSecond float64
	start          time.Duration // before the first byte
	// head is how long the link can copy before the experts are needed; negative: how long it is
	// still busy with other copies.
	head time.Duration
}

// seconds until the last of these experts has arrived.
func (k hostLink) seconds(list []candidate) float64 {
	bytes := int64(0)
	for i := range list {
		bytes += list[i].left
	}
	if bytes == 0 {
		return 0
	}
	return max(k.start.Seconds()+float64(bytes)/k.bytesPerSecond-k.head.Seconds(), 0)
}

// forCPU orders candidates: the CPU gets first what the link has not begun to copy, and of that what
// has the fewest rows.
func forCPU(list []candidate) {
	slices.SortFunc(list, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(b.left, a.left), cmp.Compare(a.rows, b.rows), cmp.Compare(b.expert, a.expert))
	})
}

// divide returns how many of the first candidates the CPU computes so that all experts are there, or
// computed, as early as possible.
func (t CPUTime) divide(link hostLink, list []candidate) (onCPU int) {
	if link.bytesPerSecond <= 0 {
		return 0 // nothing to compare with
	}
	best := math.Inf(1)
	for n := range len(list) + 1 {
		if seconds := t.longer(link, list, n); seconds < best {
			onCPU, best = n, seconds
		}
	}
	return onCPU
}

// longer is the time until all experts are there if the CPU computes the first n.
func (t CPUTime) longer(link hostLink, list []candidate, n int) (seconds float64) {
	copying, computing := link.seconds(list[n:]), 0.0
	for i := range list[:n] {
		if i == 0 {
			computing = t.Layer
		}
		computing += t.Expert + t.Row*float64(list[i].rows-1)
		copying += float64(list[i].inFlight) / link.bytesPerSecond
	}
	return max(copying, computing)
}

// split is a division of one expert by its columns: kernels read the first ones in host memory, as many
// as first, and the CPU computes with the others. The zero value is none.
type split struct {
	first int
	// seconds until all experts of the layer are there or computed; linkFree of them the link is free.
	seconds, linkFree float64
}

const (
	// splitGain is the least share of the time that dividing an expert has to save: there are two
	// launches more.
	splitGain = 0.03
	// splitRows is the most rows of an expert that is divided: more do not fit into a tile of the
	// kernels, which would read its weights over the link again.
	splitRows = 16
)

// split divides candidate n, of which nothing has been copied, where the CPU computes those in front of it
// and the others are fetched: so that the CPU and the link, over which kernels read, end together.
// read are the coefficients of the estimate of that. An expert of which one of them would get nothing is
// divided only if it must be.
func (t CPUTime) split(l *kernels.ExpertLayout, link hostLink, read [terms]float64, list []candidate, n int, must bool) (s split, ok bool) {
	x := &list[n]
	if x.left < l.Size || x.rows > splitRows {
		return s, false
	}
	computing := t.Layer
	for i := range list[:n] {
		computing += t.Expert + t.Row*float64(list[i].rows-1)
	}
	// Kernels read at their own rate; together with copies, at most at the link's.
	whole := t.Expert + t.Row*float64(x.rows-1)
	start, reading := read[0]-min(link.head.Seconds(), 0), read[1]*float64(l.Size)
	copies, together := link.seconds(list[n+1:]), float64(l.Size)/link.bytesPerSecond
	share := (computing + whole - start) / (whole + reading)
	if copies > 0 {
		share = min(share, (computing+whole-copies)/(whole+together))
	}
	columns := int(math.Round(share*float64(l.Intermediate)/kernels.TileColumns)) * kernels.TileColumns
	last := (l.Intermediate - 1) / kernels.TileColumns * kernels.TileColumns
	s.first = min(max(columns, kernels.TileColumns), last)
	if s.first != columns && !must {
		return s, false
	}
	share = float64(s.first) / float64(l.Intermediate)
	busy := start + share*reading
	if copies > 0 {
		busy = max(busy, copies+share*together)
	}
	s.seconds = max(busy, computing+(1-share)*whole)
	s.linkFree = s.seconds - busy
	return s, true
}

const (
	// One layer is divided otherwise behind so many, where the CPU's estimate is degenerate; and
	// behind so many in which the CPU, or the link, got nothing. exploreCost is the most that it costs,
	// as a share of the time.
	exploreInterval = 64
	staleInterval   = 256
	exploreCost     = 0.005
	// besideRemembered is the number of layers that CPUShare.beside is a mean of.
	besideRemembered = 16
)

// division is that of a layer's candidates: the CPU computes the first ones, as many as onCPU.
type division struct {
	onCPU int
	// first is the number of columns of the next candidate that kernels read; with the others the CPU
	// computes. 0: it is fetched.
	first int
	// head is how long the link will be free while the CPU computes.
	head time.Duration
}

// divide divides the open layer, at the time now. mayRead: kernels can read host memory.
func (c *CPUShare) divide(l *kernels.ExpertLayout, link hostLink, list []candidate, mayRead bool, now time.Duration) (d division) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.decided = now
	if c.all {
		return division{onCPU: len(list)}
	}
	t, link := c.time(l), c.measuredLink(link)
	d.onCPU = t.divide(link, list)
	if len(list) == 0 || link.bytesPerSecond <= 0 {
		return d
	}
	c.layers++
	seconds, all := t.longer(link, list, d.onCPU), c.aloneTime(l).allOnCPU(list)
	if all < seconds {
		d.onCPU, seconds = len(list), all
	}
	mayRead = mayRead && c.divides && !c.whole
	switch {
	case c.dueAlone(all, seconds):
		d.onCPU, c.exploredAlone = len(list), c.layers
	case mayRead && c.dueLink(t, link, list, d.onCPU):
		d.onCPU, c.exploredLink = min(d.onCPU, len(list)-1), c.layers
	case mayRead:
		if n, s := c.bestSplit(l, t, link, list, seconds); s.first > 0 {
			c.split = c.layers
			return division{onCPU: n, first: s.first, head: time.Duration(s.linkFree * float64(time.Second))}
		}
		fallthrough
	default:
		d.onCPU = c.explore(t, link, list, d.onCPU)
	}
	free := t.longer(link, list, d.onCPU) - link.seconds(list[d.onCPU:])
	d.head = time.Duration(free * float64(time.Second))
	return d
}

// dueAlone reports whether the CPU gets all experts, for its time where nothing is on the link.
func (c *CPUShare) dueAlone(all, best float64) bool {
	layers, interval := c.layers-c.exploredAlone, staleInterval
	if c.alone.count < warmUp {
		interval = exploreInterval / 4
	}
	return layers >= interval && all < 2*best && all-best <= exploreCost*best*float64(layers)
}

// dueLink reports whether the layer is divided into whole experts, one of them copied at least, so that the
// link's time stays known where experts are divided otherwise.
func (c *CPUShare) dueLink(t CPUTime, link hostLink, list []candidate, best int) bool {
	layers, interval := c.layers-max(c.copied, c.exploredLink), staleInterval
	if c.link.count < warmUp {
		interval = exploreInterval
	}
	return layers >= interval && c.worth(t, link, list, best, min(best, len(list)-1), layers)
}

// worth reports whether another division costs little enough for so many layers.
func (c *CPUShare) worth(t CPUTime, link hostLink, list []candidate, best, other, layers int) bool {
	seconds := t.longer(link, list, best)
	return t.longer(link, list, other)-seconds <= exploreCost*seconds*float64(layers)
}

// bestSplit returns the candidate whose division ends first, if that is sooner than the seconds of whole
// experts. Where none was divided for long, one is now and then that does not end much later.
func (c *CPUShare) bestSplit(l *kernels.ExpertLayout, t CPUTime, link hostLink, list []candidate, whole float64) (candidate int, best split) {
	read := c.read.coefficients(c.readTerms())
	limit, since := (1-splitGain)*whole, c.layers-c.split
	try := since >= staleInterval
	if try {
		limit = (1 + exploreCost*float64(since)) * whole
	}
	for n := range list {
		if s, ok := t.split(l, link, read, list, n, try); ok && s.seconds <= limit {
			candidate, best, limit = n, s, s.seconds
		}
	}
	return candidate, best
}

// predict divides the experts that are predicted for the next layer.
func (c *CPUShare) predict(l *kernels.ExpertLayout, link hostLink, list []candidate) (onCPU int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.all {
		return len(list)
	}
	return c.time(l).divide(c.measuredLink(link), list)
}

// measuredLink is a link with what layers have measured of it.
func (c *CPUShare) measuredLink(link hostLink) hostLink {
	if link.bytesPerSecond <= 0 {
		return link
	}
	c.bytesPerSecond = link.bytesPerSecond
	x := c.link.coefficients(c.linkTerms())
	link.start, link.bytesPerSecond = time.Duration(x[0]*float64(time.Second)), 1/x[1]
	return link
}

// explore returns the number of experts for the CPU, which now and then is not the best one, so that
// its time, and that of the link, stay known.
func (c *CPUShare) explore(t CPUTime, link hostLink, list []candidate, best int) int {
	due := func(latest, interval, other int) bool {
		layers := c.layers - max(latest, c.explored)
		return layers >= interval && c.worth(t, link, list, best, other, layers)
	}
	other := best
	switch {
	case best == 0 && due(c.computed, staleInterval, 1):
		other = 1
	case best == len(list) && due(c.copied, staleInterval, best-1):
		other = best - 1
	case best > 0 && best < len(list) && c.cpu.degenerate() && due(0, exploreInterval, best+1):
		other = best + 1
	case best > 1 && best == len(list) && c.cpu.degenerate() && due(0, exploreInterval, best-1):
		other = best - 1
	}
	if other != best {
		c.explored = c.layers
	}
	return other
}

// HostExpert is an expert to be computed on the CPU, where it lies.
type HostExpert struct {
	Expert int
	// Range is its extent, in pinned host memory.
	device.Range
	// First is the number of its first columns with which kernels compute, which read them at ReadAt; the
	// CPU computes with the others. 0: the CPU computes all of it.
	First  int
	ReadAt device.Addr
}

// cpuWork is the part of an open layer that the CPU computes.
type cpuWork struct {
	share *CPUShare // nil: none
	// rows of each expert in this use.
	rows []int
	// list is what chooseCPU selected, chose the same for Use.OnCPU. Of the last one of list kernels
	// read as many columns as first.
	list  []candidate
	first int
	chose []HostExpert
	// head: see hostLink, for the next layer's experts.
	head time.Duration
	// mapped is the number of the latest step for which it was asked where kernels read host memory.
	mapped uint64
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
		left, inFlight, fromHost := s.fetch.left(id)
		switch {
		case !fromHost:
			continue
		case !w.share.Auto():
			left, inFlight = size, 0 // wherever it is meanwhile
		case left == 0, s.fetch.has(id) && predicted:
			continue // it is there, or being fetched
		case s.fetch.has(id):
			begun += left
		}
		w.list = append(w.list, candidate{expert: e, rows: w.rows[e], left: left, inFlight: inFlight})
	}
	forCPU(w.list)
	w.first = 0
	n := int(math.Round(w.share.fraction * float64(len(w.list))))
	if w.share.Auto() {
		link := hostLink{bytesPerSecond: s.fetch.links.Rate(device.Host)}
		if predicted {
			link.head = w.head // for the next layer's experts, behind this one's
			n = w.share.predict(&s.plan.Layout, link, w.list)
		} else {
			if link.bytesPerSecond > 0 {
				link.head = -time.Duration(float64(max(0, s.fetch.hostBytesLeft()-begun)) / link.bytesPerSecond * float64(time.Second))
			}
			d := w.share.divide(&s.plan.Layout, link, w.list, s.hostReadable(), s.now())
			n, w.first, w.head = d.onCPU, d.first, d.head
			if w.first > 0 {
				n++
			}
		}
	}
	w.list = w.list[:n]
	for _, c := range w.list {
		marked[c.expert] = false
	}
}

// awaitLink tells the share how much the link copies for the open layer, and reports whether these experts
// wait for copies from host memory alone.
func (s *steps) awaitLink(position int, missing []int) (waits bool) {
	share := s.cpu.share
	if share == nil || !share.Auto() {
		return false
	}
	share.fetching(s.fetch.hostBytesLeft())
	for _, e := range missing {
		for _, c := range s.fetch.slotFetch(ID{position, e}).copies {
			switch {
			case c.ticket.Ended():
			case c.from != device.Host:
				return false
			default:
				waits = true
			}
		}
	}
	return waits
}

// computeOnCPU unmarks those of the open layer's routed experts that the CPU computes, counts them, and
// leaves them in cpuWork.chose.
func (s *steps) computeOnCPU(position int, chosen []int32) {
	if s.cpu.share == nil {
		return
	}
	s.countRows(chosen)
	s.chooseCPU(position, s.layers[position].routed, false)
	w := &s.cpu
	w.chose = w.chose[:0]
	for i, c := range w.list {
		s.counts.use(position, c.expert, Host)
		x := HostExpert{Expert: c.expert, Range: s.places.hostRegion(ID{position, c.expert}).Range}
		if i == len(w.list)-1 && w.first > 0 {
			x.First, x.ReadAt = w.first, x.Addr+s.inPlace.hostOffset
			read := s.plan.Layout.Bytes() * int64(x.First) / int64(s.plan.Layout.Intermediate)
			s.counts.ReadInPlace[Host] += read
			s.counts.ReadDivided += read
		}
		w.chose = append(w.chose, x)
	}
	slices.SortFunc(w.chose, func(a, b HostExpert) int { return cmp.Compare(a.Expert, b.Expert) })
	s.counts.OnCPU += int64(len(w.chose))
}

// countRows counts how often each expert is chosen, in s.cpu.rows.
func (s *steps) countRows(chosen []int32) {
	clear(s.cpu.rows)
	for _, e := range chosen {
		s.cpu.rows[e]++
	}
}

// hostReadable reports whether kernels of this step can read experts in host memory, at the address in
// inPlace.hostOffset.
func (s *steps) hostReadable() bool {
	x := s.inPlace
	if x.memory == nil || x.unavailable != nil || !s.plan.Layout.Divisible() {
		return false
	}
	if s.cpu.mapped != s.number { // it may have been suspended and resumed
		if x.mapHost(s.places.host) != nil {
			return false
		}
		s.cpu.mapped = s.number
	}
	return true
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

// left is the bytes that a copy from host memory has still to bring of an offloaded expert, and those of them
// that are in flight; 0 if it is cached. false: its copy is from a peer, or would be.
func (f *fetcher) left(id ID) (bytes, inFlight int64, fromHost bool) {
	if !f.has(id) {
		return f.plan.Layout.Size, 0, f.peerBackoff > 0 || f.peers.Find(id) == nil
	}
	a := f.slotFetch(id)
	for _, c := range a.copies {
		if c.ticket != nil && !c.ticket.Ended() {
			bytes += c.bytes - c.ticket.Landed()
			inFlight += c.ticket.InFlight()
		}
	}
	bytes = min(bytes, f.plan.Layout.Size)
	return bytes, min(inFlight, bytes), a.from == Host
}
