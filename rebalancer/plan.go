package rebalancer

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/moeserve/moeserve/experts"
)

// Stats are the rates and the placement of the experts.
type Stats struct {
	// Bytes of one expert.
	Bytes int64
	// Rates of use per second, [position of the layer][expert]; SingleUse is the rate
	// that results from a single use. See Rates.
	Rates     [][]float64
	SingleUse float64
	// Placed is where each expert lives.
	Placed [][]experts.Placed
	// Dynamic: resident experts may be swapped.
	Dynamic bool
}

// Capacity is the links and the free peer memory.
type Capacity struct {
	// Host is the link from host memory.
	Host experts.Link
	// Peers that may be used.
	Peers []Peer
	// Places is the free lent memory of the GPU, as the number of experts that fit. FillPlaces: all
	// of it is used, also by experts that are used little.
	Places     int
	FillPlaces bool
}

// Peer is a peer whose memory is borrowed.
type Peer struct {
	// Link from the peer.
	experts.Link
	// Free is the number of further experts that fit.
	Free int
	// NotBefore is the end of the back-off after a refused allocation: nothing is
	// promoted to the peer before.
	NotBefore time.Duration
}

// Tuning sets when a move is worthwhile.
type Tuning struct {
	// Hysteresis is the minimum ratio of the benefits of an expert and the one that it
	// replaces. At least 1. Default: 1.25.
	Hysteresis float64
	// Horizon is the time for which rates are assumed to hold: a move must pay for its
	// own copy within it. Default: 10 s.
	Horizon time.Duration
	// Deviations is the minimum difference of the two experts' rates, in standard
	// deviations of the counts; negative: any difference. Default: 2.
	Deviations float64
}

// EnsureDefaults returns t with every unset field at its default.
func (t Tuning) EnsureDefaults() Tuning {
	setDefault(&t.Hysteresis, 1.25)
	setDefault(&t.Horizon, 10*time.Second)
	setDefault(&t.Deviations, 2)
	return t
}

func setDefault[T comparable](field *T, to T) {
	var zero T
	if *field == zero {
		*field = to
	}
}

// Kind is what a move does.
type Kind uint8

const (
	// Promote gives In, which is only in host memory, a copy in free peer memory.
	Promote Kind = iota
	// Replace demotes Out, then promotes In. In and Out are the same if an expert is
	// moved to a faster peer.
	Replace
	// Swap makes In resident in place of Out, which is of the same layer.
	Swap
	// MakeResident makes In resident in lent memory of the GPU: in a free place where Out is In,
	// and otherwise in place of Out, of any layer.
	MakeResident
)

func (k Kind) String() string { return [...]string{"promote", "replace", "swap", "make resident"}[k] }

// Move is one migration.
type Move struct {
	Kind Kind
	In   experts.ID
	// Out makes room; unused for Promote.
	Out experts.ID
	// To are the peers that may hold the copy, as indices into Capacity.Peers: they are
	// equally fast, and together have room for all moves that name them.
	To []int
	// Gain is the expected benefit: seconds of copies saved per second, per byte
	// migrated.
	Gain float64
}

func (m Move) String() string {
	s := fmt.Sprintf("%v %d/%d", m.Kind, m.In.Layer, m.In.Expert)
	if m.Kind != Promote && m.Out != m.In || m.Kind == Replace {
		s += fmt.Sprintf(" for %d/%d", m.Out.Layer, m.Out.Expert)
	}
	if m.Kind != Swap && m.Kind != MakeResident {
		s += fmt.Sprint(" to ", m.To)
	}
	return s
}

const (
	// Gains that differ by less than similarGains count as equal when free memory is
	// assigned. Among links whose rates differ by less than similarLinks harvest's policy
	// selects: rates are measured while other copies run.
	similarGains, similarLinks = 1.1, 1.3
	// Assumed rates of links whose rate is unknown: 16 lanes of PCIe 5 from the host, in
	// bytes per second, and for peers NVLink, as a multiple of the host link's.
	nominalHost = 55e9
	nominalPeer = 7
)

// Plan returns moves, the most rewarding first. Any number from the front may be carried
// out. It is pure, and equal arguments give equal plans.
//
// An offloaded expert costs its rate of use times the seconds of a fetch from where it
// is. Free peer memory, the fastest first, goes to the experts that gain most by it,
// among all that are used at all. Among experts with about equal gains, each layer gets
// the same share of its offloaded experts; if every step fetches whole layers, that alone
// decides. Before any use all experts count the same.
//
// An expert replaces another only if its benefit is Hysteresis times as large, the
// difference is significant (Deviations), and the benefit within Horizon exceeds the
// copy's cost.
func Plan(s Stats, c Capacity, t Tuning, now time.Duration) []Move {
	return newPlanner(s, c, t, now, false).plan()
}

// item is one expert that may be moved.
type item struct {
	id   experts.ID
	rate float64
	// at is the class of the peer that has a copy, hostMemory or residentMemory.
	at int
	// peer that has a copy.
	peer int
	// lent: it is resident in lent memory. planned: the plan already moves the expert.
	lent, planned bool
	// gain of the move being considered, in seconds per second; rank is the gain of the
	// first of the experts with similar gains; share is the fraction of the layer's
	// offloaded experts on peers if this one and those before it in the layer are moved.
	gain, rank, share float64
}

const (
	hostMemory     = math.MaxInt
	residentMemory = -1
)

// class is a group of equally fast peers.
type class struct {
	// peers, and those of them without a back-off.
	peers, open []int
	// seconds of a fetch.
	seconds float64
	free    int
}

type planner struct {
	stats Stats
	t     Tuning
	host  float64 // seconds of a fetch from host memory
	// classes, the fastest first.
	classes []class
	peers   []Peer
	items   []*item
	// Number of experts of each layer on peers, offloaded, resident, and in all.
	onPeers, offloaded, resident, all []int
	places                            int
	fillPlaces                        bool
	moves                             []*move
}

// move is a Move with its sort key.
type move struct {
	Move
	rank float64
}

// newPlanner prepares the plan. force: peers that are slower than the host are used, too.
func newPlanner(s Stats, c Capacity, t Tuning, now time.Duration, force bool) *planner {
	p := &planner{stats: s, t: t.EnsureDefaults(), peers: c.Peers}
	rate := c.Host.BytesPerSecond
	if rate <= 0 {
		rate = nominalHost
	}
	p.host = float64(s.Bytes) / rate
	p.classify(rate, now, force)
	on := map[int]int{} // peer to class
	for i, cl := range p.classes {
		for _, k := range cl.peers {
			on[k] = i
		}
	}
	for _, of := range []*[]int{&p.onPeers, &p.offloaded, &p.resident, &p.all} {
		*of = make([]int, len(s.Placed))
	}
	p.places, p.fillPlaces = c.Places, c.FillPlaces
	for l, placed := range s.Placed {
		p.all[l] = len(placed)
		for e, h := range placed {
			it := &item{id: experts.ID{Layer: l, Expert: e}, rate: s.Rates[l][e], at: hostMemory}
			switch h.Tier {
			case experts.Resident:
				it.at, it.lent = residentMemory, h.Lent
				p.resident[l]++
			case experts.Peer:
				p.onPeers[l]++
				p.offloaded[l]++
				k := slices.IndexFunc(c.Peers, func(p Peer) bool { return p.From == h.Device })
				cl, ok := on[k]
				if !ok {
					continue // on a peer that is not used any more
				}
				it.at, it.peer = cl, k
			default:
				p.offloaded[l]++
				if h.Moving {
					p.onPeers[l]++
				}
			}
			if !h.Moving {
				p.items = append(p.items, it)
			}
		}
	}
	return p
}

// classify groups the peers into classes.
func (p *planner) classify(host float64, now time.Duration, force bool) {
	seconds := func(k int) float64 {
		rate := p.peers[k].BytesPerSecond
		if rate <= 0 {
			rate = nominalPeer * host
		}
		return float64(p.stats.Bytes) / rate
	}
	var order []int
	for k := range p.peers {
		if force || seconds(k) < p.host {
			order = append(order, k)
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(seconds(a), seconds(b)) })
	var first float64
	for _, k := range order {
		s := seconds(k)
		if len(p.classes) == 0 || s > similarLinks*first {
			p.classes = append(p.classes, class{})
			first = s
		}
		cl := &p.classes[len(p.classes)-1]
		cl.peers, cl.seconds = append(cl.peers, k), s
		if now >= p.peers[k].NotBefore {
			cl.free += max(p.peers[k].Free, 0)
			cl.open = append(cl.open, k)
		}
	}
	for _, cl := range p.classes {
		slices.Sort(cl.open)
	}
}

func (p *planner) plan() []Move {
	if p.stats.Dynamic {
		p.swap()
	}
	p.makeResident()
	for k := range p.classes {
		p.fill(k)
		p.replace(k)
	}
	slices.SortStableFunc(p.moves, func(a, b *move) int { return cmp.Compare(b.rank, a.rank) })
	moves := make([]Move, len(p.moves))
	for i, m := range p.moves {
		moves[i] = m.Move
	}
	return moves
}

// seconds of a fetch of an offloaded expert from where it is.
func (p *planner) seconds(it *item) float64 {
	if it.at == hostMemory {
		return p.host
	}
	return p.classes[it.at].seconds
}

// worthwhile reports whether in should replace out (nil: use free memory), for a gain and
// a loss in seconds per second.
func (p *planner) worthwhile(in, out *item, gain, loss float64) bool {
	if gain <= loss*p.t.Hysteresis || (gain-loss)*p.t.Horizon.Seconds() < p.host {
		return false
	}
	if out == nil {
		return true
	}
	// The variance of a rate is half of the rate times SingleUse, see Rates.
	chance := math.Sqrt((in.rate + out.rate) * p.stats.SingleUse / 2)
	return in.rate-out.rate > p.t.Deviations*chance
}

func (p *planner) add(kind Kind, in, out *item, to []int, gain, rank float64) {
	m := Move{Kind: kind, In: in.id, To: to, Gain: gain / float64(p.stats.Bytes)}
	if out != nil {
		m.Out = out.id
	}
	p.moves = append(p.moves, &move{m, rank})
	in.planned = true
	if out != nil {
		out.planned = true
	}
}

// swap makes the most used experts of each layer resident.
func (p *planner) swap() {
	for l := range p.stats.Placed {
		var resident, offloaded []*item
		for _, it := range p.items {
			switch {
			case it.id.Layer != l || it.planned:
			case it.lent:
			case it.at == residentMemory:
				resident = append(resident, it)
			default:
				it.gain = it.rate * p.seconds(it)
				offloaded = append(offloaded, it)
			}
		}
		byID := func(a, b *item) int { return cmp.Compare(a.id.Expert, b.id.Expert) }
		slices.SortFunc(resident, func(a, b *item) int { return cmp.Or(cmp.Compare(a.rate, b.rate), byID(a, b)) })
		slices.SortFunc(offloaded, func(a, b *item) int { return cmp.Or(cmp.Compare(b.gain, a.gain), byID(a, b)) })
		for i := range min(len(resident), len(offloaded)) {
			in, out := offloaded[i], resident[i]
			loss := out.rate * p.host
			if !p.worthwhile(in, out, in.gain, loss) {
				break
			}
			p.add(Swap, in, out, nil, in.gain-loss, in.gain-loss)
		}
	}
}

// makeResident brings the most used experts to lent memory of the GPU: first to free places, then
// in place of others there.
func (p *planner) makeResident() {
	var there []*item
	for _, it := range p.items {
		if it.lent && !it.planned {
			there = append(there, it)
		}
	}
	if p.places <= 0 && len(there) == 0 {
		return
	}
	slices.SortStableFunc(there, func(a, b *item) int { return cmp.Compare(a.rate, b.rate) })
	for _, in := range p.candidates(residentMemory) {
		switch {
		case p.places > 0:
			if p.fillPlaces || p.worthwhile(in, nil, in.gain, 0) {
				p.places--
				p.resident[in.id.Layer]++
				p.add(MakeResident, in, in, nil, in.gain, in.rank)
			}
		case len(there) == 0:
			return
		default:
			out := there[0]
			loss := out.rate * p.host
			if !p.worthwhile(in, out, in.gain, loss) {
				return
			}
			there = there[1:]
			p.add(MakeResident, in, out, nil, in.gain-loss, in.rank-loss)
		}
	}
}

// candidates for promotion to the class, or to the GPU's memory, in order of preference.
func (p *planner) candidates(k int) []*item {
	var cs []*item
	seconds, present, of := 0.0, p.resident, p.all
	if k != residentMemory {
		seconds, present, of = p.classes[k].seconds, p.onPeers, p.offloaded
	}
	for _, it := range p.items {
		if it.at > k && !it.planned {
			it.gain = it.rate * (p.seconds(it) - seconds)
			cs = append(cs, it)
		}
	}
	byID := func(a, b *item) int {
		return cmp.Or(cmp.Compare(a.id.Layer, b.id.Layer), cmp.Compare(a.id.Expert, b.id.Expert))
	}
	slices.SortFunc(cs, func(a, b *item) int { return cmp.Or(cmp.Compare(b.gain, a.gain), byID(a, b)) })
	present = slices.Clone(present)
	one := p.stats.SingleUse * (p.host - seconds)
	for from := 0; from < len(cs); {
		to := from
		for to < len(cs) && (cs[to].gain > 0) == (cs[from].gain > 0) && (cs[to].gain+one)*similarGains >= cs[from].gain {
			it := cs[to]
			it.rank = cs[from].gain
			if it.at == hostMemory || k == residentMemory {
				present[it.id.Layer]++
			}
			it.share = float64(present[it.id.Layer]) / float64(of[it.id.Layer])
			to++
		}
		slices.SortFunc(cs[from:to], func(a, b *item) int { return cmp.Or(cmp.Compare(a.share, b.share), byID(a, b)) })
		from = to
	}
	return cs
}

// noneUsed reports whether no expert was used yet.
func (p *planner) noneUsed() bool {
	for _, rates := range p.stats.Rates {
		for _, r := range rates {
			if r > 0 {
				return false
			}
		}
	}
	return true
}

// fill assigns the class's free memory.
func (p *planner) fill(k int) {
	cl := &p.classes[k]
	if cl.free == 0 {
		return
	}
	all := p.noneUsed()
	for _, it := range p.candidates(k) {
		if cl.free == 0 {
			return
		}
		switch {
		case it.at == hostMemory && (it.rate > 0 || all):
			p.onPeers[it.id.Layer]++
			p.add(Promote, it, nil, cl.open, it.gain, it.rank)
		case it.at != hostMemory && p.worthwhile(it, nil, it.gain, 0):
			p.add(Replace, it, it, cl.open, it.gain, it.rank)
		default:
			continue
		}
		cl.free--
	}
}

// replace replaces the least used experts in the class by more used ones in slower
// memory.
func (p *planner) replace(k int) {
	var present []*item
	for _, it := range p.items {
		if it.at == k && !it.planned && slices.Contains(p.classes[k].open, it.peer) {
			present = append(present, it)
		}
	}
	slices.SortStableFunc(present, func(a, b *item) int { return cmp.Compare(a.rate, b.rate) })
	incoming := p.candidates(k)
	for i := range min(len(present), len(incoming)) {
		in, out := incoming[i], present[i]
		loss := out.rate * (p.host - p.classes[k].seconds)
		if !p.worthwhile(in, out, in.gain, loss) {
			break
		}
		p.add(Replace, in, out, p.classes[k].open, in.gain-loss, in.rank-loss)
	}
}
